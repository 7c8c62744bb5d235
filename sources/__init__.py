"""Where frames come from. Knows nothing of models, results or sinks."""

from sources.base import Source, SourceError, SourceInfo
from sources.choose import open_source
from sources.file import FileSource
from sources.frame import CaptureClock, Frame, RgbImage
from sources.pictures import PictureSource

__all__ = [
    "CaptureClock",
    "FileSource",
    "Frame",
    "PictureSource",
    "RgbImage",
    "Source",
    "SourceError",
    "SourceInfo",
    "open_source",
]

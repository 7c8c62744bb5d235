"""Where frames come from. Knows nothing of models, results or sinks."""

from sources.address import redact
from sources.base import Source, SourceError, SourceInfo
from sources.choose import open_source
from sources.decoder import HwAccel
from sources.file import FileSource
from sources.frame import CaptureClock, Frame, RgbImage
from sources.link import LinkStatus, LiveError, Reason, State
from sources.live import LiveSource
from sources.pictures import PictureSource
from sources.rtsp_client import Transport

__all__ = [
    "CaptureClock",
    "FileSource",
    "Frame",
    "HwAccel",
    "LinkStatus",
    "LiveError",
    "LiveSource",
    "PictureSource",
    "Reason",
    "RgbImage",
    "Source",
    "SourceError",
    "SourceInfo",
    "State",
    "Transport",
    "open_source",
    "redact",
]

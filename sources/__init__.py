"""Video sources: files, images, cameras and WebRTC publishers. Each source yields decoded frames."""

from saccade.sources.base import Source, SourceInfo
from saccade.sources.errors import LiveError, Reason, SourceError
from saccade.sources.factory import check_source, open_source
from saccade.sources.file import FileSource
from saccade.sources.frame import CaptureClock, Frame, RgbImage
from saccade.sources.gpu import HwAccel
from saccade.sources.images import ImageSource
from saccade.sources.live.connection import StreamStats
from saccade.sources.live.reconnect import LinkStatus, State
from saccade.sources.live.source import LiveSource
from saccade.sources.planes import YuvPlanes
from saccade.sources.rtsp.connection import Loss
from saccade.sources.rtsp.transport import Transport
from saccade.sources.urls import redact

__all__ = [
    "CaptureClock",
    "FileSource",
    "Frame",
    "HwAccel",
    "ImageSource",
    "LinkStatus",
    "LiveError",
    "LiveSource",
    "Loss",
    "Reason",
    "RgbImage",
    "Source",
    "SourceError",
    "SourceInfo",
    "State",
    "StreamStats",
    "Transport",
    "YuvPlanes",
    "check_source",
    "open_source",
    "redact",
]

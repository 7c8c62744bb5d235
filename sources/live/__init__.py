"""Live streams of all protocols: connecting, reconnecting, low-latency decoding and continuous timestamps."""

from saccade.sources.live.connection import LiveConnection, LiveFrame
from saccade.sources.live.ffmpeg import FfmpegConnection, FfmpegInput
from saccade.sources.live.reconnect import Link, LinkStatus, State
from saccade.sources.live.source import LiveSource

__all__ = [
    "FfmpegConnection",
    "FfmpegInput",
    "Link",
    "LinkStatus",
    "LiveConnection",
    "LiveFrame",
    "LiveSource",
    "State",
]

"""Decodes H.264, H.265 and whatever FFmpeg knows with no delay, on the GPU where there is one.

Knows coded frames in and frames out, nothing of where they come from.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Literal

import av
import av.error
from av.codec.hwaccel import HWAccel
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from saccade.sources.errors import SourceError

log = logging.getLogger(__name__)

HwAccel = Literal["auto", "cuda", "none"]
"""Decode on the GPU if there is one, insist on it, or leave it alone."""

LIVE_BASE = Fraction(1, 90_000)
"""Time base of every live stream: that of RTP, WebRTC and MPEG-TS."""

_THREADS = 4  # a camera's frame has one slice or a few; 16 cameras on 64 cores do not want 1024 threads


def gpu_decoding(hwaccel: HwAccel) -> HWAccel | None:
    """PyAV's handle for decoding on the GPU; None for the CPU.

    Raises:
        SourceError: if the GPU is insisted on and cannot decode.
    """
    if hwaccel == "none":
        return None
    try:
        # Not PyAV's own fall back: it would start a context for each stream that says nothing of what really runs.
        handle = HWAccel("cuda", allow_software_fallback=True)
        _ = av.CodecContext.create("h264", "r", hwaccel=handle)
    except (av.error.FFmpegError, RuntimeError, NotImplementedError, ValueError) as error:
        if hwaccel == "cuda":
            raise SourceError("hwaccel cuda: no GPU that FFmpeg can decode with; use auto or none") from error
        return None
    return handle


class Decoder:
    """One decoder of one connection.

    Args:
        codec: FFmpeg's name of the codec.
        parameter_sets: what must be known before the first frame, behind start codes; may be empty.
        hwaccel: whether to use the GPU.

    Raises:
        SourceError: if the GPU is insisted on and cannot decode.
        ValueError: if there is no such decoder.
    """

    def __init__(self, codec: str, parameter_sets: bytes = b"", hwaccel: HwAccel = "none") -> None:
        gpu = gpu_decoding(hwaccel)
        context = av.CodecContext.create(codec, "r", hwaccel=gpu)
        if not isinstance(context, VideoCodecContext):
            raise ValueError(f"{codec} is no video codec")
        if parameter_sets:
            context.extradata = parameter_sets
        set_live(context)
        self._context = context

    @property
    def name(self) -> str:
        """What runs, such as "h264" or "h264 (cuda)"; certain once a frame is decoded."""
        return running(self._context)

    def decode(self, data: bytes, pts: int) -> list[VideoFrame]:
        """Decode one access unit whose time is `pts`, in units of `LIVE_BASE`.

        Raises:
            FFmpegError: if it is damaged.
        """
        packet = av.Packet(data)
        packet.pts = packet.dts = pts
        packet.time_base = LIVE_BASE
        return self._context.decode(packet)

    def forget(self) -> None:
        """Begin anew with the next frame, which is a key."""
        self._context.flush_buffers()


def set_live(context: VideoCodecContext) -> None:
    """Make a decoder hand on every frame at once: threads by FRAME hold back one each, hundreds of ms."""
    context.thread_type = "SLICE"
    context.thread_count = _THREADS
    context.flags |= av.codec.context.Flags.low_delay


def running(context: VideoCodecContext) -> str:
    """What a decoder runs on, for people."""
    return f"{context.name} (cuda)" if context.is_hwaccel else str(context.name)

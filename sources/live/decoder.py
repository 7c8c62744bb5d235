"""Decodes H.264, H.265 and whatever else FFmpeg knows without delay, on the GPU where there is one.

Coded frames in, decoded ones out. Knows nothing of where they come from.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Literal

import av
import av.error
from av.codec.hwaccel import HWAccel
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from saccade.sources.errors import SourceError
from saccade.sources.live.clock import LIVE_BASE

log = logging.getLogger(__name__)

HwAccel = Literal["auto", "cuda", "none"]
"""Decode on the GPU if there is one, require it, or decode on the CPU."""

_NICE = 10  # of decoding, beside what computes results
_THREADS = 4  # a camera's frame has few slices; without a limit 16 cameras on 64 cores would have 1024 threads


def gpu_decoding(hwaccel: HwAccel) -> HWAccel | None:
    """PyAV's handle for decoding on the GPU; None for the CPU.

    Raises:
        SourceError: if the GPU is required and cannot decode.
    """
    if hwaccel == "none":
        return None
    try:
        # Not PyAV's own fallback: it would start a context for each stream that does not tell what really runs.
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
        show_damaged: return frames with missing parts as well, concealed as far as possible.

    Raises:
        SourceError: if the GPU is required and cannot decode.
        ValueError: if there is no such decoder.
    """

    def __init__(
        self, codec: str, parameter_sets: bytes = b"", hwaccel: HwAccel = "none", *, show_damaged: bool = False
    ) -> None:
        gpu = gpu_decoding(hwaccel)
        context = av.CodecContext.create(codec, "r", hwaccel=gpu)
        if not isinstance(context, VideoCodecContext):
            raise ValueError(f"{codec} is no video codec")
        if parameter_sets:
            context.extradata = parameter_sets
        set_live(context)
        if show_damaged:
            context.flags |= av.codec.context.Flags.output_corrupt
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
        """Start again at the next frame, which is a key."""
        self._context.flush_buffers()


def set_live(context: VideoCodecContext) -> None:
    """Make a decoder return every frame at once: threads by FRAME hold back one each, hundreds of ms."""
    context.thread_type = "SLICE"
    context.thread_count = _THREADS
    context.flags |= av.codec.context.Flags.low_delay


def running(context: VideoCodecContext) -> str:
    """What a decoder runs on, to be shown."""
    return f"{context.name} (cuda)" if context.is_hwaccel else str(context.name)


def decode_behind_the_model() -> None:
    """Let the calling thread, and what a decoder starts from it, have only what others leave of the processor.

    Where decoding has more to do than there are cores, the model would get one thread's share among all of theirs, and
    answer on frames that are old by then. Six 4K cameras at 25 fps on two cores, nano: 1.0 frames/s, 4.4 s old at the
    95th percentile without this, 3.7 frames/s and 2.2 s with it. Only on Linux do threads have priorities.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))

"""Decodes H.264, H.265 and whatever else FFmpeg knows without delay, on the GPU where there is one.

Coded frames in, decoded ones out. Knows nothing of where they come from.
"""

from __future__ import annotations

import os
import sys
import threading
from fractions import Fraction

import av
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from saccade.sources.gpu import HwAccel, gpu_decoding, primary_context, running
from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.rgb import pixel_aspect_of

_NICE = 10  # of decoding, beside what computes results
_THREADS = 4  # a camera's frame has few slices; without a limit 16 cameras on 64 cores would have 1024 threads


class Decoder:
    """One decoder of one connection.

    Args:
        codec: FFmpeg's name of the codec.
        parameter_sets: what must be known before the first frame, behind start codes; may be empty.
        hwaccel: whether to use the GPU.
        gpu: as in `gpu_decoding`.
        show_damaged: return frames with missing parts as well, concealed as far as possible.

    Raises:
        SourceError: if the GPU is required and cannot decode.
        ValueError: if there is no such decoder.
    """

    def __init__(
        self,
        codec: str,
        parameter_sets: bytes = b"",
        hwaccel: HwAccel = "none",
        *,
        gpu: int | None = None,
        show_damaged: bool = False,
    ) -> None:
        handle = gpu_decoding(hwaccel, gpu)
        with primary_context(gpu if handle else None):
            context = av.CodecContext.create(codec, "r", hwaccel=handle)
        if not isinstance(context, VideoCodecContext):
            raise ValueError(f"{codec} is no video codec")
        if parameter_sets:
            context.extradata = parameter_sets
        set_live(context)
        if show_damaged:
            context.flags |= av.codec.context.Flags.output_corrupt
        self._context = context
        self._first = ""  # pixel format of the first frame

    @property
    def name(self) -> str:
        """What runs, such as "h264" or "h264 (cuda)"; certain once a frame is decoded."""
        return running(self._context, self._first)

    @property
    def pixel_aspect(self) -> Fraction:
        """Width of a pixel by its height, as the newest frame has it."""
        return pixel_aspect_of(self._context.sample_aspect_ratio)

    def decode(self, data: bytes, pts: int) -> list[VideoFrame]:
        """Decode one access unit whose time is `pts`, in units of `LIVE_BASE`.

        Raises:
            FFmpegError: if it is damaged.
        """
        packet = av.Packet(data)
        packet.pts = packet.dts = pts
        packet.time_base = LIVE_BASE
        frames = self._context.decode(packet)
        self._first = self._first or next((frame.format.name for frame in frames), "")
        return frames

    def forget(self) -> None:
        """Start again at the next frame, which is a key."""
        self._context.flush_buffers()


def set_live(context: VideoCodecContext) -> None:
    """Make a decoder return every frame at once: threads by FRAME hold back one each, hundreds of ms."""
    context.thread_type = "SLICE"
    context.thread_count = _THREADS
    context.flags |= av.codec.context.Flags.low_delay


def decode_behind_the_model() -> None:
    """Let the calling thread, and what a decoder starts from it, have only what others leave of the processor.

    Where decoding has more to do than there are cores, the model would get one thread's share among all of theirs, and
    answer on frames that are old by then. Six 4K cameras at 25 fps on two cores, nano: 1.0 frames/s, 4.4 s old at the
    95th percentile without this, 3.7 frames/s and 2.2 s with it. Only on Linux do threads have priorities.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))

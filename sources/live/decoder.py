"""Low-latency video decoder for all codecs of FFmpeg, on the CPU or an NVIDIA GPU."""

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

_NICE = 10  # lower priority of decoding than of inference
_THREADS = 4  # a camera's frame has few slices; without a limit 16 cameras on 64 cores would start 1024 threads


class Decoder:
    """Video decoder of one live connection.

    Args:
        codec: FFmpeg's name of the codec.
        parameter_sets: parameter sets of the stream, with start codes; b"" if the frames contain them.
        hwaccel: "auto" to decode on a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
        gpu: index of the GPU that stores the decoded frames, see `gpu_decoding`.
        show_damaged: whether to return frames with missing parts, after error concealment, instead of skipping them.

    Raises:
        SourceError: if the GPU is required and cannot decode.
        ValueError: if FFmpeg has no such video decoder.
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
            raise ValueError(f"{codec} is not a known video codec")
        if parameter_sets:
            context.extradata = parameter_sets
        set_live(context)
        if show_damaged:
            context.flags |= av.codec.context.Flags.output_corrupt
        self._context = context
        self._first = ""  # pixel format of the first frame

    @property
    def name(self) -> str:
        """Name of the decoder, such as "h264" or "h264 (cuda)". The suffix " (cuda)" appears with the first frame."""
        return running(self._context, self._first)

    @property
    def pixel_aspect(self) -> Fraction:
        """Pixel aspect ratio of the newest frame: pixel width divided by pixel height."""
        return pixel_aspect_of(self._context.sample_aspect_ratio)

    def decode(self, data: bytes, pts: int) -> list[VideoFrame]:
        """Decode one access unit. Return the decoded frames, usually one.

        Args:
            data: the access unit.
            pts: presentation timestamp in units of `LIVE_BASE` (1/90000 s).

        Raises:
            FFmpegError: if FFmpeg cannot decode the access unit.
        """
        packet = av.Packet(data)
        packet.pts = packet.dts = pts
        packet.time_base = LIVE_BASE
        frames = self._context.decode(packet)
        self._first = self._first or next((frame.format.name for frame in frames), "")
        return frames

    def forget(self) -> None:
        """Discard the decoder's state, so that decoding can restart at a keyframe."""
        self._context.flush_buffers()


def set_live(context: VideoCodecContext) -> None:
    """Configure a decoder for low latency. FFmpeg's frame threading would delay each frame by hundreds of ms."""
    context.thread_type = "SLICE"
    context.thread_count = _THREADS
    context.flags |= av.codec.context.Flags.low_delay


def decode_behind_the_model() -> None:
    """Lower the CPU priority of the calling thread and of the threads that it starts, so that inference runs first.

    Only Linux has a nice value per thread. On other systems, this function does nothing.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # If decoding needs all cores, inference is otherwise delayed by seconds.
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))

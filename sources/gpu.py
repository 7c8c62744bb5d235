"""Decoding on an NVIDIA GPU, through FFmpeg: whether it can, and in which memory the frames are.

Knows nothing of where coded frames come from.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import av
import av.error
from av.codec.hwaccel import HWAccel
from av.video.codeccontext import VideoCodecContext

from saccade.sources.errors import SourceError

HwAccel = Literal["auto", "cuda", "none"]
"""Decode on the GPU if there is one, require it, or decode on the CPU."""

_FROM_GPU = ("cuda", "nv12", "p010le", "p016le")  # formats that FFmpeg's own decoders do not give


def gpu_decoding(hwaccel: HwAccel, gpu: int | None = None) -> HWAccel | None:
    """PyAV's handle for decoding on a GPU; None for the CPU.

    Args:
        hwaccel: whether to.
        gpu: number of the one in whose memory frames stay; its `primary_context` must be current where a decoder is
            made with the handle. None to have frames downloaded, from whichever.

    Raises:
        SourceError: if the GPU is required and cannot decode.
    """
    handle = None if hwaccel == "none" else _handle(gpu)
    if handle is None and hwaccel == "cuda":
        raise SourceError("hwaccel cuda: no GPU that FFmpeg can decode with; use auto or none")
    return handle


@cache
def _handle(gpu: int | None) -> HWAccel | None:
    try:
        # Not PyAV's own fallback: it would start a context for each stream that does not tell what really runs.
        if gpu is None:
            handle = HWAccel("cuda", allow_software_fallback=True)
        else:
            # In the context that torch uses, so that it can read them; by the name "primary" FFmpeg refuses that one,
            # whose flags are not those that it would set. One of its own for each decoder has 300 MB and more.
            options: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
            handle = HWAccel("cuda", device=str(gpu), allow_software_fallback=True, options=options, is_hw_owned=True)
        with primary_context(gpu):
            _ = av.CodecContext.create("h264", "r", hwaccel=handle)
    except (av.error.FFmpegError, OSError, RuntimeError, NotImplementedError, ValueError):
        return None
    return handle


@contextmanager
def primary_context(gpu: int | None) -> Iterator[None]:
    """A block in which the CUDA context that everything shares on a GPU is current in this thread; None for none.

    Raises:
        OSError: if there is no such GPU.
    """
    if gpu is None:
        yield
        return
    driver, context = _primary_context(gpu)
    driver.cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(gpu: int) -> tuple[Any, ctypes.c_void_p]:
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), gpu)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # kept to the end of the process
    ):
        raise OSError(f"there is no GPU {gpu}")
    return driver, context


def running(context: VideoCodecContext, pixel_format: str) -> str:
    """What decodes, to be shown, such as "h264 (cuda)"; certain by the pixel format of a frame, "" before the first."""
    on_gpu = context.is_hwaccel and pixel_format in ("", *_FROM_GPU)
    return f"{context.name} (cuda)" if on_gpu else str(context.name)

"""Video decoding on an NVIDIA GPU through FFmpeg: checks availability, and selects the GPU that stores the frames."""

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
"""Decode on a GPU if there is one, require a GPU, or decode on the CPU."""

_FROM_GPU = ("cuda", "nv12", "p010le", "p016le")  # pixel formats that FFmpeg's software decoders never return


def gpu_decoding(hwaccel: HwAccel, gpu: int | None = None) -> HWAccel | None:
    """Return a PyAV `HWAccel` object for decoding on a GPU, or None to decode on the CPU.

    Args:
        hwaccel: "auto" to decode on a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
        gpu: index of the GPU that stores the decoded frames; None to copy frames to main memory. With an index, create
            the decoder inside `primary_context`.

    Raises:
        SourceError: if the GPU is required and cannot decode.
    """
    handle = None if hwaccel == "none" else _handle(gpu)
    if handle is None and hwaccel == "cuda":
        raise SourceError("hwaccel cuda: FFmpeg found no GPU that can decode video; set hwaccel to auto or none")
    return handle


@cache
def _handle(gpu: int | None) -> HWAccel | None:
    try:
        # PyAV's own fallback would create a context per stream, and would not report which decoder runs.
        if gpu is None:
            handle = HWAccel("cuda", allow_software_fallback=True)
        else:
            # Decode in torch's context, so that torch can read the frames. FFmpeg's option "primary_ctx" refuses this
            # context because of its flags. A separate context per decoder would take 300 MB or more.
            options: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
            handle = HWAccel("cuda", device=str(gpu), allow_software_fallback=True, options=options, is_hw_owned=True)
        with primary_context(gpu):
            _ = av.CodecContext.create("h264", "r", hwaccel=handle)
    except (av.error.FFmpegError, OSError, RuntimeError, NotImplementedError, ValueError):
        return None
    return handle


@contextmanager
def primary_context(gpu: int | None) -> Iterator[None]:
    """Make the GPU's primary CUDA context current in this thread, as a context manager. Does nothing if `gpu` is None.

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
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # held until the process ends
    ):
        raise OSError(f"GPU {gpu} does not exist")
    return driver, context


def running(context: VideoCodecContext, pixel_format: str) -> str:
    """Return the decoder's name for display, such as "h264 (cuda)" for decoding on a GPU.

    Args:
        context: codec context of the decoder.
        pixel_format: pixel format of a decoded frame; "" before the first frame.
    """
    on_gpu = context.is_hwaccel and pixel_format in ("", *_FROM_GPU)
    return f"{context.name} (cuda)" if on_gpu else str(context.name)

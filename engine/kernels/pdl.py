"""Programmatic dependent launch (PDL): a kernel starts before the previous kernel has ended (Hopper and later).

A kernel launched with `pdl_options` may at once read data that no kernel of its step writes: weights and older KV cache
entries. It must call `pdl_wait` before all other reads and before all writes.

A kernel that is independent of the previous one may run fully concurrently: it calls `pdl_launch` first and `pdl_join`
last. If the previous kernel calls `pdl_wait`, earlier kernels have ended, and their results may be read around the L1
cache.
"""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

L2_LINE_BYTES = 128  # bytes of a line of the L2 cache


@triton.jit
def prefetch_l2(at) -> None:
    """Prefetch the cache lines at some pointers into L2 without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def pdl_wait() -> None:
    """Wait until the previous kernels have ended, then allow the launch of the next kernel (griddepcontrol)."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def pdl_launch() -> None:
    """Allow the launch of the next kernel; call `pdl_join` at the end of this kernel."""
    gdc_launch_dependents()


@triton.jit
def pdl_join() -> None:
    """Wait until the previous kernels have ended, so that kernels end in order."""
    gdc_wait()


def pdl_options(wanted: bool) -> dict[str, bool]:
    """Return the Triton launch options that enable PDL if `wanted` is true."""
    return {"launch_pdl": True} if wanted else {}


def supports_pdl(device: torch.device) -> bool:
    """Return whether the GPU supports PDL and the driver can capture it in CUDA graphs (CUDA 12.3 or later)."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and _driver() >= 12030


def _driver() -> int:
    """Return the driver's CUDA version as 1000 · major + 10 · minor, or 0 if it is unknown."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value

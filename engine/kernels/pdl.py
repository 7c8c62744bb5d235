"""Programmatic dependent launch (PDL): a kernel begins before the previous one has ended, from Hopper on.

A kernel that is launched with `pdl_options` may read at once what no kernel of its step writes: weights, and older
entries of the cache. All else it reads, and all it writes, comes after `pdl_wait`, which it must call.

A kernel that needs nothing of the previous one may do everything in its shadow: `pdl_launch` first, `pdl_join` last. It
may read what kernels before the previous one wrote, not through L1, if that one calls `pdl_wait`: then they have ended.
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
    """Ask the L2 cache for the lines at some pointers; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def pdl_wait() -> None:
    """Wait until the previous kernels have ended, then let the next one be launched (griddepcontrol)."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def pdl_launch() -> None:
    """Let the next kernel be launched; the end of this one is then for `pdl_join`."""
    gdc_launch_dependents()


@triton.jit
def pdl_join() -> None:
    """Wait until the previous kernels have ended, so that the end of this one is the end of all."""
    gdc_wait()


def pdl_options(wanted: bool) -> dict[str, bool]:
    """Launch options of a kernel that begins before the one in front of it ends (PDL)."""
    return {"launch_pdl": True} if wanted else {}


def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU has it, and its driver captures such kernels in graphs (CUDA 12.3)."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and _driver() >= 12030


def _driver() -> int:
    """The newest CUDA that the driver knows, as 1000 · major + 10 · minor; 0 if it cannot be asked."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value

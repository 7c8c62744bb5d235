"""Reading the host's pinned memory from a kernel: inputs that a graph takes itself, without a copy in front of it.

A copy engine's turn in front of a decode step's graph costs an H200 11.7 µs, a kernel in the graph that waits for the
bus once 2.1 (a step of 529 µs without inputs), and the host no call of the driver. The host must have written what is
read before the graph is launched, and leave it until that has run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _fetch_kernel(source, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    # Not cached: the host writes it again.
    tl.store(out + i, tl.load(source + i, mask=inside, volatile=True), mask=inside)


def fetch(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy int32 numbers from pinned memory to as many on the device.

    What is behind it begins only then: to have it lie in wait meanwhile took a step no less, 531.4 µs for 531.0.
    """
    count = out.numel()
    _fetch_kernel[(triton.cdiv(count, _BLOCK),)](source, out, count, BLOCK=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["count"])  # else it is compiled for sizes of images that are divisible by 16 and others
def _fetch_image_kernel(ticket, about, pixels, count, ABOUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    source = tl.load(ticket + ABOUT, volatile=True).to(tl.pointer_type(tl.int64))
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    tl.store(pixels + i, tl.load(source + i, mask=inside, volatile=True), mask=inside)
    if tl.program_id(0) == 0:
        number = tl.arange(0, WIDTH)
        known = tl.load(ticket + number, mask=number < ABOUT, volatile=True)
        tl.store(about + number, known, mask=number < ABOUT)


def fetch_image(ticket: torch.Tensor, about: torch.Tensor, pixels: torch.Tensor) -> None:
    """Copy an image from pinned memory, and what is known of it.

    Args:
        ticket: (more than n,) int64 in pinned memory: what is known, and behind that the image's address.
        about: (n,) int64.
        pixels: uint8, a multiple of 8; so many bytes are read, wherever the image ends.
    """
    words, count = pixels.view(torch.int64), about.numel()
    width = triton.next_power_of_2(count)
    grid = (triton.cdiv(words.numel(), _BLOCK),)
    _fetch_image_kernel[grid](ticket, about, words, words.numel(), ABOUT=count, WIDTH=width, BLOCK=_BLOCK, num_warps=4)

"""Reads the luma (brightness) of frames in GPU memory for motion detection.

The luma is subsampled and copied to the CPU asynchronously. Motion detection is one frame late, so that it does not
wait for the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from saccade.sources import Frame

if TYPE_CHECKING:
    import torch


class FrameLuma:
    """Reads the luma (brightness) of one stream's frames in GPU memory. Not thread-safe."""

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def __call__(self, frame: Frame, step: int) -> NDArray[np.uint8] | None:
        """Return the luma of a frame, subsampled by `step` in both directions, as uint8 of shape (rows, columns).

        If frames are in GPU memory, return the luma of the previous frame. Return None without YUV planes.
        """
        planes = frame.planes() if frame.planes is not None else None
        if planes is None:
            return None
        import torch  # already loaded by the engine

        # Pass the DLPack capsule instead of the plane, see `yuv_image`.
        luma = torch.utils.dlpack.from_dlpack(planes.planes[0].__dlpack__())[::step, ::step]
        if not luma.is_cuda:
            self._pending = None
            return np.ascontiguousarray(luma.numpy())
        before, self._pending = self._pending, _copied(luma)
        small, copied = before or self._pending
        copied.synchronize()  # copy of the previous frame, already complete; only the first frame waits
        return np.asarray(small.numpy(), np.uint8)


def _copied(luma: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Start an asynchronous copy to pinned memory. Return the copy, and a CUDA event that marks its completion."""
    import torch

    with torch.cuda.stream(torch.cuda.default_stream(luma.device)):
        there = torch.empty(luma.shape, dtype=torch.uint8, pin_memory=True)
        there.copy_(luma.contiguous(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    return there, copied

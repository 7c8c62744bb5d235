"""The brightness of frames that a GPU decodes or shall convert, for motion: without the frame's image on the CPU.

A frame in a GPU's memory is thinned out there, and copied behind the decoder's work. Nothing waits for that copy: each
frame gets the brightness of the one before, whose copy was made a frame ago.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from saccade.sources import Frame

if TYPE_CHECKING:
    import torch


class FrameLuma:
    """Reads the brightness of a stream's frames. Callable by one thread."""

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def __call__(self, frame: Frame, step: int) -> NDArray[np.uint8] | None:
        """Every `step`th pixel of every `step`th row, (rows, columns) uint8; None where the frame has no planes."""
        planes = frame.planes() if frame.planes is not None else None
        if planes is None:
            return None
        import torch  # which the engine has loaded by now

        # The capsule, not the plane: see `yuv_image`.
        luma = torch.utils.dlpack.from_dlpack(planes.planes[0].__dlpack__())[::step, ::step]
        if not luma.is_cuda:
            self._pending = None
            return np.ascontiguousarray(luma.numpy())
        before, self._pending = self._pending, _copied(luma)
        small, copied = before or self._pending
        copied.synchronize()  # of the frame before, whose copy is done; only a first frame waits
        return np.asarray(small.numpy(), np.uint8)


def _copied(luma: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """A copy in pinned memory, and the event behind it; on the stream that the decoder writes on."""
    import torch

    with torch.cuda.stream(torch.cuda.default_stream(luma.device)):
        there = torch.empty(luma.shape, dtype=torch.uint8, pin_memory=True)
        there.copy_(luma.contiguous(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    return there, copied

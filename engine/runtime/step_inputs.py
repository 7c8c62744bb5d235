"""Small integer inputs of a step, sent from host to device in one copy. Knows tensors and nothing of steps."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class StepInputs:
    """Named int32 arrays that travel to the device in one copy, from as many pinned buffers as there are slots.

    Args:
        depth: slots.
        device: where they go.
        shapes: the arrays' shapes by name.

    Attributes:
        host: for each slot, its arrays by name, to be written.
        device: the arrays on the device, at fixed addresses, whichever slot they came from.
    """

    def __init__(self, depth: int, device: torch.device, **shapes: tuple[int, ...]) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self._pinned = [
            torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(depth)
        ]
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends = np.cumsum(sizes).tolist()

        def views(whole: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = zip(shapes.items(), sizes, ends, strict=True)
            return {name: whole[end - size : end].view(shape) for (name, shape), size, end in parts}

        self.host: list[dict[str, NDArray[np.int32]]] = [
            {name: view.numpy() for name, view in views(pinned).items()} for pinned in self._pinned
        ]
        self.device = views(self._device)

    def send(self, slot: int) -> None:
        """Copy a slot's arrays over; does not wait."""
        self._device.copy_(self._pinned[slot], non_blocking=True)

"""Images that are one crop each, on their way to CUDA: copied as they come, sent and resized together for a prefill.

    submitting thread                  pixels → pinned memory
    upload stream, at the launch       pinned memory → device → crops

To send and resize one image by itself takes the interpreter 150 µs and the driver's lock six times, of which a small
model on an H200 has less than 400 µs an image. Knows nothing of what crops are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.models.protocol import Tiling
from saccade.engine.runtime.uploads.pinned_ring import PinnedRing, RingPart

_LARGEST = 1 << 23  # bytes of an image that waits here: a 4K frame is worth a copy of its own
_RING = 1 << 22  # bytes for each image of two prefills: one in Full HD takes a half more, one of 640×360 a sixth
_MOST_KNOWN = 256  # sizes, as `kernels.resize` knows


class StagedImage:
    """An image in pinned memory, until it is dropped: (rows, columns, 3) uint8 RGB, to be a single crop."""

    __slots__ = ("columns", "part", "rows")
    tiling: Tiling = 1, 1

    def __init__(self, rows: int, columns: int, part: RingPart) -> None:
        self.rows, self.columns, self.part = rows, columns, part


class CudaUploads:
    """What comes to a device, and the crops that are made of it there. `stage` may be called by any thread.

    Args:
        device: where they go.
        depth: step slots.
        most: images at a time.
        size: side of a crop in pixels.

    Attributes:
        stream: on which images are sent.
        crops: for each slot, (most, size, size, 3) uint8 on the device.
    """

    def __init__(self, device: torch.device, depth: int, most: int, size: int) -> None:
        self._device, self._size = device, size
        self.stream = torch.cuda.Stream(device)
        self.crops = torch.zeros(depth, most, size, size, 3, dtype=torch.uint8, device=device)
        self._compiled: set[tuple[int, int]] = set()
        self._ring = PinnedRing(2 * most * _RING)
        # Where each image is on the device and which crop it becomes, see `kernels.resize.ABOUT`.
        self._about = torch.zeros(depth, most, 2, dtype=torch.int64, pin_memory=True)
        self._numbers = self._about.numpy()
        self._about_there = torch.zeros(depth, most, 2, dtype=torch.int64, device=device)
        self._ready = [torch.cuda.Event() for _ in range(depth)]

    def stage(self, image: NDArray[np.uint8]) -> StagedImage | None:
        """Copy an image (rows, columns, 3) uint8 RGB to where it waits; None if it is too large, or there is no room.

        The first one of its size takes a second, in which kernels are compiled.
        """
        rows, columns, _ = image.shape
        if image.nbytes > _LARGEST:
            return None
        if (rows, columns) not in self._compiled:
            self._compile(rows, columns)
        part = self._ring.take(image.nbytes)
        if part is None:
            return None
        np.copyto(self._ring.array(part, rows, columns, 3), image)  # other threads run meanwhile
        return StagedImage(rows, columns, part)

    def _compile(self, rows: int, columns: int) -> None:
        from saccade.engine.kernels.resize import compile_for

        with torch.cuda.stream(self.stream), torch.inference_mode():
            compile_for(rows, columns, self._size, self._size, self._device)
        if len(self._compiled) >= _MOST_KNOWN:
            self._compiled.clear()
        self._compiled.add((rows, columns))

    def cut(self, slot: int, images: Sequence[tuple[int, StagedImage]], current: torch.cuda.Stream) -> torch.cuda.Event:
        """Send images and resize them, each to its place in the slot's crops; does not wait.

        The images must be kept, and the slot must not be used again, before the event that is returned.

        Args:
            slot: whose crops.
            images: with their places.
            current: the stream that is the current one, which stays so.
        """
        torch.cuda.set_stream(self.stream)
        try:
            self._cut(slot, sorted(images, key=lambda one: one[1].part.start))
        except BaseException:
            self.stream.synchronize()  # what is on the stream reads the images, which are dropped now
            raise
        finally:
            torch.cuda.set_stream(current)
        ready = self._ready[slot]
        ready.record(self.stream)
        return ready

    def close(self) -> None:
        """Wait for what is under way."""
        self.stream.synchronize()

    def _cut(self, slot: int, images: Sequence[tuple[int, StagedImage]]) -> None:
        from saccade.engine.kernels.resize import resize_all

        runs: list[list[int]] = []  # start and end of what lies in line
        offsets: list[int] = []
        total = 0
        for _, image in images:
            part = image.part
            if runs and runs[-1][1] == part.start:
                runs[-1][1] = part.end
            else:
                runs.append([part.start, part.end])
            offsets.append(total)
            total += part.end - part.start
        pixels = torch.empty(total, dtype=torch.uint8, device=self._device)
        base, count = pixels.data_ptr(), len(images)
        alike: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (place, image), offset in zip(images, offsets, strict=True):
            alike.setdefault((image.rows, image.columns), []).append((base + offset, place))
        self._numbers[slot, :count] = [one for group in alike.values() for one in group]
        about = self._about_there[slot]
        about[:count].copy_(self._about[slot, :count], non_blocking=True)
        at = 0
        for start, end in runs:
            pixels[at : at + end - start].copy_(self._ring.tensor(start, end), non_blocking=True)
            at += end - start
        at = 0
        for (rows, columns), group in alike.items():
            resize_all(about[at : at + len(group)], rows, columns, self.crops[slot])
            at += len(group)

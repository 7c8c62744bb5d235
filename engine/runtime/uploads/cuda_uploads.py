"""Images that are one crop each, on their way to CUDA: copied as they come, sent and resized together for a prefill.

    submitting thread                  pixels → pinned memory, but for those that a GPU has decoded
    upload stream, at the launch       pinned memory → device → crops

To send and resize one image by itself takes the interpreter 150 µs and the driver's lock six times, of which a small
model on an H200 has less than 400 µs an image. Of a prefill that is nearly full of images alike all are resized by one
graph: nano answers 32 streams 1,820 times a second on an H100 so, and 1,690 without. Knows nothing of what crops are
for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from saccade.engine.image import Pixels, YuvImage, bytes_of
from saccade.engine.models.protocol import Tiling
from saccade.engine.runtime.graph_capture import GraphsByKind
from saccade.engine.runtime.uploads.pinned_memory import PinnedMemory, PinnedPart

_LARGEST = 1 << 23  # bytes of an image that waits here: a larger one, such as in 4K, is worth a copy of its own
_PINNED = 1 << 22  # bytes for each image of two prefills: one in Full HD takes a half more, one of 640×360 a sixth
_MOST_KNOWN = 256  # sizes, as `kernels.resize` knows
_MOST_GRAPHS = 32  # sizes
_ABOUT = 13  # as `kernels.resize.ABOUT`
_RGB = (0,) * (_ABOUT - 2)
_SPARE = 8  # images that a graph may resize for nothing

_Kind = tuple[int, int, bool]
"""Rows and columns of an image, and whether it is YUV."""


@dataclass(slots=True, frozen=True, eq=False)
class StagedImage:
    """An image of (rows, columns) pixels, in pinned memory or on the device, until it is dropped; to be one crop.

    Attributes:
        place: in pinned memory: RGB, or the luma of YUV; or the luma on the device.
        yuv: where u and v are behind it, and the rest of `kernels.resize.ABOUT`; None of RGB.
        chroma: on the device.
    """

    rows: int
    columns: int
    place: PinnedPart | torch.Tensor
    yuv: tuple[int, ...] | None = None
    chroma: tuple[torch.Tensor, ...] = ()

    @property
    def tiling(self) -> Tiling:
        """That of one crop."""
        return 1, 1


class CudaUploads:
    """What comes to a device, and the crops that are made of it there. `stage` may be called by any thread.

    Args:
        device: where they go.
        depth: step slots.
        most: images at a time.
        size: side of a crop in pixels.

    Attributes:
        stream: on which images are sent.
        crops: of each slot, (most, size, size, 3) uint8 on the device.
    """

    def __init__(self, device: torch.device, depth: int, most: int, size: int) -> None:
        self._device, self._size = device, size
        self.stream = torch.cuda.Stream(device)
        # Each by itself: kernels are compiled for what begins at a multiple of 16.
        self.crops = [torch.zeros(most, size, size, 3, dtype=torch.uint8, device=device) for _ in range(depth)]
        self._compiling = threading.Lock()
        self._compiled: set[_Kind] = set()
        self._graphs = GraphsByKind[_Kind](device, _MOST_GRAPHS)  # of as many as there may be, one for each slot
        self._pinned = PinnedMemory(2 * most * _PINNED)
        # Each by itself, likewise.
        self._about = [torch.zeros(most, _ABOUT, dtype=torch.int64, pin_memory=True) for _ in range(depth)]
        self._numbers = [about.numpy() for about in self._about]
        self._about_there = [torch.zeros(most, _ABOUT, dtype=torch.int64, device=device) for _ in range(depth)]
        self._ready = [torch.cuda.Event() for _ in range(depth)]

    def compile_for(self, rows: int, columns: int, *, yuv: bool) -> None:
        """Have what images of a size and kind need compiled, which takes a second the first time."""
        if (rows, columns, yuv) not in self._compiled:
            self._compile(rows, columns, yuv)

    def stage(self, image: Pixels) -> StagedImage | None:
        """Copy an image to where it waits, unless it is on the device; None if it is too large, or there is no room.

        `compile_for` must have been called for its size and kind.
        """
        rows, columns, _ = image.shape
        yuv = isinstance(image, YuvImage)
        if isinstance(image, YuvImage) and image.y.is_cuda:
            y, u, v = image.y, image.u, image.v
            at = y.data_ptr()
            about = u.data_ptr() - at, v.data_ptr() - at, y.stride(0), *u.stride(), *image.factors
            return StagedImage(rows, columns, y, about, (u, v))
        size = bytes_of(rows, columns, yuv)
        part = self._pinned.take(size) if size <= _LARGEST else None
        if part is None:
            return None
        if not isinstance(image, YuvImage):
            np.copyto(self._pinned.array(part, rows, columns, 3), image)  # and lets other threads run meanwhile
            return StagedImage(rows, columns, part)
        planes = self._pinned.array(part, 6, rows // 2, columns // 2)
        for there, plane in ((planes[:4].reshape(rows, columns), image.y), (planes[4], image.u), (planes[5], image.v)):
            np.copyto(there, plane.numpy())
        luma = rows * columns
        about = luma, luma + luma // 4, columns, columns // 2, 1, *image.factors
        return StagedImage(rows, columns, part, about)

    def cut(self, slot: int, images: Sequence[tuple[int, StagedImage]], current: torch.cuda.Stream) -> torch.cuda.Event:
        """Send images and resize them, each to its place in the slot's crops; does not wait.

        The images must be kept, and the slot must not be used again, before the event that is returned.

        Args:
            slot: whose crops.
            images: with their places.
            current: the stream that is the current one, which stays so.
        """
        # What is on the device was decoded on its default stream, and its memory is written again there.
        decoded = any(isinstance(image.place, torch.Tensor) for _, image in images)
        stream = torch.cuda.default_stream(self._device) if decoded else self.stream
        torch.cuda.set_stream(stream)
        try:
            self._cut(slot, images, on_stream=not decoded)
        except BaseException:
            stream.synchronize()  # what is on the stream reads the images, which are dropped now
            raise
        finally:
            torch.cuda.set_stream(current)
        ready = self._ready[slot]
        ready.record(stream)
        return ready

    def close(self) -> None:
        """Wait for what is under way."""
        self.stream.synchronize()

    def _cut(self, slot: int, images: Sequence[tuple[int, StagedImage]], *, on_stream: bool) -> None:
        parts = sorted(
            {one.place for _, one in images if isinstance(one.place, PinnedPart)}, key=lambda part: part.start
        )
        pixels = torch.empty(sum(part.end - part.start for part in parts), dtype=torch.uint8, device=self._device)
        addresses, first = dict[PinnedPart, int](), pixels.data_ptr()
        runs: list[tuple[int, int, int]] = []  # what lies in line, and where it goes
        at = 0
        for part in parts:
            if runs and runs[-1][1] == part.start:
                runs[-1] = runs[-1][0], part.end, runs[-1][2]
            else:
                runs.append((part.start, part.end, at))
            addresses[part] = first + at
            at += part.end - part.start
        alike: dict[_Kind, list[tuple[int, ...]]] = {}
        for number, one in images:
            base = addresses[one.place] if isinstance(one.place, PinnedPart) else one.place.data_ptr()
            alike.setdefault(_kind_of(one), []).append(_about(one, base, number))
        for start, end, at in runs:
            pixels[at : at + end - start].copy_(self._pinned.tensor(start, end), non_blocking=True)
        count, most = len(images), len(self._numbers[slot])
        # What the graph resizes beyond the last one is for nothing, but the host's two launches take longer: 0.2 ms.
        nearly_full = on_stream and len(alike) == 1 and most - count < min(count, _SPARE)
        graphs = self._graphs.get(next(iter(alike))) if nearly_full else None
        abouts = [about for group in alike.values() for about in group]
        if not graphs:
            self._numbers[slot][:count] = abouts
            self._resize(slot, alike)
        else:
            self._numbers[slot][:] = abouts + abouts[-1:] * (most - count)
            graphs[slot].replay()

    def _resize(self, slot: int, alike: Mapping[_Kind, Sequence[object]]) -> None:
        """Resize images, of whose kinds there are so many behind each other."""
        from saccade.engine.kernels.resize import resize_all

        count, at = sum(map(len, alike.values())), 0
        self._about_there[slot][:count].copy_(self._about[slot][:count], non_blocking=True)
        for (rows, columns, yuv), group in alike.items():
            about_these = self._about_there[slot][at : at + len(group)]
            resize_all(about_these, rows, columns, self.crops[slot], yuv=yuv)
            at += len(group)

    def _compile(self, rows: int, columns: int, yuv: bool) -> None:
        from saccade.engine.kernels.resize import compile_for

        with self._compiling:  # the first frames of all cameras come at once
            kind = rows, columns, yuv
            if kind in self._compiled:
                return
            with torch.cuda.stream(self.stream), torch.inference_mode():
                compile_for(rows, columns, self._size, self._size, self._device, yuv=yuv)
            if bytes_of(*kind) <= _LARGEST:
                name = f"images of {columns} x {rows} are sent"
                self._graphs.capture(kind, name, partial(self._prepare, kind))
            if len(self._compiled) >= _MOST_KNOWN:
                self._compiled.clear()
            self._compiled.add(kind)

    def _prepare(self, kind: _Kind) -> tuple[list[Callable[[], None]], list[torch.Tensor]]:
        """What the graphs of images of a kind do, one for each slot, and read; see `GraphsByKind.capture`."""
        from saccade.engine.kernels.pinned import fetch
        from saccade.engine.kernels.resize import weights_of

        # Compiles it, with numbers that are nobody's.
        fetch(*(torch.zeros_like(self._about_there[0]).view(torch.int32) for _ in range(2)))
        read = weights_of(kind[0], kind[1], self._size, self._size, self._device)
        return [partial(self._cut_most, slot, kind) for slot in range(len(self.crops))], read

    def _cut_most(self, slot: int, kind: _Kind) -> None:
        from saccade.engine.kernels.pinned import fetch
        from saccade.engine.kernels.resize import resize_all

        rows, columns, yuv = kind
        fetch(self._about[slot].view(torch.int32), self._about_there[slot].view(torch.int32))
        resize_all(self._about_there[slot], rows, columns, self.crops[slot], yuv=yuv)


def _kind_of(image: StagedImage) -> _Kind:
    return image.rows, image.columns, image.yuv is not None


def _about(image: StagedImage, base: int, number: int) -> tuple[int, ...]:
    """`kernels.resize.ABOUT` numbers of an image that lies at an address on the device, and becomes a crop."""
    if image.yuv is None:
        return base, number, *_RGB
    u, v, *others = image.yuv
    return base, number, base + u, base + v, *others

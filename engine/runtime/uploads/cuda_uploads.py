"""Images that are one crop each, on their way to CUDA: copied as they come, sent and resized together for a prefill.

    submitting thread                  pixels → pinned memory, but for those that a GPU has decoded
    upload stream, at the launch       pinned memory → device → crops

To send and resize one image by itself takes the interpreter 150 µs and the driver's lock six times, of which a small
model on an H200 has less than 400 µs an image. Knows nothing of what crops are for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from saccade.engine.image import Pixels, YuvImage
from saccade.engine.models.protocol import Tiling
from saccade.engine.runtime.uploads.pinned_ring import PinnedRing, RingPart

_LARGEST = 1 << 23  # bytes of an image that waits here: a larger one, such as in 4K, is worth a copy of its own
_BRIEF = 1 << 20  # bytes of an image that is copied in less time than it takes threads to change places twice
_RING = 1 << 22  # bytes for each image of two prefills: one in Full HD takes a half more, one of 640×360 a sixth
_MOST_KNOWN = 256  # sizes, as `kernels.resize` knows
_ABOUT = 13  # as `kernels.resize.ABOUT`
_RGB = (0,) * (_ABOUT - 2)


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
    place: RingPart | torch.Tensor
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
        crops: for each slot, (most, size, size, 3) uint8 on the device.
    """

    def __init__(self, device: torch.device, depth: int, most: int, size: int) -> None:
        self._device, self._size = device, size
        self.stream = torch.cuda.Stream(device)
        self.crops = torch.zeros(depth, most, size, size, 3, dtype=torch.uint8, device=device)
        self._compiling = threading.Lock()
        self._compiled: set[tuple[int, int, bool]] = set()
        self._ring = PinnedRing(2 * most * _RING)
        self._about = torch.zeros(depth, most, _ABOUT, dtype=torch.int64, pin_memory=True)
        self._numbers = self._about.numpy()
        self._about_there = torch.zeros(depth, most, _ABOUT, dtype=torch.int64, device=device)
        self._ready = [torch.cuda.Event() for _ in range(depth)]

    def stage(self, image: Pixels) -> StagedImage | None:
        """Copy an image to where it waits, unless it is on the device; None if it is too large, or there is no room.

        The first one of its size and kind takes a second, in which kernels are compiled.
        """
        rows, columns, _ = image.shape
        yuv = isinstance(image, YuvImage)
        if (rows, columns, yuv) not in self._compiled:
            self._compile(rows, columns, yuv)
        if isinstance(image, YuvImage) and image.y.is_cuda:
            y, u, v = image.y, image.u, image.v
            at = y.data_ptr()
            about = u.data_ptr() - at, v.data_ptr() - at, y.stride(0), *u.stride(), *image.factors
            return StagedImage(rows, columns, y, about, (u, v))
        size = rows * columns * 3 // (2 if yuv else 1)
        part = self._ring.take(size) if size <= _LARGEST else None
        if part is None:
            return None
        if not isinstance(image, YuvImage):
            there = self._ring.array(part, rows, columns, 3)
            if size <= _BRIEF and image.flags.c_contiguous:
                there.reshape(-1).data[:] = image.reshape(-1).data
            else:  # numpy lets other threads run meanwhile
                np.copyto(there, image)
            return StagedImage(rows, columns, part)
        planes = self._ring.array(part, 6, rows // 2, columns // 2)
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
            self._cut(slot, images)
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

    def _cut(self, slot: int, images: Sequence[tuple[int, StagedImage]]) -> None:
        from saccade.engine.kernels.resize import resize_all

        parts = sorted({one.place for _, one in images if isinstance(one.place, RingPart)}, key=lambda part: part.start)
        pixels = torch.empty(sum(part.end - part.start for part in parts), dtype=torch.uint8, device=self._device)
        addresses, first = dict[RingPart, int](), pixels.data_ptr()
        runs: list[tuple[int, int, int]] = []  # what lies in line, and where it goes
        at = 0
        for part in parts:
            if runs and runs[-1][1] == part.start:
                runs[-1] = runs[-1][0], part.end, runs[-1][2]
            else:
                runs.append((part.start, part.end, at))
            addresses[part] = first + at
            at += part.end - part.start
        alike: dict[tuple[int, int, bool], list[tuple[int, ...]]] = {}
        for number, one in images:
            base = addresses[one.place] if isinstance(one.place, RingPart) else one.place.data_ptr()
            if one.yuv is None:
                about = base, number, *_RGB
            else:
                u, v, *others = one.yuv
                about = base, number, base + u, base + v, *others
            alike.setdefault((one.rows, one.columns, one.yuv is not None), []).append(about)
        count = len(images)
        self._numbers[slot, :count] = [about for group in alike.values() for about in group]
        self._about_there[slot, :count].copy_(self._about[slot, :count], non_blocking=True)
        for start, end, at in runs:
            pixels[at : at + end - start].copy_(self._ring.tensor(start, end), non_blocking=True)
        at = 0
        for (rows, columns, yuv), group in alike.items():
            about_these = self._about_there[slot, at : at + len(group)]
            resize_all(about_these, rows, columns, self.crops[slot], yuv=yuv)
            at += len(group)

    def _compile(self, rows: int, columns: int, yuv: bool) -> None:
        from saccade.engine.kernels.resize import compile_for

        with self._compiling:  # the first frames of all cameras come at once
            if (rows, columns, yuv) in self._compiled:
                return
            with torch.cuda.stream(self.stream), torch.inference_mode():
                compile_for(rows, columns, self._size, self._size, self._device, yuv=yuv)
            if len(self._compiled) >= _MOST_KNOWN:
                self._compiled.clear()
            self._compiled.add((rows, columns, yuv))

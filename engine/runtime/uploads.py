"""Image uploads to the GPU.

Images with a single crop are uploaded in batches (`CudaUploads`), images with tiles one by one (`TiledUploads`).

`CudaUploads` copies each image to pinned memory on arrival. It uploads and resizes all images of a prefill together:

    submitting thread                  pixels → pinned memory, except for frames decoded on the GPU
    upload stream, at the launch       pinned memory → device → crops

One CUDA graph resizes all images of a prefill. The images may have different
sizes and formats.

`TiledUploads` copies an image in pieces, with helper threads, and splits it into crops with a CUDA graph:

    submitting thread, and helpers     a piece of the image → pinned memory → device
    upload stream, after the pieces    image → (YUV → RGB) → resize → crops

`TiledUploads` has a few buffers with fixed addresses. An image occupies a buffer until its Python object is freed.

| upload of a Full HD image (6 MB) | time |
|---|---|
| with two helper threads and a CUDA graph | 1.2 ms |
| without helper threads and CUDA graph | 2.3 ms |
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.image import Factors, Pixels, YuvImage, bytes_of
from saccade.engine.models.protocol import Tiling, crop_count
from saccade.engine.runtime.graph_capture import GraphsByKind
from saccade.engine.tasks.task import Window

if TYPE_CHECKING:
    from saccade.engine.kernels.resize import Scaling

_LARGEST = 1 << 23  # maximum bytes of an image in these buffers; larger images, such as 4K, are copied separately
ALIGNED = 256
"""Alignment of ranges of pinned memory, in bytes."""
_PINNED = 1 << 22  # pinned bytes per image of two prefills; Full HD needs 1.5 times as much, 640×360 a sixth
_MOST_PINNED = 1 << 27
_MOST_KNOWN = 256  # maximum number of image sizes with coefficients on the device
_BETWEEN_ROWS = 1088  # rows per image in the graph's buffer for images that are resized in one direction: Full HD
_RGB = (0,) * 6  # unused factors
_PLACES = 4
_PIECE = 1 << 20  # bytes per piece; a Full HD frame takes 23.08, 22.76 and 22.73 ms with ½, 1 and 2 MB
_HELPERS = 2  # additional copying threads; with 0, 1 and 2: 23.34, 22.87, 22.76 ms per frame
_TILED_GRAPHS = 16  # maximum kinds of images with graphs

_TiledKind = tuple[int, int, Tiling, Factors | None]
"""Rows and columns of an image, its tiling, and its YUV factors or None."""
CutInto = Callable[[torch.Tensor, Tiling, torch.Tensor], list[torch.Tensor]]
"""Function that splits an image (height, width, 3) into crops (n, size, size, 3). It returns temporary tensors."""


class PinnedPart:
    """Range of pinned memory from byte `start` to byte `end` (exclusive). Freeing this object frees the range."""

    __slots__ = ("_dropped", "end", "start")

    def __init__(self, start: int, end: int, dropped: deque[int]) -> None:
        self.start, self.end, self._dropped = start, end, dropped

    def __del__(self) -> None:
        # No lock here: this runs in any thread, even in one that holds the lock of `take`.
        self._dropped.append(self.start)


class PinnedMemory:
    """Buffer of pinned memory from which ranges are allocated. The buffer is created at first use. Thread-safe.

    Args:
        size: size of the buffer in bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory, self._bytes = torch.empty(0), np.empty(0, np.uint8)
        self._held: list[tuple[int, int]] = []  # allocated ranges (start, end), in order
        self._dropped: deque[int] = deque()  # start of each freed range
        self._lock = threading.Lock()

    def take(self, count: int) -> PinnedPart | None:
        """Allocate `count` contiguous bytes, aligned to `ALIGNED`. Return None if no free range is large enough."""
        count = -(-count // ALIGNED) * ALIGNED
        with self._lock:
            dropped = {self._dropped.popleft() for _ in range(len(self._dropped))}
            self._held = [held for held in self._held if held[0] not in dropped]
            start, place = 0, 0
            for first, end in self._held:
                if start + count <= first:
                    break
                start, place = end, place + 1
            if start + count > self.size:
                return None
            if not len(self._bytes):
                self._memory = torch.empty(self.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                self._bytes = self._memory.numpy()
            self._held.insert(place, (start, start + count))
        return PinnedPart(start, start + count, self._dropped)

    def tensor(self, start: int, end: int) -> torch.Tensor:
        """Return a tensor view of the buffer's bytes from `start` to `end` (exclusive)."""
        return self._memory[start:end]

    def array(self, part: PinnedPart, *shape: int) -> NDArray[np.uint8]:
        """Return a NumPy view, with the shape `shape`, of the first bytes of a range of pinned memory."""
        return self._bytes[part.start : part.start + math.prod(shape)].reshape(shape)


# ---- images with a single crop, in batches


@dataclass(slots=True, eq=False)
class StagedImage:
    """A single-crop image in pinned memory or on the device. The memory is released when this object is freed.

    Attributes:
        place: the pixels in pinned memory, or the luma plane of a frame on the device.
        planes: byte offsets of the planes (YUV) or channels (RGB) in `place`.
        layout: fields 5 to 15 of the image's row in the resize table; see `kernels.resize.FIELDS`.
        scaling: filter weights to resize the image.
        chroma: the u and v planes of a frame on the device.
    """

    place: PinnedPart | torch.Tensor
    planes: tuple[int, int, int]
    layout: tuple[int, ...]
    scaling: Scaling
    chroma: tuple[torch.Tensor, ...] = ()

    @property
    def tiling(self) -> Tiling:
        """Tiling of the image: always 1×1."""
        return 1, 1


class CudaUploads:
    """Uploads single-crop images and resizes them to crops, all images of a prefill together. `stage` is thread-safe.

    Args:
        device: destination of the upload.
        depth: number of step slots.
        most: maximum number of images per batch.
        size: side of a crop in pixels.
        kernels: whether Triton is available. Without Triton, no image can be staged.

    Attributes:
        stream: CUDA stream of the uploads.
        crops: for each step slot, a tensor (most, size, size, 3) uint8 on the device.
    """

    def __init__(self, device: torch.device, depth: int, most: int, size: int, *, kernels: bool = True) -> None:
        self._device, self._size = device, size
        self.stream = torch.cuda.Stream(device)
        # Separate tensors are aligned to 16 bytes, as the compiled kernels expect.
        self.crops = [torch.zeros(most, size, size, 3, dtype=torch.uint8, device=device) for _ in range(depth)]
        self._lock = threading.Lock()
        self._scalings: dict[tuple[int, int], Scaling] = {}
        self._pinned = PinnedMemory(min(2 * most * _PINNED, _MOST_PINNED))
        self._ready = [torch.cuda.Event() for _ in range(depth)]
        self._graphs: list[torch.cuda.CUDAGraph] = []  # one per slot
        if kernels:
            from saccade.engine.kernels.resize import FIELDS

            # Separate tensors for the same reason. Slots share nothing, because they may use different streams.
            self._table = [torch.zeros(most, FIELDS, dtype=torch.int64, pin_memory=True) for _ in range(depth)]
            self._numbers = [table.numpy() for table in self._table]
            self._table_there = [torch.zeros(most, FIELDS, dtype=torch.int64, device=device) for _ in range(depth)]
            between = most * _BETWEEN_ROWS * size * 3
            self._between = [torch.empty(between, dtype=torch.uint8, device=device) for _ in range(depth)]
            graphs = GraphsByKind[None](device, 1)
            self._graphs = graphs.capture(None, "the resize of images", self._prepare)

    def scaling_of(self, rows: int, columns: int) -> Scaling:
        """Return the resize parameters for images of `rows` × `columns` pixels.

        The first call for a size takes about 10 ms.
        """
        scaling = self._scalings.get((rows, columns))
        return self._new_scaling(rows, columns) if scaling is None else scaling

    def stage(self, image: Pixels) -> StagedImage | None:
        """Copy an image to pinned memory, unless it is on the device.

        Returns:
            The `StagedImage`, or None if the image is too large or pinned memory is full.
        """
        rows, columns, _ = image.shape
        yuv = isinstance(image, YuvImage)
        if isinstance(image, YuvImage) and image.y.is_cuda:
            return self.stage_part(image, Window(0, 0, columns, rows))
        size = bytes_of(rows, columns, yuv)
        part = self._pinned.take(size) if size <= _LARGEST else None
        if part is None:
            return None
        scaling = self.scaling_of(rows, columns)
        if not isinstance(image, YuvImage):
            np.copyto(self._pinned.array(part, rows, columns, 3), image)  # releases the GIL
            row = 3 * columns
            return StagedImage(part, (0, 1, 2), (row, 3, row, 3, 0, *_RGB), scaling)
        planes = self._pinned.array(part, 6, rows // 2, columns // 2)
        for there, plane in ((planes[:4].reshape(rows, columns), image.y), (planes[4], image.u), (planes[5], image.v)):
            np.copyto(there, plane.numpy())
        luma = rows * columns
        layout = columns, 1, columns // 2, 1, 1, *image.factors
        return StagedImage(part, (0, luma, luma + luma // 4), layout, scaling)

    def stage_part(self, image: YuvImage, window: Window) -> StagedImage:
        """Return a region of a frame on the device as a staged image, without copying. Edges lie at even pixels."""
        x, y, width, height = window.x & ~1, window.y & ~1, max(2, window.width & ~1), max(2, window.height & ~1)
        luma, u, v = image.y, image.u, image.v
        row, at = luma.stride(0), luma.data_ptr()
        uv_row, uv_step = u.stride()
        chroma = y // 2 * uv_row + x // 2 * uv_step - at
        planes = y * row + x, u.data_ptr() + chroma, v.data_ptr() + chroma
        layout = row, 1, uv_row, uv_step, 1, *image.factors
        return StagedImage(luma, planes, layout, self.scaling_of(height, width), (u, v))

    def cut(self, slot: int, images: Sequence[tuple[int, StagedImage]], current: torch.cuda.Stream) -> torch.cuda.Event:
        """Upload images and resize them to the crops of a step slot. The call does not wait for the device.

        Keep the images alive and do not reuse the slot until the returned CUDA event has completed.

        Args:
            slot: step slot of the crops.
            images: images, each with its index in the crops.
            current: CUDA stream to make current again afterwards.
        """
        # Wait for the default stream, on which decoded frames are written and their memory is reused.
        decoded = any(isinstance(image.place, torch.Tensor) for _, image in images)
        stream = torch.cuda.default_stream(self._device) if decoded else self.stream
        torch.cuda.set_stream(stream)
        try:
            self._cut(slot, images)
        except BaseException:
            stream.synchronize()  # work on the stream still reads the images, which are freed now
            raise
        finally:
            torch.cuda.set_stream(current)
        ready = self._ready[slot]
        ready.record(stream)
        return ready

    def close(self) -> None:
        """Wait for all image uploads in progress."""
        self.stream.synchronize()

    def _cut(self, slot: int, images: Sequence[tuple[int, StagedImage]]) -> None:
        addresses = self._upload([one.place for _, one in images if isinstance(one.place, PinnedPart)])
        fields: list[tuple[int, ...]] = []
        between = 0
        for number, one in images:
            place, (luma, u, v) = one.place, one.planes
            base = addresses[place] if isinstance(place, PinnedPart) else place.data_ptr()
            fields.append((base + luma, base + u, base + v, number, between, *one.layout, *one.scaling.fields))
            between += one.scaling.between
        self._numbers[slot][: len(images)] = fields
        self._numbers[slot][len(images) :] = 0
        if 3 * between > len(self._between[slot]):  # frames larger than Full HD
            self._resize(slot, torch.empty(3 * between, dtype=torch.uint8, device=self._device))
        elif self._graphs:
            self._graphs[slot].replay()
        else:
            self._resize(slot, self._between[slot])

    def _upload(self, parts: list[PinnedPart]) -> dict[PinnedPart, int]:
        """Copy ranges of pinned memory to the device. Return the device address of each range."""
        addresses = dict[PinnedPart, int]()
        if not parts:
            return addresses
        parts = sorted(set(parts), key=lambda part: part.start)
        pixels = torch.empty(sum(part.end - part.start for part in parts), dtype=torch.uint8, device=self._device)
        first = pixels.data_ptr()
        runs: list[tuple[int, int, int]] = []  # contiguous ranges (start, end) and their destinations
        at = 0
        for part in parts:
            if runs and runs[-1][1] == part.start:
                runs[-1] = runs[-1][0], part.end, runs[-1][2]
            else:
                runs.append((part.start, part.end, at))
            addresses[part] = first + at
            at += part.end - part.start
        for start, end, at in runs:
            pixels[at : at + end - start].copy_(self._pinned.tensor(start, end), non_blocking=True)
        return addresses

    def _resize(self, slot: int, between: torch.Tensor) -> None:
        """Resize the images of a step slot to the size of a crop. The slot's resize table has the image addresses."""
        from saccade.engine.kernels.common import fetch
        from saccade.engine.kernels.resize import resize_all

        fetch(self._table[slot].view(torch.int32), self._table_there[slot].view(torch.int32))
        resize_all(self._table_there[slot], between, self.crops[slot])

    def _prepare(self) -> tuple[list[Callable[[], None]], list[torch.Tensor]]:
        """Return the functions to capture as CUDA graphs. Each function resizes the images of one step slot."""
        self._resize(0, self._between[0])  # compiles the kernels; the table has no images yet
        return [partial(self._resize, slot, between) for slot, between in enumerate(self._between)], []

    def _new_scaling(self, rows: int, columns: int) -> Scaling:
        from saccade.engine.kernels.resize import scaling_of

        with self._lock:  # the first frames of all cameras arrive at the same time
            scaling = self._scalings.get((rows, columns))
            if scaling is None:
                with torch.cuda.stream(self.stream), torch.inference_mode():
                    scaling = scaling_of(rows, columns, self._size, self._device)
                    self.stream.synchronize()  # other streams read the coefficients
                if len(self._scalings) >= _MOST_KNOWN:
                    self._scalings = {}
                self._scalings[rows, columns] = scaling
        return scaling


# ---- images one by one


class Lease:
    """Lease of an upload buffer. The buffer is returned when this object is freed."""

    __slots__ = ("_free", "number")

    def __init__(self, free: deque[int], number: int) -> None:
        self._free, self.number = free, number

    def __del__(self) -> None:
        self._free.append(self.number)  # no lock here: this runs in any thread


def lease_of(free: deque[int]) -> Lease | None:
    """Lease the free buffer that was used last, because it is probably in the CPU cache.

    Return None if no buffer is free.
    """
    try:
        return Lease(free, free.pop())
    except IndexError:
        return None


@dataclass(slots=True, frozen=True)
class TiledImage:
    """Crops (n, size, size, 3) uint8 of an image on the device.

    The crops are valid after the CUDA event `ready` has completed, until this object is freed.
    """

    pixels: torch.Tensor
    tiling: Tiling
    ready: torch.cuda.Event
    lease: Lease | None = None


class _Place:
    """Buffers for one tiled image: pinned host memory, device memory, and crops."""

    def __init__(self, crops: tuple[int, ...], device: torch.device) -> None:
        self.pinned = torch.zeros(_LARGEST, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.pinned.numpy()
        self.source = torch.zeros(_LARGEST, dtype=torch.uint8, device=device)
        self.crops = torch.zeros(crops, dtype=torch.uint8, device=device)
        self.ready = torch.cuda.Event()


class TiledUploads:
    """Uploads images one by one and splits them into crops. `send` is thread-safe.

    Args:
        device: destination of the upload.
        stream: CUDA stream that uploads and splits images.
        crops: shape of a crop buffer for the maximum number of tiles.
        cut_into: function that splits an image into crops.
    """

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream, crops: tuple[int, ...], cut_into: CutInto
    ) -> None:
        self._device, self._stream, self._crops, self._cut_into = device, stream, crops, cut_into
        self._lock = threading.Lock()
        self._places: list[_Place] = []
        self._free: deque[int] = deque(range(_PLACES))
        self._graphs = GraphsByKind[_TiledKind](device, _TILED_GRAPHS)
        self._helpers = ThreadPoolExecutor(_HELPERS, "saccade-copy")

    @property
    def all_free(self) -> bool:
        """Whether all buffers for tiled images are free."""
        return len(self._free) == _PLACES

    def send(self, image: Pixels, tiling: Tiling) -> TiledImage | None:
        """Upload an image from the host and split it into crops. If no buffer is free, the call does not wait.

        The first image of each size and format takes about a second, because kernels are compiled.

        Returns:
            The crops, or None if the image is too large, or if no buffer or no CUDA graph is available.
        """
        rows, columns, _ = image.shape
        factors = image.factors if isinstance(image, YuvImage) else None
        kind = rows, columns, tiling, factors
        if bytes_of(rows, columns, factors is not None) > _LARGEST:
            return None
        known = self._graphs.get(kind)
        graphs = self._capture(kind) if known is None else known
        lease = lease_of(self._free) if graphs else None
        if lease is None:
            return None
        place = self._places[lease.number]
        with torch.cuda.stream(self._stream):
            self._copy(place, list(pieces_of(place.bytes, image)))
            graphs[lease.number].replay()
        place.ready.record(self._stream)
        return TiledImage(place.crops[: crop_count(tiling)], tiling, place.ready, lease)

    def close(self) -> None:
        """End the helper threads that copy images."""
        self._helpers.shutdown()

    def _copy(self, place: _Place, pieces: list[Piece]) -> None:
        """Upload an image in pieces on the current CUDA stream, with the help of idle threads.

        Raises:
            BaseException: any error of a thread, after all threads have stopped.
        """
        left = iter(pieces)  # the threads share this iterator
        helping: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # the engine is being closed
                for _ in range(min(_HELPERS, len(pieces) - 1)):
                    helping.append(self._helpers.submit(self._help, place, left))
            _copy_some(place, left)
        finally:
            begun = [one for one in helping if not one.cancel()]
            wait(begun)  # wait for all threads, because a failed image returns its buffers
        for one in begun:
            one.result()

    def _help(self, place: _Place, left: Iterator[Piece]) -> None:
        torch.cuda.set_stream(self._stream)
        _copy_some(place, left)

    def _capture(self, kind: _TiledKind) -> list[torch.cuda.CUDAGraph]:
        """Capture one CUDA graph per buffer. The graphs split images of one size and format into crops.

        Returns:
            The graphs, or an empty list if the capture fails or the cache is full.
        """
        with self._lock:
            name = f"the upload of {kind[1]} x {kind[0]} images"
            return self._graphs.capture(kind, name, partial(self._prepare, kind))

    def _prepare(self, kind: _TiledKind) -> tuple[list[Callable[[], object]], list[torch.Tensor]]:
        """Return the functions to capture as CUDA graphs, one per buffer, and the tensors that the functions read.

        Each function splits an image into crops. The first call allocates the buffers.
        """
        if not self._places:
            with torch.inference_mode(False):  # helper threads, which are not in inference mode, write to the tensors
                self._places = [_Place(self._crops, self._device) for _ in range(_PLACES)]
        image = torch.zeros(_LARGEST, dtype=torch.uint8, device=self._device)
        read = self._cut(image, torch.zeros_like(self._places[0].crops), kind)  # compiles kernels
        return [partial(self._cut, place.source, place.crops, kind) for place in self._places], read

    def _cut(self, source: torch.Tensor, crops: torch.Tensor, kind: _TiledKind) -> list[torch.Tensor]:
        rows, columns, tiling, factors = kind
        luma = rows * columns
        if factors is None:
            image = source[: luma * 3].view(rows, columns, 3)
        else:
            from saccade.engine.kernels.resize import rgb_of_yuv

            u, v = source[luma : luma + luma // 2].view(2, rows // 2, columns // 2)
            image = rgb_of_yuv(source[:luma].view(rows, columns), u, v, factors)
        return self._cut_into(image, tiling, crops[: crop_count(tiling)])


def _copy_some(place: _Place, left: Iterator[Piece]) -> None:
    for piece in left:
        np.copyto(piece.there, piece.here)  # NumPy releases the GIL
        place.source[piece.start : piece.end].copy_(place.pinned[piece.start : piece.end], non_blocking=True)


@dataclass(slots=True, frozen=True)
class Piece:
    """A piece of an image upload.

    Attributes:
        here: bytes of the image.
        there: destination in pinned memory.
        start: index of the first byte in the upload.
        end: index after the last byte in the upload.
    """

    here: NDArray[np.uint8]
    there: NDArray[np.uint8]
    start: int
    end: int


def pieces_of(memory: NDArray[np.uint8], image: Pixels, size: int = _PIECE) -> Iterator[Piece]:
    """Split an image into pieces of about `size` bytes. A piece contains whole rows of pixels.

    RGB images have one plane of rows. YUV images have the luma plane, then both chroma planes.

    Args:
        memory: destination bytes.
        image: image in main memory.
        size: target size of a piece in bytes.
    """
    planes = [plane.numpy() for plane in (image.y, image.u, image.v)] if isinstance(image, YuvImage) else [image]
    at = 0
    for plane in planes:
        line = plane[0].size
        there = memory[at : at + plane.size].reshape(plane.shape)
        step = max(1, size // line)
        for row in range(0, len(plane), step):
            end = min(row + step, len(plane))
            yield Piece(plane[row:end], there[row:end], at + row * line, at + end * line)
        at += plane.size

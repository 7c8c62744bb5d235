"""Images that do not wait for others, on their way to CUDA: copied in pieces, and cut into crops by a graph.

    submitting thread, and helpers     a piece of the image → pinned memory → device
    upload stream, behind the pieces   image → (YUV → RGB) → resize → crops

A Full HD image is 6 MB, for which one thread that copies, allocates and launches takes 2.3 ms, three with a graph 1.2:
a frame in FP8 takes an H200 22.8 ms in place of 23.8. An image has a place of its own, with fixed addresses, until it
is dropped; few have at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.image import Factors, Pixels, YuvImage, bytes_of
from saccade.engine.models.protocol import Tiling, crop_count
from saccade.engine.runtime.graph_capture import GraphsByKind

_LARGEST = 1 << 23  # bytes of an image that has a place
_PLACES = 4
_PIECE = 1 << 20  # bytes that are copied, and then sent; a Full HD frame with ½, 1 and 2 MB: 23.08, 22.76, 22.73 ms
_HELPERS = 2  # threads that copy beside the submitting one; with none, 1 and 2: 23.34, 22.87, 22.76 ms
_MOST_GRAPHS = 16  # kinds of images

_Kind = tuple[int, int, Tiling, Factors | None]
"""Rows and columns of an image, its tiling, and of YUV its factors."""
CutInto = Callable[[torch.Tensor, Tiling, torch.Tensor], list[torch.Tensor]]
"""Cuts an image (height, width, 3) into crops (n, size, size, 3) on the device; returns what else its kernels read."""


class Lease:
    """A place, until this is dropped."""

    __slots__ = ("_free", "number")

    def __init__(self, free: deque[int], number: int) -> None:
        self._free, self.number = free, number

    def __del__(self) -> None:
        self._free.append(self.number)  # nothing else: any thread may be here


def lease_of(free: deque[int]) -> Lease | None:
    """The place that was used last, which is in the CPU's cache; None if none is free."""
    try:
        return Lease(free, free.pop())
    except IndexError:
        return None


@dataclass(slots=True, frozen=True)
class TiledImage:
    """Crops (n, size, size, 3) uint8 on the device, ready behind the event, until it is dropped."""

    pixels: torch.Tensor
    tiling: Tiling
    ready: torch.cuda.Event
    lease: Lease | None = None


class _Place:
    """Where an image is, on the host and on the device, and its crops."""

    def __init__(self, crops: tuple[int, ...], device: torch.device) -> None:
        self.pinned = torch.zeros(_LARGEST, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.pinned.numpy()
        self.source = torch.zeros(_LARGEST, dtype=torch.uint8, device=device)
        self.crops = torch.zeros(crops, dtype=torch.uint8, device=device)
        self.ready = torch.cuda.Event()


class TiledUploads:
    """Sends images and cuts them. `send` may be called by any thread.

    Args:
        device: where they go.
        stream: on which they are sent and cut.
        crops: shape of the most crops of an image.
        cut_into: see `CutInto`.
    """

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream, crops: tuple[int, ...], cut_into: CutInto
    ) -> None:
        self._device, self._stream, self._crops, self._cut_into = device, stream, crops, cut_into
        self._lock = threading.Lock()
        self._places: list[_Place] = []
        self._free: deque[int] = deque(range(_PLACES))
        self._graphs = GraphsByKind[_Kind](device, _MOST_GRAPHS)
        self._helpers = ThreadPoolExecutor(_HELPERS, "saccade-copy")

    @property
    def all_free(self) -> bool:
        """Whether no image has a place."""
        return len(self._free) == _PLACES

    def send(self, image: Pixels, tiling: Tiling) -> TiledImage | None:
        """Copy an image that is not on the device, send it and cut it; None if it is too large, or no place is free.

        Does not wait for a place. The first one of its kind takes a second, in which kernels are compiled; None, too,
        where there is no graph for it.
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
        """End the helpers."""
        self._helpers.shutdown()

    def _copy(self, place: _Place, pieces: list[Piece]) -> None:
        """Copy and send pieces on the current stream, with those helpers that have time.

        Raises:
            BaseException: what any of them has raised, once none is at work.
        """
        left = iter(pieces)  # each piece is taken by one thread
        helping: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # the engine is being closed
                for _ in range(min(_HELPERS, len(pieces) - 1)):
                    helping.append(self._helpers.submit(self._help, place, left))
            _copy_some(place, left)
        finally:
            begun = [one for one in helping if not one.cancel()]
            wait(begun)  # all of them: an image that fails gives its place back
        for one in begun:
            one.result()

    def _help(self, place: _Place, left: Iterator[Piece]) -> None:
        torch.cuda.set_stream(self._stream)
        _copy_some(place, left)

    def _capture(self, kind: _Kind) -> list[torch.cuda.CUDAGraph]:
        """Graphs that cut images of a kind, one for each place; none if there are too many, or they cannot be had."""
        with self._lock:
            name = f"images of {kind[1]} x {kind[0]} are sent"
            return self._graphs.capture(kind, name, partial(self._prepare, kind))

    def _prepare(self, kind: _Kind) -> tuple[list[Callable[[], object]], list[torch.Tensor]]:
        """What the graphs do and read, see `GraphsByKind.capture`; the places are made with the first ones."""
        if not self._places:
            with torch.inference_mode(False):  # helpers write to them
                self._places = [_Place(self._crops, self._device) for _ in range(_PLACES)]
        image = torch.zeros(_LARGEST, dtype=torch.uint8, device=self._device)
        read = self._cut(image, torch.zeros_like(self._places[0].crops), kind)  # compiles kernels
        return [partial(self._cut, place.source, place.crops, kind) for place in self._places], read

    def _cut(self, source: torch.Tensor, crops: torch.Tensor, kind: _Kind) -> list[torch.Tensor]:
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
        np.copyto(piece.there, piece.here)  # numpy lets other threads run meanwhile
        place.source[piece.start : piece.end].copy_(place.pinned[piece.start : piece.end], non_blocking=True)


@dataclass(slots=True, frozen=True)
class Piece:
    """Bytes `start` to before `end` of what is sent: `here` they are, `there` they are to be copied to."""

    here: NDArray[np.uint8]
    there: NDArray[np.uint8]
    start: int
    end: int


def pieces_of(memory: NDArray[np.uint8], image: Pixels, size: int = _PIECE) -> Iterator[Piece]:
    """An image in pieces of whole rows, of about so many bytes: RGB, or luma and both chromas behind each other.

    Args:
        memory: bytes where it is to be.
        image: it, in main memory.
        size: of a piece, in bytes.
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

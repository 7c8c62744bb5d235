"""What comes of images that are sent, byte for byte: on a GPU, or on a CPU with graphs that are calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.engine.image import Pixels, YuvImage, as_array
from saccade.engine.models.protocol import Tiling, crop_count
from saccade.engine.runtime import graph_capture
from saccade.engine.runtime.image_encoder import cut_crops_into
from saccade.engine.runtime.uploads import CudaUploads, StagedImage, TiledUploads
from tests.support.engine import noise
from tests.support.engine.eager_cuda import Now, pageable
from tests.support.engine.kernels import DEVICE, needs_triton

pytestmark = needs_triton
SIDE, MARGIN = 24, 4
MATRIX = 104597, 132201, 25675, 53279


class Call:
    """A graph that is captured by keeping what it runs."""

    def __init__(self, work: Callable[[], None], _: object) -> None:
        self.replay = work


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    if DEVICE == "cuda":
        yield torch.device("cuda", 0)
        return
    replaced: dict[str, object] = {
        **{f"torch.{make}": pageable(getattr(torch, make)) for make in ("zeros", "empty", "tensor")},
        **{f"torch.cuda.{name}": Now for name in ("Stream", "Event", "current_stream", "default_stream")},
        **{f"torch.cuda.{name}": lambda *_: None for name in ("graph_pool_handle", "set_stream", "synchronize")},
        "saccade.engine.runtime.graph_capture.captured": Call,
        "torch.cuda.stream": lambda _: nullcontext(),
    }
    with ExitStack() as stack:
        for place, stand_in in replaced.items():
            stack.enter_context(mock.patch(place, stand_in))
        yield torch.device("cpu")


def yuv(rows: int, columns: int, seed: int) -> YuvImage:
    planes = [torch.from_numpy(noise(height, columns, seed)[..., 0].copy()) for height in (rows, rows // 2, rows // 2)]
    return YuvImage(planes[0], planes[1][:, ::2], planes[2][:, ::2], MATRIX, full_range=False)


def crops_of(image: Pixels, tiling: Tiling) -> np.ndarray:
    rows, columns = tiling
    whole = Image.fromarray(as_array(image))
    crops = [np.asarray(whole.resize((SIDE, SIDE), Image.Resampling.LANCZOS))]
    if tiling != (1, 1):
        window = SIDE - 2 * MARGIN
        size = columns * window + 2 * MARGIN, rows * window + 2 * MARGIN
        large = np.asarray(whole.resize(size, Image.Resampling.LANCZOS))
        for y in range(0, rows * window, window):
            crops += [large[y : y + SIDE, x : x + SIDE] for x in range(0, columns * window, window)]
    return np.stack(crops)


def test_an_image_alone_is_the_crop_that_it_is_among_others(device: torch.device) -> None:
    uploads = CudaUploads(device, 2, 3, SIDE)
    images: list[Pixels] = [noise(36, 64, 1), yuv(36, 64, 2), noise(36, 64, 3), noise(64, 40, 4), yuv(36, 64, 5)]
    current = torch.cuda.current_stream()
    for slot, image in enumerate(images):
        uploads.compile_for(*image.shape[:2], yuv=isinstance(image, YuvImage))
        staged = uploads.stage(image)
        assert isinstance(staged, StagedImage)
        uploads.crops[slot % 2].fill_(7)
        torch.cuda.synchronize()
        uploads.cut(slot % 2, [(0, staged)], current).synchronize()
        got = uploads.crops[slot % 2].cpu().numpy()
        assert np.array_equal(got[:1], crops_of(image, (1, 1)))
        assert (got[1:] == 7).all()
    together = [uploads.stage(image) for image in images[1:4]]
    uploads.cut(1, [(place, one) for place, one in enumerate(together) if one], current).synchronize()
    for got, image in zip(uploads.crops[1].cpu().numpy(), images[1:4], strict=True):
        assert np.array_equal(got[None], crops_of(image, (1, 1)))
    uploads.close()


@pytest.mark.parametrize("make", [noise, yuv])
@pytest.mark.parametrize(
    ("places", "graph"), [((0, 1, 2, 3), True), ((3, 1, 2), True), ((1, 0), False), ((0,), False), ((2,), False)]
)
def test_images_alike_are_resized_by_a_graph(
    device: torch.device, make: Callable[[int, int, int], Pixels], places: tuple[int, ...], graph: bool
) -> None:
    """As many as there may be are four; the other crops stay as they are."""
    uploads, current = CudaUploads(device, 2, 4, SIDE), torch.cuda.current_stream()
    uploads.compile_for(36, 64, yuv=make is yuv)
    images = {place: make(36, 64, place) for place in places}
    for slot in (0, 1):
        uploads.crops[slot].fill_(7)
        staged = [(place, uploads.stage(image)) for place, image in images.items()]
        torch.cuda.synchronize()
        with mock.patch.object(uploads, "_resize", side_effect=uploads._resize) as resize:
            uploads.cut(slot, [(place, one) for place, one in staged if one], current).synchronize()
        assert resize.called is not graph
        for place, got in enumerate(uploads.crops[slot].cpu().numpy()):
            assert np.array_equal(
                got[None], crops_of(images[place], (1, 1)) if place in images else np.full_like(got, 7)[None]
            )
    uploads.close()


@pytest.mark.parametrize("captures", [0, 1, 2])
def test_images_come_without_graphs_there_is_no_memory_for(device: torch.device, captures: int) -> None:
    left = iter(range(captures))

    def some(work: Callable[[], None], memory: object) -> object:
        if next(left, None) is None:
            raise RuntimeError("CUDA error: out of memory")  # as the driver says it: no OutOfMemoryError
        return capture(work, memory)

    capture: Callable[..., object] = graph_capture.captured
    uploads, current = CudaUploads(device, 2, 2, SIDE), torch.cuda.current_stream()
    with mock.patch.object(graph_capture, "captured", some):
        uploads.compile_for(36, 64, yuv=False)
    images = [noise(36, 64, seed) for seed in (1, 2)]
    staged = [uploads.stage(image) for image in images]
    with mock.patch.object(uploads, "_resize", side_effect=uploads._resize) as resize:
        uploads.cut(0, [(place, one) for place, one in enumerate(staged) if one], current).synchronize()
    assert resize.called is (captures < 2), "there is one for each slot, or none"
    assert np.array_equal(uploads.crops[0].cpu().numpy(), np.concatenate([crops_of(image, (1, 1)) for image in images]))
    uploads.close()


def test_crops_of_any_place_are_those_of_pillow(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.runtime.uploads.pieces_of.__defaults__", (1000,))
    stream = torch.cuda.Stream()
    tiled = TiledUploads(device, stream, (7, SIDE, SIDE, 3), partial(cut_crops_into, margin=MARGIN))
    shown: list[tuple[Pixels, Tiling]] = [
        (noise(40, 64, 1), (2, 3)),
        (yuv(40, 64, 2), (2, 3)),
        (noise(40, 64, 3), (1, 1)),
        (noise(80, 130, 4)[::2, ::2], (2, 3)),
        (noise(64, 40, 5), (3, 1)),
    ]
    for start in range(len(shown)):
        several = [*shown[start:], *shown[:start]]
        sent = [tiled.send(image, tiling) for image, tiling in several]
        assert [one is None for one in sent] == [False] * 4 + [True], "there are four places"
        assert not tiled.all_free
        for one, (image, tiling) in zip(sent[:4], several[:4], strict=True):
            assert one is not None
            one.ready.synchronize()
            assert len(one.pixels) == crop_count(tiling)
            assert np.array_equal(one.pixels.cpu().numpy(), crops_of(image, tiling))
        del sent, one
        assert tiled.all_free
    tiled.close()


def test_an_image_that_cannot_be_copied_gives_its_place_back(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not copied any more: its place may be another's."""
    monkeypatch.setattr("saccade.engine.runtime.uploads.pieces_of.__defaults__", (1000,))
    tiled = TiledUploads(device, torch.cuda.Stream(), (7, SIDE, SIDE, 3), partial(cut_crops_into, margin=MARGIN))
    image, ended, late = noise(40, 64, 1), threading.Event(), list[str]()

    def fails(*_: object) -> None:
        if ended.is_set():
            late.append(threading.current_thread().name)
        raise OSError("the image is gone")

    for _ in range(6):  # more than there are places
        ended.clear()
        with mock.patch("numpy.copyto", fails), pytest.raises(OSError, match="gone"):
            tiled.send(image, (2, 3))
        ended.set()
    assert not late
    for _ in range(6):
        one = tiled.send(image, (2, 3))
        assert one is not None
        one.ready.synchronize()
        assert np.array_equal(one.pixels.cpu().numpy(), crops_of(image, (2, 3)))
    tiled.close()
    again = tiled.send(image, (2, 3))
    assert again is not None, "an engine that is being closed finishes what it has begun"


def test_without_memory_for_a_graph_images_come_as_others_do(device: torch.device) -> None:
    tiled = TiledUploads(device, torch.cuda.Stream(), (7, SIDE, SIDE, 3), partial(cut_crops_into, margin=MARGIN))
    with mock.patch.object(tiled, "_prepare", side_effect=torch.OutOfMemoryError) as captured:
        assert [tiled.send(noise(40, 64), (2, 3)) for _ in range(3)] == [None] * 3
    assert captured.call_count == 1
    tiled.close()

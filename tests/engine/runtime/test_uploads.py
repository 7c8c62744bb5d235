"""What comes of images that are sent, byte for byte: on a GPU, or on a CPU with graphs that are calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
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
from saccade.engine.runtime.uploads import CudaUploads, TiledUploads
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


def cut(uploads: CudaUploads, slot: int, images: Mapping[int, Pixels]) -> np.ndarray:
    """The crops of a slot, which were 7, after images came to their places."""
    uploads.crops[slot].fill_(7)
    staged = [(place, uploads.stage(image)) for place, image in images.items()]
    torch.cuda.synchronize()
    uploads.cut(slot, [(place, one) for place, one in staged if one], torch.cuda.current_stream()).synchronize()
    return uploads.crops[slot].cpu().numpy()


@pytest.mark.parametrize("captured", [True, False])
def test_images_of_any_size_and_format_are_cut_together(device: torch.device, captured: bool) -> None:
    """With graphs, and without those that there was no memory for."""
    failing = mock.patch.object(graph_capture, "captured", side_effect=RuntimeError("CUDA error: out of memory"))
    with nullcontext() if captured else failing:
        uploads = CudaUploads(device, 2, 4, SIDE)
    assert bool(uploads._graphs) is captured
    shown: list[Pixels] = [noise(36, 64, 1), yuv(36, 64, 2), noise(64, 40, 3), yuv(48, 30, 4)]
    for slot, places in enumerate([(0, 1, 2, 3), (2, 0), (3,)]):
        images = dict(zip(places, shown[slot:], strict=False))
        got = cut(uploads, slot % 2, images)
        for place, one in enumerate(got):
            wanted = crops_of(images[place], (1, 1))[0] if place in images else np.full_like(one, 7)
            assert np.array_equal(one, wanted)
    uploads.close()


def test_images_that_exceed_the_buffer_of_the_graph_are_cut_without_it(device: torch.device) -> None:
    with mock.patch("saccade.engine.runtime.uploads._BETWEEN_ROWS", 40):
        uploads = CudaUploads(device, 1, 2, SIDE)
    images: dict[int, Pixels] = {0: noise(36, 64, 1), 1: yuv(60, 100, 2)}
    with mock.patch.object(uploads, "_resize", side_effect=uploads._resize) as resize:
        got = cut(uploads, 0, images)
    assert resize.called
    assert np.array_equal(got, np.concatenate([crops_of(image, (1, 1)) for image in images.values()]))
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

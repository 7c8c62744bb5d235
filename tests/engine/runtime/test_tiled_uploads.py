"""Images in pieces: every byte once, where it belongs; and places that are free again once they are dropped."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from saccade.engine.image import YuvImage
from saccade.engine.runtime.uploads import TiledUploads, lease_of, pieces_of
from tests.support.engine import noise
from tests.support.engine.eager_cuda import Now


def sent(image: NDArray[np.uint8] | YuvImage, size: int) -> tuple[NDArray[np.uint8], list[tuple[int, int]]]:
    memory = np.full(1 << 16, 7, np.uint8)
    device = np.full(1 << 16, 9, np.uint8)
    spans = []
    for piece in pieces_of(memory, image, size):
        np.copyto(piece.there, piece.here)
        device[piece.start : piece.end] = memory[piece.start : piece.end]
        spans.append((piece.start, piece.end))
    return device, spans


@pytest.mark.parametrize("size", [1, 100, 1000, 1 << 20])
@pytest.mark.parametrize("part", [slice(None), slice(3, 90, 2)])
def test_pieces_of_an_image_are_all_of_it(size: int, part: slice) -> None:
    image = noise(40, 100)[:, part]
    device, spans = sent(image, size)
    assert np.array_equal(device[: image.size].reshape(image.shape), image)
    assert (device[image.size :] == 9).all()
    assert spans[0][0] == 0
    assert spans[-1][1] == image.size
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    assert all(end - start <= max(size, image[0].size) for start, end in spans)


def test_the_planes_of_yuv_lie_behind_each_other() -> None:
    planes = [torch.tensor(noise(rows, 96)[..., 0]) for rows in (40, 20, 20)]
    yuv = YuvImage(planes[0], planes[1][:, ::2], planes[2][:, ::2], (1, 2, 3, 4), full_range=False)
    device, spans = sent(yuv, 500)
    wanted = np.concatenate([plane.numpy().reshape(-1) for plane in (yuv.y, yuv.u, yuv.v)])
    assert np.array_equal(device[: len(wanted)], wanted)
    assert spans[-1][1] == len(wanted) == 40 * 96 * 3 // 2


def test_a_place_is_free_once_it_is_dropped() -> None:
    free = deque(range(2))
    one, other = lease_of(free), lease_of(free)
    assert one is not None
    assert other is not None
    assert {one.number, other.number} == {0, 1}
    assert lease_of(free) is None
    number = one.number
    del one
    again = lease_of(free)
    assert again is not None
    assert again.number == number


def test_a_size_without_graphs_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Now)
    monkeypatch.setattr(torch.cuda, "current_stream", Now)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    uploads = TiledUploads(torch.device("cpu"), Now(), (2, 24, 24, 3), mock.Mock())  # type: ignore[arg-type]
    full = RuntimeError("CUDA error: out of memory")  # as the driver says it: no OutOfMemoryError
    with mock.patch.object(uploads, "_prepare", side_effect=full) as captured:
        assert [uploads.send(noise(40, 60), (1, 1)) for _ in range(3)] == [None] * 3
    assert captured.call_count == 1
    assert len(uploads._free) == 4
    uploads.close()

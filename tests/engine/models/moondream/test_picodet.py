from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from saccade.engine.models.nano.detector_tower import boxes_at, distances, places
from saccade.engine.models.nano.picodet import BINS, PicoDet
from tests.support.engine import one_thread


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


def detector() -> PicoDet:
    torch.manual_seed(0)
    return PicoDet(5, 2).eval().requires_grad_(False)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96), (160, 96)])
def test_every_place_has_features_classes_and_sides(height: int, width: int) -> None:
    seen = detector()(torch.randn(2, 3, height, width))
    centres, strides = places(height, width, torch.device("cpu"))
    assert seen.features.shape == (2, len(centres), 96)
    assert seen.classes.shape == (2, len(strides), 5)
    assert seen.sides.shape == (2, len(strides), 2 * 4 * BINS)
    assert seen.grid.shape == (2, 96, height // 32, width // 32)


def test_places_are_the_middles_of_cells_row_by_row() -> None:
    centres, strides = places(64, 96, torch.device("cpu"))
    assert centres[:2].tolist() == [[4.0, 4.0], [12.0, 4.0]]
    assert centres[12].tolist() == [4.0, 12.0]
    assert strides.unique(return_counts=True)[1].tolist() == [96, 24, 6, 2]
    assert centres[96].tolist() == [8.0, 8.0]


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_memory_layout_changes_nothing(memory: torch.memory_format) -> None:
    crops = torch.randn(2, 3, 64, 96)
    plain, other = detector(), detector().to(memory_format=memory)  # type: ignore[call-overload]
    wanted, got = plain(crops), other(crops.contiguous(memory_format=memory))
    assert torch.allclose(got.classes, wanted.classes, atol=1e-5)
    assert torch.allclose(got.features, wanted.features, atol=1e-5)


def test_crops_do_not_see_each_other() -> None:
    model, crops = detector(), torch.randn(3, 3, 64, 64)
    alone = torch.cat([model(crop.unsqueeze(0)).classes for crop in crops])
    assert torch.allclose(model(crops).classes, alone, atol=1e-5)


def test_a_box_reaches_as_far_as_its_bins_say() -> None:
    sides = torch.full((1, 4 * BINS), -30.0)
    for side, reach in enumerate((1, 2, 3, 7)):
        sides[0, side * BINS + reach] = 30.0
    assert distances(sides)[0].tolist() == pytest.approx([1, 2, 3, 7], abs=1e-5)
    box = boxes_at(torch.tensor([[100.0, 50.0]]), torch.tensor([8.0]), sides)[0]
    assert box.tolist() == pytest.approx([92, 34, 124, 106], abs=1e-3)

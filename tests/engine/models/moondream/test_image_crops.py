from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade.engine.models.moondream.config import MoondreamConfig, VisionConfig
from saccade.engine.models.moondream.vision import make_crops, normalize, select_tiling, stitch
from saccade.engine.models.nano.detector_tower import landscape_rows
from tests.support.engine import GOLDEN, noise

SMALL = VisionConfig(crop_size=16, enc_patch_size=4, overlap_margin=1, max_crops=6)  # windows of 8 pixels


@pytest.mark.parametrize(
    ("height", "width", "max_crops", "tiling"),
    [
        (266, 5000, 12, (1, 1)),  # one side fits a window
        (5000, 266, 12, (1, 1)),
        (-40, -40, 12, (1, 1)),  # smaller than its margins
        (300, 300, 12, (3, 3)),  # grown to use what is allowed
        (532, 1064, 12, (2, 4)),
        (1000, 300, 12, (6, 2)),
        (1300, 300, 12, (6, 2)),  # grown past the limit and cut back
        (300, 1300, 12, (2, 6)),
        (300, 3000, 12, (1, 8)),  # 2 × 12 do not fit: both sides shrink alike
        (12000, 300, 12, (12, 1)),  # 45 × 2 would shrink to 16 × 1
        (300, 300, 1, (1, 1)),
        (300, 300, 3, (1, 1)),
        (300, 300, 4, (2, 2)),
    ],
)
def test_tilings_worked_out_by_hand(height: int, width: int, max_crops: int, tiling: tuple[int, int]) -> None:
    assert select_tiling(height, width, 266, max_crops) == tiling


@given(st.integers(-200, 20000), st.integers(-200, 20000), st.integers(1, 500), st.integers(1, 64))
def test_a_tiling_has_at_least_one_tile_and_at_most_max_crops(
    height: int, width: int, window: int, max_crops: int
) -> None:
    rows, columns = select_tiling(height, width, window, max_crops)
    assert rows >= 1
    assert columns >= 1
    assert rows * columns <= max_crops


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 20))
def test_a_turned_image_has_the_turned_tiling(height: int, width: int, max_crops: int) -> None:
    rows, columns = select_tiling(height, width, 266, max_crops)
    assert select_tiling(width, height, 266, max_crops) == (columns, rows)


def test_the_golden_tilings() -> None:
    config = MoondreamConfig.from_file(GOLDEN / "config.json").vision
    for case in json.loads((GOLDEN / "cases.json").read_text()):
        width, height = case["size"]
        crops, tiling = make_crops(noise(height, width), config)
        assert (list(tiling), len(crops)) == (case["tiling"], case["crops"])


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, int, int, int]:
    grid = draw(st.integers(1, 8))
    return draw(st.integers(1, 4)), draw(st.integers(1, 4)), grid, draw(st.integers(0, (grid - 1) // 2))


@given(maps())
def test_stitching_tiles_cut_with_overlap_gives_the_map_back(shape: tuple[int, int, int, int]) -> None:
    rows, columns, grid, margin = shape
    step = grid - 2 * margin
    whole = torch.arange((rows * step + 2 * margin) * (columns * step + 2 * margin) * 2)
    whole = whole.view(rows * step + 2 * margin, columns * step + 2 * margin, 2)
    tiles = torch.stack(
        [whole[r * step : r * step + grid, c * step : c * step + grid] for r in range(rows) for c in range(columns)]
    )
    assert torch.equal(stitch(tiles, (rows, columns), margin), whole)


def test_features_of_inner_margins_are_left_out() -> None:
    tiles = torch.zeros(2, 4, 4, 1)
    tiles[0, :, -1] = tiles[1, :, 0] = 9.0
    assert stitch(tiles, (1, 2), 1).max() == 0.0


@pytest.mark.parametrize(("height", "width"), [(16, 16), (1, 1), (3, 200), (200, 3), (16, 400), (9, 12)])
def test_a_image_that_fits_is_one_resized_crop_twice(height: int, width: int) -> None:
    image = noise(height, width)
    crops, tiling = make_crops(image, SMALL)
    assert tiling == (1, 1)
    assert crops.shape == (2, 16, 16, 3)
    assert crops.dtype == np.uint8
    wanted = np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.LANCZOS))
    assert np.array_equal(crops[0], wanted)
    assert np.array_equal(crops[1], wanted)


@pytest.mark.parametrize(("height", "width"), [(30, 30), (40, 60), (300, 30), (100, 1000)])
def test_a_large_image_is_a_global_crop_and_windows_of_a_resize(height: int, width: int) -> None:
    image = noise(height, width)
    crops, (rows, columns) = make_crops(image, SMALL)
    assert rows * columns > 1
    assert len(crops) == 1 + rows * columns
    image = Image.fromarray(image)
    assert np.array_equal(crops[0], np.asarray(image.resize((16, 16), Image.Resampling.LANCZOS)))
    resized = image.resize((columns * 8 + 8, rows * 8 + 8), Image.Resampling.LANCZOS)
    for row in range(rows):
        for column in range(columns):
            wanted = resized.crop((column * 8, row * 8, column * 8 + 16, row * 8 + 16))
            assert np.array_equal(crops[1 + row * columns + column], np.asarray(wanted))


def test_max_crops_of_one_means_the_global_crop_alone() -> None:
    assert make_crops(noise(700, 700), VisionConfig(max_crops=1))[1] == (1, 1)


def test_a_view_gives_the_crops_of_its_copy() -> None:
    view = noise(60, 40)[::-1, ::2]
    assert np.array_equal(make_crops(view, SMALL)[0], make_crops(view.copy(), SMALL)[0])


def test_the_image_is_not_changed() -> None:
    image = noise(60, 40)
    image.flags.writeable = False
    crops, _ = make_crops(image, SMALL)
    crops[:] = 0
    assert image.max() > 0


def test_normalise_maps_bytes_to_minus_one_to_one_channels_first() -> None:
    crops = torch.tensor([0, 255, 51], dtype=torch.uint8).expand(2, 4, 5, 3)
    out = normalize(crops, torch.float32)
    assert out.shape == (2, 3, 4, 5)
    assert torch.allclose(out[1, :, 2, 3], torch.tensor([-1.0, 1.0, -0.6]))
    assert crops[0, 0, 0].tolist() == [0, 255, 51]


@pytest.mark.parametrize(
    ("height", "width", "rows"),
    [
        (360, 640, 288),
        (1080, 1920, 288),
        (200, 1000, 288),
        (400, 600, 288),
        (480, 640, 416),
        (416, 416, 416),
        (640, 360, 416),
    ],
)
def test_a_wide_image_keeps_its_shape_in_fewer_rows(height: int, width: int, rows: int) -> None:
    assert landscape_rows(height, width, 416) == rows


def test_a_crop_has_no_more_rows_than_columns() -> None:
    assert landscape_rows(90, 160, 16) == 16

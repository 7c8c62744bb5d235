from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from saccade.engine.golden.reference import Generator
from saccade.engine.models.moondream.model import load
from saccade.engine.models.moondream.vision import VisionTower, make_crops, normalize, stitch
from tests.support.engine import NANO, TINY, noise, one_thread, random_model

MODEL = random_model(TINY)
TOWER: VisionTower = MODEL.vision


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


def crops_of(height: int, width: int) -> tuple[torch.Tensor, tuple[int, int]]:
    crops, tiling = make_crops(noise(height, width), TINY.vision)
    return normalize(torch.from_numpy(crops), torch.float32), tiling


def slow(crops: torch.Tensor, tiling: tuple[int, int]) -> torch.Tensor:
    """Image tokens as the reference makes them: every crop through the tower, stitched, pooled, whatever the tiling."""
    features = TOWER.features(crops)
    whole = stitch(features[1:].view(-1, 4, 4, 16), tiling, TINY.vision.overlap_margin)
    pooled = F.adaptive_avg_pool2d(whole.permute(2, 0, 1), (4, 4)).permute(1, 2, 0).reshape(16, 16)
    return TOWER.proj_mlp(torch.cat([features[0], pooled], dim=-1))


@pytest.mark.parametrize(("height", "width"), [(16, 16), (9, 40), (30, 30), (300, 30), (40, 60)])
def test_one_run_for_one_tile_gives_what_two_would(height: int, width: int) -> None:
    crops, tiling = crops_of(height, width)
    tokens = TOWER(crops, tiling)
    assert tokens.shape == (TINY.vision.n_tokens, TINY.text.dim)
    assert torch.allclose(tokens, slow(crops, tiling), atol=1e-5)


def test_the_generator_leaves_the_second_crop_of_one_tile_out() -> None:
    crops, tiling = crops_of(12, 12)
    assert torch.allclose(
        Generator(MODEL, TINY.tokenizer.eos_id).image_tokens(noise(12, 12)), slow(crops, tiling), atol=1e-5
    )


def test_crops_do_not_see_each_other() -> None:
    crops, _ = crops_of(40, 60)
    together = TOWER.features(crops)
    alone = torch.cat([TOWER.features(crop.unsqueeze(0)) for crop in crops])
    assert torch.allclose(together, alone, atol=1e-4)


def test_patches_are_read_channel_by_channel_and_row_by_row() -> None:
    tower = random_model(TINY).vision
    patch, grid = TINY.vision.enc_patch_size, TINY.vision.grid
    tower.patch_emb.weight.zero_()
    tower.patch_emb.bias.zero_()
    channel, row, column = 2, 1, 3
    tower.patch_emb.weight[0, channel * patch * patch + row * patch + column] = 1.0
    crops = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tower.blocks = torch.nn.ModuleList()
    tower.post_ln = torch.nn.Identity()  # type: ignore[assignment]
    tower.pos_emb = torch.nn.Parameter(torch.zeros_like(tower.pos_emb), requires_grad=False)
    wanted = crops[0, channel, row::patch, column::patch].reshape(grid * grid)
    assert torch.equal(tower.features(crops)[0, :, 0], wanted)


def test_nano_stays_within_its_budget_of_work_and_bytes() -> None:
    model = load(NANO, torch.device("cpu"), torch.float32)
    size = model.vision.crop_size
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.vision.features(torch.zeros(1, 3, size, size))
    assert counter.get_total_flops() <= 1.25e9
    assert (NANO / "model.safetensors").stat().st_size <= 8e6
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 4e6


def test_max_crops_buys_speed_for_detail() -> None:
    fewer = dataclasses.replace(TINY.vision, max_crops=1)
    assert len(make_crops(noise(40, 60), TINY.vision)[0]) > 2
    assert len(make_crops(noise(40, 60), fewer)[0]) == 2

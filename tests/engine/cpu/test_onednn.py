from __future__ import annotations

import pytest
import torch
from torch import nn

from saccade.engine.cpu.layers import FusedMlp, Linear, fuse
from saccade.engine.models.moondream.layers import Mlp
from tests.support.engine import TINY, random_model
from tests.support.engine.onednn import needs_onednn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 300])
@pytest.mark.parametrize("size", [(24, 40), (192, 512)], ids=["read as it is", "laid out once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_product_is_the_plain_one_however_many_rows(rows: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    inner, outer = size
    shapes = (2, rows, inner), (outer, inner), (outer,), (2, rows, outer)
    x, weight, bias, add = (random(*shape).to(dtype) for shape in shapes)
    wanted = nn.functional.linear(x, weight, bias)
    product, part = Linear(weight, bias), Linear(weight[8:], bias[8:])  # a part of a joined matrix
    for _ in range(2):
        assert torch.allclose(product(x), wanted, atol=1e-4)
        assert torch.allclose(product(x, add), wanted + add, atol=1e-4)
        assert torch.allclose(part(x), wanted[..., 8:], atol=1e-4)


@needs_onednn
@torch.inference_mode()
def test_a_fused_tower_of_patches_gives_the_same_features() -> None:
    plain, fused = (random_model(TINY).vision for _ in range(2))
    fuse(fused)
    assert sum(isinstance(module, FusedMlp) for module in fused.modules()) == 2
    crops = random(3, 3, 16, 16)
    assert torch.allclose(fused(crops, (1, 2)), plain(crops, (1, 2)), atol=1e-4)


def test_other_numbers_than_float32_are_left_alone() -> None:
    vision = random_model(TINY).vision.bfloat16()
    fuse(vision)
    assert any(isinstance(module, Mlp) for module in vision.modules())
    assert not any(isinstance(module, FusedMlp) for module in vision.modules())


@needs_onednn
def test_who_switches_onednn_off_gets_the_plain_layers() -> None:
    vision = random_model(TINY).vision
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        fuse(vision)
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert not any(isinstance(module, FusedMlp) for module in vision.modules())

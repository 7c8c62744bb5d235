"""What packing leaves of a model: its weights once, in half precision or in FP8. On the CPU, where Triton is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from saccade.engine.cuda.paged_cache import PagedCache
from saccade.engine.errors import Fallbacks
from saccade.engine.kernels import E4M3
from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.moondream.config import ExpertsConfig, MoondreamConfig, TextConfig, VisionConfig
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block, join
from saccade.engine.models.quantization import quantize, round_to_fp8
from tests.support.engine import random_model

if TYPE_CHECKING:
    from saccade.engine.cuda.layers import PackedBlocks
    from saccade.engine.cuda.vision import PackedVision

pytest.importorskip("triton", reason="Triton comes with torch for CUDA only")
TEXT = TextConfig(
    dim=256, ff_dim=1792, n_layers=2, vocab_size=512, max_context=192, n_heads=4, n_kv_heads=4, prefix_attn=82
)
EXPERTS = ExpertsConfig(num_experts=4, start_layer=1, experts_per_token=2, expert_inner_dim=256)
VISION = VisionConfig(
    enc_dim=144, enc_n_layers=2, enc_ff_dim=288, enc_n_heads=2, proj_out_dim=256, crop_size=126, proj_inner_dim=256
)


@pytest.fixture(params=[False, True], ids=["dense", "experts"])
def model(request: pytest.FixtureRequest) -> Moondream:
    text = replace(TEXT, moe=EXPERTS) if request.param else TEXT
    model: Moondream = random_model(MoondreamConfig(text=text, vision=VISION)).to(torch.bfloat16)
    round_to_fp8(model)
    return model


def packed(
    model: Moondream, monkeypatch: pytest.MonkeyPatch, *, rows: bool = True
) -> tuple[PackedBlocks, PackedVision]:
    """A model's blocks as a GPU has them whose products of many rows are in FP8 or not."""
    from saccade.engine.cuda import layers, vision

    monkeypatch.setattr(layers, "supports_fp8", lambda device: True)
    for module in (layers, vision):
        monkeypatch.setattr(module, "supports_fp8_gemm", lambda *_: rows)
    blocks = layers.PackedBlocks(model, PagedCache(model, 16, 16), Fallbacks())
    return blocks, vision.PackedVision(model, Fallbacks())


def matrices(model: Moondream) -> dict[str, torch.Tensor]:
    """The weights of blocks that are rounded."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if ".blocks." in name and name.endswith("weight") and parameter.ndim > 1 and "router" not in name
    }


def test_fp8_weights_are_kept_once(model: Moondream, monkeypatch: pytest.MonkeyPatch) -> None:
    before, numbers = copy.deepcopy(model), model.n_parameters()
    kept = packed(model, monkeypatch)
    assert model.n_parameters() == numbers
    assert {name: one.shape for name, one in matrices(model).items()} == {
        name: one.shape for name, one in matrices(before).items()
    }
    assert all(one.dtype == E4M3 for one in matrices(model).values())
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in matrices(model).values()}
    assert sum(storages.values()) == sum(one.numel() for one in matrices(before).values())
    assert model.dtype == torch.bfloat16
    assert kept[0].fp8_rows


def test_kernels_read_what_the_whole_weights_are_in_fp8(model: Moondream, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copy.deepcopy(model)
    blocks, _ = packed(model, monkeypatch)
    for layer, block in zip(blocks.layers, before.text.blocks, strict=True):
        assert isinstance(block, Block)
        joined = join(block)
        for mine, whole in ((layer.into, joined.into), (layer.out, joined.out)):
            assert mine.half is None
            wanted, scale = quantize(whole)
            assert mine.scale is not None
            assert torch.equal(mine.weight.float(), wanted.float())
            assert torch.equal(mine.scale, scale)
        if isinstance(block.mlp, Experts):
            assert layer.experts is not None
            assert torch.equal(layer.experts.fc1[2].float(), quantize(block.mlp.fc1.weight[2])[0].float())
            assert torch.equal(layer.experts.fc2[3].float(), quantize(block.mlp.fc2.weight[3])[0].float())


def test_half_precision_is_kept_where_many_rows_are_not_in_fp8(
    model: Moondream, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = copy.deepcopy(model)
    blocks, _ = packed(model, monkeypatch, rows=False)
    for layer in blocks.layers:
        assert layer.into.weight.dtype == E4M3
        assert layer.into.half is not None
        assert layer.into.half.dtype == torch.bfloat16
    whole, wanted = matrices(model), matrices(before)
    for name in whole:
        if "text" not in name or ".attn." in name:
            assert torch.equal(whole[name], wanted[name])


def test_adapters_of_packed_layers_are_in_half_precision(model: Moondream, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(model, monkeypatch)
    bank = AdapterBank(model.text, 2, 8)
    assert {one.dtype for layer in bank._layers.values() for one in (layer.a, layer.b)} == {torch.bfloat16}


def test_a_model_is_packed_once(model: Moondream, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(model, monkeypatch)
    with pytest.raises(AssertionError, match="packed already"):
        packed(model, monkeypatch)


def test_nor_are_experts_packed_again_where_the_rest_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Moondream = random_model(MoondreamConfig(text=replace(TEXT, moe=EXPERTS), vision=VISION)).to(torch.bfloat16)
    round_to_fp8(model)
    assert packed(model, monkeypatch, rows=False)
    with pytest.raises(AssertionError, match="packed already"):
        packed(model, monkeypatch, rows=False)

"""What Moondream 3 adds to the family: experts, attention's temperature, its config and shards, its costs."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.engine import AdapterError, ModelFilesError, UnknownModelError
from saccade.engine.models import model_files
from saccade.engine.models.lora import AdapterBank, load_adapter
from saccade.engine.models.moondream.config import ExpertsConfig, ModelConfigError, MoondreamConfig
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream, load
from saccade.engine.models.moondream.random_weights import MOONDREAM_3
from saccade.engine.models.moondream.text import Temperature
from saccade.engine.models.quantization import dequantize, quantize, round_to_fp8
from tests.support.engine import GOLDEN_3, TINY_3, one_thread, random_model

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = json.loads((GOLDEN_3 / "config.json").read_text())["config"]


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden set's model, to be tampered with."""
    for name in (
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ):
        (tmp_path / name).write_bytes((GOLDEN_3 / name).read_bytes())
    return tmp_path


def test_a_config_with_experts_has_moondream_3s_defaults() -> None:
    config = MoondreamConfig.from_dict({"text": {"moe": {}}})
    assert config.text.moe == ExpertsConfig(64, 4, 8, 1024)
    assert (config.text.rope_theta, config.text.tau, config.text.max_context) == (1.5e6, 1, 4096)
    assert (config.region.inner_dim, config.tokenizer.query_suffixes) == (0, 1)
    dense = MoondreamConfig.from_dict({"text": {"moe": None}})
    assert dense == MoondreamConfig.from_dict({}) == MoondreamConfig()


def test_both_names_of_an_experts_field_are_read() -> None:
    config = MoondreamConfig.from_dict({"text": {"moe": {"n_experts": 16, "n_experts_per_tok": 3}}})
    assert config.text.moe == ExpertsConfig(16, 4, 3, 1024)


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("text", {"moe": []}, "section 'text.moe' must be a JSON object"),
        ("text", {"moe": {"experts": 3}}, "unknown field 'text.moe.experts'"),
        ("text", {"moe": {"num_experts": "8"}}, "field 'text.moe.num_experts' must be of type int; got '8'"),
        ("text", {"moe": {"num_experts": 4}}, "text.moe needs from 1 to num_experts"),
        ("text", {"moe": {}, "n_kv_heads": 8}, "text.tau is 1 or 0, and 1 needs text.n_kv_heads"),
        ("text", {"rope_theta": "1"}, "field 'text.rope_theta' must be of type float; got '1'"),
        ("text", {"rope_theta": float("inf")}, "field 'text.rope_theta' must be finite"),
        ("text", {"rope_theta": 0}, "text.rope_theta must be above 0"),
        ("region", {"reads": "post_ln"}, "region.reads must be one of raw, ln, post_ln_ln"),
    ],
)
def test_a_wrong_field_is_named(section: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        MoondreamConfig.from_dict({section: values})
    assert says in str(caught.value)


def test_published_dimensions_have_9_3_billion_weights() -> None:
    with torch.device("meta"):
        model = Moondream(MOONDREAM_3)
    assert model.n_parameters() == pytest.approx(9.27e9, rel=0.01)
    assert model.text.n_block_weights == pytest.approx(1.556e9, rel=0.01)
    names = list(model.state_dict())
    assert len(names) == 662  # as the published index has
    assert sum(name.startswith("region.") for name in names) == 12


def test_shards_and_one_file_are_the_same(folder: Path) -> None:
    sharded = load(folder, CPU, torch.float32).state_dict()
    tensors = {}
    for shard in sorted(folder.glob("model-*")):
        tensors |= load_file(shard)
        shard.unlink()
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    assert model_files.find(str(folder)) == folder
    whole = load(folder, CPU, torch.float32).state_dict()
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def no_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def lost_tensor(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    tensors.pop("model.vision.pos_emb", None)
    save_file(tensors, shard)


def index_of(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_shard, "model-00002-of-00002"),
        (lost_tensor, "tensor 'model.vision.pos_emb' .* is missing"),
        (index_of("{"), "invalid index of weight files"),
        (index_of('{"weight_map": []}'), "invalid index of weight files"),
        (index_of('{"weight_map": {"a": "../b.safetensors"}}'), "invalid index of weight files"),
    ],
)
def test_damaged_shards_are_one_line(folder: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(folder)
    with pytest.raises(ModelFilesError, match=says) as caught:
        load(folder, CPU, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UnknownModelError, match=r"it has no model\.safetensors"):
        model_files.find(str(folder))


def test_heads_read_the_region_norm_or_else_the_hidden_state(folder: Path) -> None:
    assert load(folder, CPU, torch.float32).config.region.reads == "post_ln_ln"  # as its config.json says
    config = json.loads((folder / "config.json").read_text())
    del config["config"]["region"]["reads"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder, CPU, torch.float32).config.region.reads == "ln"
    for shard in folder.glob("model-*"):
        save_file({k: v for k, v in load_file(shard).items() if ".region.ln." not in k}, shard)
    assert load(folder, CPU, torch.float32).config.region.reads == "raw"


def experts(seed: int = 0) -> Experts:
    layer = Experts(ExpertsConfig(num_experts=6, experts_per_token=2, expert_inner_dim=20), 32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return layer.requires_grad_(False)


def test_each_token_goes_through_its_own_experts() -> None:
    layer, x = experts(), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    got = layer(x)
    for token, out in zip(x.view(-1, 32), got.view(-1, 32), strict=True):
        logits = layer.router.weight @ token + layer.router.bias
        best = sorted(range(6), key=lambda n: -float(logits[n]))[:2]
        weights = logits[best].softmax(0)
        wanted = torch.zeros(32)
        for weight, number in zip(weights, best, strict=True):
            h, g = (layer.fc1.weight[number] @ token).chunk(2)
            wanted += weight * (layer.fc2.weight[number] @ (0.5 * h * (1 + torch.erf(h / 2**0.5)) * (g + 1)))
        assert torch.allclose(out, wanted, atol=1e-5)
    flat = x.flatten(0, 1)
    assert torch.allclose(layer._all_at_once(flat, *layer.route(flat)), got.flatten(0, 1), atol=1e-5)


def test_a_temperature_is_of_position_and_of_token() -> None:
    config = TINY_3.text
    temperature = random_model(TINY_3).text.blocks[0].attn.tau
    assert isinstance(temperature, Temperature)
    qkv = torch.randn(3, 3 * config.n_heads * config.head_dim)
    got = temperature(qkv, torch.tensor([0, 5, 80]))
    assert got.shape == (3, 2, config.n_heads)
    for row, position in enumerate((0, 5, 80)):
        gelu = 0.5 * qkv[row] * (1 + torch.erf(qkv[row] / 2**0.5))
        by_position = 0.5 + 1 / (1 + torch.exp(-temperature.alpha * torch.log(torch.tensor(position + 1.0))))
        for number, weight in enumerate((temperature.wq, temperature.wv)):
            assert torch.allclose(got[row, number], torch.tanh(weight @ gelu) + by_position, atol=1e-5)


def test_fp8_rounds_experts_and_no_router() -> None:
    model = random_model(TINY_3)
    before = copy.deepcopy(model)
    round_to_fp8(model)
    mine, theirs = (one.text.blocks[1].mlp for one in (model, before))
    assert isinstance(mine, Experts)
    assert isinstance(theirs, Experts)
    assert torch.equal(mine.router.weight, theirs.router.weight)
    for name in ("fc1", "fc2"):
        one, other = getattr(mine, name).weight, getattr(theirs, name).weight
        assert torch.equal(one[3], dequantize(*quantize(other[3]), torch.float32))


def test_one_switch_sets_the_gates_of_experts_and_of_the_temperature() -> None:
    x, at = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0)), torch.arange(20).expand(2, -1)
    hidden = []
    for gelu in ("erf", "tanh"):
        text = dataclasses.replace(TINY_3.text, gelu=gelu)
        hidden.append(random_model(dataclasses.replace(TINY_3, text=text)).text(x, at))
    assert 0 < (hidden[0] - hidden[1]).abs().max() < 0.05
    with pytest.raises(ModelConfigError, match=r"text\.gelu must be 'erf' or 'tanh'"):
        MoondreamConfig.from_dict({"text": {"gelu": "relu"}})


def test_adapters_leave_experts_alone(tmp_path: Path) -> None:
    text = random_model(TINY_3).text
    torch.manual_seed(0)
    pair = {"A": torch.randn(2, 32), "B": torch.randn(96, 2)}
    save_file({f"text.blocks.1.attn.qkv.{k}": v for k, v in pair.items()}, tmp_path / "a")
    bank = AdapterBank(text, 1, 4)
    bank.fill(1, load_adapter("a", tmp_path / "a", text, 4))
    x, at = torch.randn(2, 20, 32), torch.arange(20).expand(2, -1)
    plain, adapted = text(x, at), bank.text(torch.tensor([0, 1]))(x, at)
    assert torch.allclose(adapted[0], plain[0], atol=1e-4)  # experts' products have as many rows as chose them
    assert (adapted[1] - plain[1]).abs().max() > 0.1
    save_file({f"text.blocks.1.mlp.fc1.{k}": v for k, v in pair.items()}, tmp_path / "b")
    with pytest.raises(AdapterError, match="LoRA matrices of experts must have 3 dimensions"):
        load_adapter("b", tmp_path / "b", text, 4)

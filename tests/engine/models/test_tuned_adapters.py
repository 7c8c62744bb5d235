"""Adapters as the makers' tuning service writes them: a torch file with matrices of the MLPs and of every expert."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.engine import AdapterError, Detect, Engine, Point, Query, Task
from saccade.engine.models.lora import AdapterBank, load_adapter
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from tests.support.engine import TINY_3, noise, one_thread, random_model, write_model
from tests.support.engine.material import DEVICES

TASKS: list[Task] = [Detect("x", 4, 0.0), Point("y", 3, 0.0), Query("why?", 9)]
RANK = 4  # of an expert 2, as a token has 2 of them
Tensors = dict[str, torch.Tensor]


def tuned(seed: int, rank: int = RANK) -> Tensors:
    """A layer with a dense MLP and two with experts, under some prefix."""
    generator, text = torch.Generator().manual_seed(seed), TINY_3.text
    assert text.moe is not None

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    found = {
        "model.lora.dense.0.up_a": matrix(rank, text.dim),
        "model.lora.dense.0.up_b": matrix(text.ff_dim, rank),
        "model.lora.dense.0.down_a": matrix(rank, text.ff_dim),
        "model.lora.dense.0.down_b": matrix(text.dim, rank),
    }
    number, inner, own = text.moe.num_experts, text.moe.expert_inner_dim, rank // 2
    for layer in range(2):
        found |= {
            f"model.lora.moe.{layer}.up_a": matrix(number, own, text.dim),
            f"model.lora.moe.{layer}.up_b": matrix(number, 2 * inner, own),
            f"model.lora.moe.{layer}.down_a": matrix(number, own, inner),
            f"model.lora.moe.{layer}.down_b": matrix(number, text.dim, own),
        }
    return found


def write(path: Path, tensors: Any) -> Path:
    torch.save({"lora_state_dict": tensors, "step": 100}, path)
    return path


def merged(model: Moondream, tensors: Tensors) -> Moondream:
    """The model with an adapter in its weights, one expert at a time."""
    whole = copy.deepcopy(model)
    for layer, block in enumerate(whole.text.blocks):
        kind = "dense.0" if layer == 0 else f"moe.{layer - 1}"
        for part, name in (("up", "fc1"), ("down", "fc2")):
            weight = block.get_submodule(f"mlp.{name}").weight
            a, b = tensors[f"model.lora.{kind}.{part}_a"], tensors[f"model.lora.{kind}.{part}_b"]
            assert isinstance(weight, torch.Tensor)
            if layer == 0:
                weight += b @ a
            for expert in range(len(weight) if layer else 0):
                weight[expert] += b[expert] @ a[expert]
    return whole


@pytest.fixture(scope="module")
def model() -> Moondream:
    return random_model(TINY_3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Moondream) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TINY_3, model)


@pytest.fixture(params=DEVICES)
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with one_thread(), Engine.load(str(folder), request.param, "float32", adapter_slots=2, adapter_rank=8) as engine:
        yield engine


def test_requests_get_what_merged_weights_give_whatever_shares_the_batch(
    engine: Engine, model: Moondream, tmp_path: Path
) -> None:
    image, wanted = noise(20, 30, 1), {}
    for seed, name in enumerate((None, "red", "green")):
        whole = model
        if name is not None:
            whole = merged(model, tuned(seed))
            engine.load_adapter(name, write(tmp_path / f"{name}.pt", tuned(seed)))
        device = "cpu" if engine.model.gpu is None else "cuda"
        with Engine.load(str(write_model(tmp_path / f"whole {name}", TINY_3, whole)), device, "float32") as plain:
            wanted[name] = plain.submit(image, TASKS).result(60)
    assert len({repr((one.detections.boxes, one.texts)) for one in wanted.values()}) == 3
    futures = [(name, engine.submit(image, TASKS, adapter=name)) for name in (*wanted, *wanted)]
    for name, future in futures:
        result = future.result(60)
        assert [(one.x, one.y) for one in result.points.points] == [(o.x, o.y) for o in wanted[name].points.points]
        assert [box.pixels(1, 1) for box in result.detections.boxes] == [
            box.pixels(1, 1) for box in wanted[name].detections.boxes
        ]
        assert result.texts == wanted[name].texts


def test_the_form_for_a_gpu_gives_what_the_one_for_a_cpu_gives(model: Moondream, tmp_path: Path) -> None:
    bank = AdapterBank(model.text, 2, 8)
    bank.fill(2, load_adapter("a", write(tmp_path / "a", tuned(1)), model.text, 8))
    assert bank.has_experts
    experts = bank.text(torch.tensor([0, 2, 1])).blocks[1].get_submodule("mlp")
    assert isinstance(experts, Experts)
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(3))
    by_one = experts(x)
    weights, chosen = experts.route(x.flatten(0, 1))
    torch.testing.assert_close(experts._all_at_once(x.flatten(0, 1), weights, chosen).view_as(x), by_one)
    plain = model.text.blocks[1].get_submodule("mlp")(x)
    torch.testing.assert_close(by_one[[0, 2]], plain[[0, 2]])
    assert (by_one[1] - plain[1]).abs().max() > 0.1


def test_a_slot_is_cleared_for_an_adapter_without_experts(model: Moondream, tmp_path: Path) -> None:
    dense = {name: tensor for name, tensor in tuned(1).items() if "dense" in name}
    bank, x = AdapterBank(model.text, 1, 8), torch.randn(1, 5, 32)
    for tensors in (dense, tuned(1), dense):
        bank.fill(1, load_adapter("a", write(tmp_path / "a", tensors), model.text, 8))
        experts = bank.text(torch.tensor([1])).blocks[1].get_submodule("mlp")
        plain = model.text.blocks[1].get_submodule("mlp")(x)
        assert (float((experts(x) - plain).abs().max()) > 0.1) == (len(tensors) > 4)


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, ("harm", "w")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: {}, "contains no LoRA matrices"),
        (lambda tensors: 7, "has no 'lora_state_dict'"),
        (lambda tensors: tensors | {"dense.1.up_a": torch.zeros(4, 32)}, "'dense.1.up_a' is unknown"),
        (lambda tensors: tensors | {"moe.2.up_a": torch.zeros(4, 32)}, "'moe.2.up_a' is unknown"),
        (lambda tensors: tensors | {"attn.0.up_a": torch.zeros(4, 32)}, "'attn.0.up_a' is unknown"),
        (lambda tensors: tensors | {"model.lora.moe.1.up_a": "x"}, "up_a' is unknown"),
        (
            lambda tensors: {k: v for k, v in tensors.items() if k != "model.lora.moe.1.up_b"},
            r"2\.mlp\.fc1: LoRA matrix B is missing",
        ),
        (
            lambda tensors: tensors | {"model.lora.moe.0.up_a": torch.zeros(6, 3, 32)},
            r"must have the same rank; found ranks \[4, 6\]",
        ),
        (lambda tensors: tensors | {"model.lora.moe.0.up_b": torch.zeros(6, 41, 2)}, r"and \(6, 40, rank\); got"),
        (lambda tensors: tensors | {"model.lora.moe.0.up_b": torch.full((6, 40, 2), torch.nan)}, "contains NaN"),
        (lambda tensors: tuned(0, 16), "maximum is 8; load the engine with adapter_rank=16"),
        (lambda tensors: {"x": Harmful()}, "nor a torch file that contains only tensors"),
    ],
)
def test_what_does_not_fit_is_one_line(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterError, match=says) as caught:
        engine.load_adapter("a", write(tmp_path / "a.pt", change(tuned(0))))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nothing like it", pickle.dumps(Harmful())])
def test_other_files_are_refused_in_one_line(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(AdapterError, match="neither a safetensors file") as caught:
        engine.load_adapter("a", tmp_path / "a.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harm").exists()

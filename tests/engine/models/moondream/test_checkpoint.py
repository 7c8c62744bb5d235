from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from saccade.engine import Engine, ModelFilesError, UnknownModelError
from saccade.engine.golden.reference import Generator
from saccade.engine.models.checkpoint import CheckpointError
from saccade.engine.models.moondream.model import load
from tests.support.engine import NANO, TINY, noise, one_thread, random_model, write_model

CPU = torch.device("cpu")
WTE = f"[{TINY.text.vocab_size}, {TINY.text.dim}]"


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TINY)


def alter(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, CPU, torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder / "model.safetensors") in message
    with pytest.raises(ModelFilesError) as caught:
        Engine.load(str(folder), "cpu")
    assert str(caught.value) == message
    return message


def test_what_was_saved_is_what_is_loaded(folder: Path) -> None:
    saved, loaded = random_model(TINY).state_dict(), load(folder, CPU, torch.float32).state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_a_loaded_model_answers_as_the_one_that_was_saved(folder: Path) -> None:
    image = noise(20, 20)
    tokens = [
        Generator(model, TINY.tokenizer.eos_id).image_tokens(image)
        for model in (random_model(TINY), load(folder, CPU, torch.float32))
    ]
    prefixes = [Generator(random_model(TINY), TINY.tokenizer.eos_id).prefix(one).keys for one in tokens]
    assert torch.equal(*tokens)
    assert torch.equal(*prefixes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_the_dtype_and_positions_stay_exact(folder: Path, dtype: torch.dtype) -> None:
    model = load(folder, CPU, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.text.cosine.dtype == torch.float32


def test_half_precision_files_serve_in_float32(folder: Path) -> None:
    exact = load_file(folder / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in exact.items()}, folder / "model.safetensors")
    model = load(folder, CPU, torch.float32)
    assert model.dtype == torch.float32
    assert torch.allclose(model.text.wte, exact["model.text.wte"], atol=1e-2)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    alter(folder, lambda tensors: tensors.pop("model.text.blocks.1.mlp.fc1.bias"))
    assert "tensor 'model.text.blocks.1.mlp.fc1.bias' of shape [48] is missing" in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    alter(folder, lambda tensors: tensors.update({"model.text.wte": torch.zeros(7, 9)}))
    message = refusal(folder)
    assert "tensor 'model.text.wte' has shape [7, 9]" in message
    assert WTE in message


def test_a_tensor_without_a_place_is_named(folder: Path) -> None:
    alter(folder, lambda tensors: tensors.update({"model.text.blocks.2.ln.weight": torch.zeros(32)}))
    assert "'model.text.blocks.2.ln.weight' of shape [32] is not part of the model" in refusal(folder)


def test_the_first_disagreement_in_the_models_order_is_named(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["a.stray"] = torch.zeros(1)
        tensors.pop("model.region.coord_features")
        tensors["model.text.wte"] = torch.zeros(1)
        tensors["model.vision.post_ln.bias"] = torch.zeros(3)

    alter(folder, change)
    assert "'model.vision.post_ln.bias'" in refusal(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.05, 0.5, 0.999])
def test_a_truncated_file_is_refused(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refusal(folder)


@pytest.mark.parametrize("content", [b"not weights at all, but text of some length", b"\xff" * 64, b"PK\x03\x04" * 20])
def test_a_file_of_another_kind_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    refusal(folder)


def test_a_config_of_another_size_names_the_first_tensor(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["vision"]["enc_ff_dim"] = 25
    (folder / "config.json").write_text(json.dumps(values))
    assert "'model.vision.blocks.0.mlp.fc1.weight' has shape [24, 16]; the config requires [25, 16]" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_its_files_is_no_model(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UnknownModelError, match=f"has no {name}"):
        Engine.load(str(folder), "cpu")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "synonyms.json"])
@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_companion_file_is_one_line_with_its_name(tmp_path: Path, name: str, content: str) -> None:
    for file in NANO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelFilesError, match=name) as caught:
        Engine.load(str(tmp_path), "cpu")
    assert "\n" not in str(caught.value)

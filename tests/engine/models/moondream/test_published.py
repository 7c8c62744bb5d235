"""Checkpoints as they are published: synthetic files with the reference's own names and shapes, and what is refused.

`tests/data/published-tensors.json` lists what the reference implementation's modules are called and how large they are,
for Moondream 2, its 0.5B and its 4-bit form; files of that size are sparse here, as no weight of them is read.
"""

from __future__ import annotations

import json
import math
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from saccade.engine import Caption, Engine, ModelFilesError, PromptError, Query, UnknownModelError
from saccade.engine.models import model_files
from saccade.engine.models.checkpoint import CheckpointError
from saccade.engine.models.moondream.config import MoondreamConfig, TokenizerConfig
from saccade.engine.models.moondream.model import load, open_checkpoint
from saccade.engine.models.moondream.prompts import MoondreamPrompts, TokenizerError, tokenizer_of
from tests.support import REPO
from tests.support.engine import TINY, noise, random_model, write_model

CPU = torch.device("cpu")
HUB = {"architectures": ["HfMoondream"], "auto_map": {}, "model_type": "moondream1", "torch_dtype": "bfloat16"}
OLD_TEMPLATES = {
    "caption": {"short": [198, 198, 16438, 8305, 25], "normal": [198, 198, 24334, 1159, 25]},
    "query": {"prefix": [198, 198, 24361, 25], "suffix": [198, 198, 33706, 25]},
    "detect": {"prefix": [198, 198, 47504, 25], "suffix": [628]},
    "point": {"prefix": [198, 198, 12727, 25], "suffix": [628]},
}
CONFIG_05B: dict[str, Any] = {  # as published: no n_kv_heads, no long caption
    "text": {"dim": 1024, "ff_dim": 4096, "n_layers": 24, "vocab_size": 51200, "max_context": 2048, "n_heads": 16},
    "vision": {"enc_dim": 720, "enc_ff_dim": 2690, "enc_n_heads": 10, "proj_out_dim": 1024},
    "region": {"dim": 1024, "inner_dim": 8192},
    "tokenizer": {"bos_id": 50256, "eos_id": 50256, "templates": OLD_TEMPLATES},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "moondream-2": {},
    "moondream-0.5b": CONFIG_05B,
    "moondream-2-4bit": {"text": {"group_size": 128}, "region": {"group_size": 128}},
}


def tensors(name: str) -> dict[str, list[int]]:
    """Names and shapes of a published model."""
    listed = json.loads((REPO / "tests" / "data" / "published-tensors.json").read_text(encoding="utf-8"))[name]
    found: dict[str, list[int]] = {}
    for pattern, numbers in listed.items():
        if "*" not in pattern:
            found[pattern] = numbers
            continue
        for layer in range(numbers[0]):
            found[pattern.replace("*", str(layer))] = numbers[1:]
    return found


def write_sparse(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file whose zeros take no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        kind, size = ("U8", 1) if name.endswith("packed") else ("BF16", 2)
        start, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)


def publish(folder: Path, name: str, prefix: str = "model.", extra: dict[str, list[int]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HUB, "config": CONFIGS[name]}), encoding="utf-8")
    shapes = {**tensors(name), **(extra or {})}
    write_sparse(folder / "model.safetensors", {prefix + key: shape for key, shape in shapes.items()})
    return folder


BUFFERS = {
    "attn_mask": [1, 1, 2048, 2048],
    "text.freqs_cis": [2048, 16, 2],
    "text.blocks.3.kv_cache.k_cache": [1, 32, 2048, 64],
    "text.blocks.23.kv_cache.v_cache": [1, 32, 2048, 64],
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefix", ["model.", "", "model._orig_mod."])
def test_published_names_and_shapes_fit(tmp_path: Path, name: str, prefix: str) -> None:
    publish(tmp_path, name, prefix)
    with ExitStack() as files:
        model, stored, _ = open_checkpoint(tmp_path, files)
        assert stored.keys() == model.state_dict().keys()
    assert model.config.text.n_kv_heads == model.config.text.n_heads
    assert model.config.limits.max_context == 2048


def test_buffers_of_the_reference_are_known_by_name(tmp_path: Path) -> None:
    publish(tmp_path, "moondream-2", extra=BUFFERS)
    with ExitStack() as files:
        assert not BUFFERS.keys() & open_checkpoint(tmp_path, files)[1].keys()
    publish(tmp_path, "moondream-2", extra={"text.blocks.3.kv_cache.other": [3]})
    with ExitStack() as files, pytest.raises(CheckpointError, match=r"kv_cache\.other' of shape \[3\] is not part"):
        open_checkpoint(tmp_path, files)


def test_a_null_group_size_is_none(tmp_path: Path) -> None:
    config = {"text": {"group_size": None}, "region": {"group_size": None}}
    (tmp_path / "config.json").write_text(json.dumps({**HUB, "config": config}))
    assert MoondreamConfig.from_file(tmp_path / "config.json") == MoondreamConfig()


OLDER = (
    "text_model.transformer.h.0.mixer.Wqkv.weight",
    "vision_encoder.encoder.model.visual.pos_embed",
    "text_model.lm_head.linear.bias",
)


@pytest.mark.parametrize("name", OLDER)
def test_weights_of_another_architecture_say_what_to_take(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HUB, "config": {}}))
    write_sparse(tmp_path / "model.safetensors", {name: [4]})
    with ExitStack() as files, pytest.raises(CheckpointError, match="architecture from before 2025") as caught:
        open_checkpoint(tmp_path, files)
    assert name in str(caught.value)
    assert "2025-06-21" in str(caught.value)
    assert "\n" not in str(caught.value)


# What is read of them


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", TINY, random_model(TINY))


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_names_without_their_prefix_are_the_same(tiny: Path) -> None:
    wanted = load(tiny, CPU, torch.float32).state_dict()
    rewrite(tiny, lambda held: {name.removeprefix("model."): tensor for name, tensor in held.items()})
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in load(tiny, CPU, torch.float32).state_dict().items()
    )


@pytest.mark.parametrize("left", ["model.text.wte", "model.text.lm_head.weight"])
def test_a_tied_head_is_the_table_of_embeddings(tiny: Path, left: str) -> None:
    gone = {"model.text.wte", "model.text.lm_head.weight"} - {left}
    rewrite(tiny, lambda held: {name: tensor for name, tensor in held.items() if name not in gone})
    model = load(tiny, CPU, torch.float32)
    assert torch.equal(model.text.wte, model.text.lm_head.weight)
    assert torch.equal(model.text.wte, load_file(tiny / "model.safetensors")[left])


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix in 4 bits: the codes of its groups of 128, of which the first half are the upper bits."""
    groups = weight.reshape(-1, 128)
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (most - least) / 15
    zero = -least / scale
    codes = (groups / scale + zero).round().clamp(0, 15).to(torch.uint8)
    half = len(codes) // 2
    return {"packed": codes[:half] << 4 | codes[half:], "scale": scale, "zero_point": zero}


def test_four_bit_weights_are_what_they_stand_for(tiny: Path) -> None:
    wanted = load(tiny, CPU, torch.float32).state_dict()

    def change(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = {}
        for name, tensor in held.items():
            if name.startswith("model.text.blocks") and tensor.ndim == 2 and tensor.numel() % 256 == 0:
                changed |= {f"{name}.{part}": one for part, one in packed(tensor).items()}
            else:
                changed[name] = tensor
        assert len(changed) > len(held)
        return changed

    rewrite(tiny, change)
    for name, tensor in load(tiny, CPU, torch.float32).state_dict().items():
        room = 0.0
        if name.startswith("text.blocks") and tensor.ndim == 2:
            groups = wanted[name].reshape(-1, 128)
            room = float((groups.amax(1) - groups.amin(1)).max()) / 30 * 1.001
        assert (tensor - wanted[name]).abs().max() <= room
    with Engine.load(str(tiny), "cpu") as engine:
        assert engine.query(noise(20, 20), "why?", 4).text


@pytest.mark.parametrize("part", ["scale", "zero_point"])
def test_four_bit_weights_that_lack_a_part_are_named(tiny: Path, part: str) -> None:
    name = "model.text.blocks.0.attn.qkv.weight"

    def change(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = packed(held.pop(name))
        parts.pop(part)
        return {**held, **{f"{name}.{kind}": tensor for kind, tensor in parts.items()}}

    rewrite(tiny, change)
    with pytest.raises(CheckpointError, match=r"or bias is missing for the 4-bit tensor 'text\.blocks\.0\.attn"):
        load(tiny, CPU, torch.float32)


# Tokenizers and prompts


def write_tokenizer(folder: Path, words: dict[str, int]) -> Path:
    """A tokenizer.json that knows these words; the ids up to the last of them stand for others."""
    names = {number: word for word, number in words.items()}
    vocabulary = {names.get(n, f"other{n}"): n for n in range(max(names) + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names.get(0, "other0")))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


STARMIE = {"query": 15381, "describe": 32708, "point": 2581, "detect": 7235}
GPT2 = {"Question": 24361, "Detect": 47504, "Point": 12727}


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub out of reach; lists what was asked of it."""
    asked: list[str] = []

    def refuse(repository: str, *name: str, **more: Any) -> str:
        asked.append(" ".join([repository, *name, *(str(one) for one in more.values() if isinstance(one, str))]))
        raise LocalEntryNotFoundError("out of reach")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    return asked


def test_a_tokenizer_that_fits_is_taken(tmp_path: Path, no_hub: list[str]) -> None:
    write_tokenizer(tmp_path, STARMIE)
    assert tokenizer_of(tmp_path, MoondreamConfig()).decode([15381]) == "query"
    assert no_hub == []


@pytest.mark.parametrize("stale", [True, False])
def test_a_tokenizer_that_does_not_fit_says_what_to_do(tmp_path: Path, no_hub: list[str], stale: bool) -> None:
    if stale:
        write_tokenizer(tmp_path, {**GPT2, "wrong": 15381})
    with pytest.raises(TokenizerError) as caught:
        tokenizer_of(tmp_path, MoondreamConfig())
    message = str(caught.value)
    assert "\n" not in message
    assert f"put the tokenizer.json of moondream/starmie-v1 into {tmp_path}" in message
    assert ("'other1wrongother2' instead of 'query'" in message) == stale
    assert no_hub == ["moondream/starmie-v1 tokenizer.json"]


def test_the_published_tokenizer_is_fetched_for_a_stale_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = write_tokenizer(tmp_path / "hub", STARMIE)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, name: str(fetched))
    write_tokenizer(tmp_path, GPT2)
    assert tokenizer_of(tmp_path, MoondreamConfig()).decode([15381]) == "query"
    write_tokenizer(tmp_path / "hub", {"query": 15380, "x": 15381})
    with pytest.raises(TokenizerError, match=r"the tokenizer of moondream/starmie-v1"):
        tokenizer_of(tmp_path, MoondreamConfig())


def test_the_half_billion_model_speaks_in_words(tmp_path: Path, no_hub: list[str]) -> None:
    config = MoondreamConfig.from_dict(CONFIG_05B)
    with pytest.raises(TokenizerError, match="GPT-2"):
        tokenizer_of(tmp_path, config)
    write_tokenizer(tmp_path, GPT2)
    prompts = MoondreamPrompts(config.tokenizer, tokenizer_of(tmp_path, config))
    assert [skill for skill in ("detect", "point", "gaze", "query", "caption") if prompts.can(skill)] == [
        "query",
        "caption",
    ]
    words = prompts.ids(" why?")
    assert prompts.query("why?") == [198, 198, 24361, 25, *words, 198, 198, 33706, 25]
    assert prompts.reasoning is None
    assert config.limits.suppressed_ids == ()
    with pytest.raises(PromptError, match="does not support long captions; use short or normal"):
        prompts.caption("long")
    assert no_hub == []


def test_a_caption_length_that_is_not_learned_is_refused(tmp_path: Path) -> None:
    import dataclasses

    templates = {**TINY.tokenizer.templates, "caption": {"short": [1, 30, 2, 49, 3]}}
    config = dataclasses.replace(TINY, tokenizer=TokenizerConfig(templates=templates))
    with Engine.load(str(write_model(tmp_path / "tiny", config)), "cpu") as engine:
        assert engine.caption(noise(20, 20), "short", 4).text
        with pytest.raises(PromptError, match="use short"):
            engine.submit(noise(20, 20), [Caption("long", 4), Query("why?", 3)]).result(60)


def test_a_revision_with_other_prompts_is_refused(tiny: Path) -> None:
    values = json.loads((tiny / "config.json").read_text())
    (tiny / "moondream.py").write_text('Tokenizer.from_pretrained("moondream/starmie-v1")')
    Engine.load(str(tiny), "cpu").close()
    (tiny / "moondream.py").write_text('Tokenizer.from_pretrained("vikhyatk/moondream2")')
    Engine.load(str(tiny), "cpu").close()  # its config has its own prompts
    values.pop("tokenizer")
    (tiny / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelFilesError, match="2025-06-21") as caught:
        Engine.load(str(tiny), "cpu")
    assert "\n" not in str(caught.value)


# The hub


def test_a_revision_is_asked_of_the_hub(no_hub: list[str]) -> None:
    with pytest.raises(UnknownModelError, match="out of reach"):
        model_files.find("vikhyatk/moondream2@2025-06-21")
    with pytest.raises(UnknownModelError):
        Engine.load("vikhyatk/moondream2", revision="2025-06-21")
    with pytest.raises(UnknownModelError):
        model_files.find("vikhyatk/moondream2")
    assert no_hub == ["vikhyatk/moondream2 2025-06-21"] * 2 + ["vikhyatk/moondream2"]

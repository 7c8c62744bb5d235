"""Adapters give what a model with merged weights gives, whatever shares the batch, and leave the others alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from saccade.engine import AdapterError, Detect, Engine, Point, Query, Result, Task
from saccade.engine.models.moondream.model import Moondream
from tests.support.engine import TINY, Held, noise, random_model, write_model

WAIT_S = 60
PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
TASKS: list[Task] = [
    Detect("x", 4, 0.0),
    Point("y", 3, 0.0),
    Query("why?", 9),
    Query("why?", 9, temperature=1.0, seed=3),
]


def matrices(model: Moondream, rank: int, seed: int, parts: tuple[str, ...] = PARTS) -> dict[str, torch.Tensor]:
    """A and B of some parts of every block, large enough that answers change."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number, block in enumerate(model.text.blocks):
        for part in parts:
            out, inner = block.get_submodule(part).weight.shape
            found[f"text.blocks.{number}.{part}.A"] = torch.randn(rank, inner, generator=generator) * 0.2
            found[f"text.blocks.{number}.{part}.B"] = torch.randn(out, rank, generator=generator) * 0.2
    return found


def merged(model: Moondream, pairs: dict[str, torch.Tensor], alpha: float, rank: int) -> Moondream:
    whole = copy.deepcopy(model)
    for name in pairs:
        if name.endswith(".A"):
            weight = whole.get_submodule(name.removesuffix(".A")).weight
            weight += alpha / rank * pairs[name.removesuffix("A") + "B"] @ pairs[name]
    return whole


@pytest.fixture(scope="module")
def model() -> Moondream:
    return random_model(TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Moondream) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), TINY, model)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, model: Moondream) -> dict[str, tuple[Path, Moondream]]:
    """Adapters of several ranks, alphas and parts, each with the model that has it merged."""
    home, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, (rank, alpha, parts) in enumerate([(4, 8.0, PARTS), (1, 1.0, ("attn.qkv",)), (7, 3.5, PARTS[1:])]):
        name, pairs = ("red", "green", "blue")[seed], matrices(model, rank, seed, parts)
        save_file(pairs, home / name, {"alpha": str(alpha)})
        found[name] = (home / name, merged(model, pairs, alpha, rank))
    return found


@pytest.fixture(scope="module", params=[(1, 3), (2, 1)], ids=["blocking", "pipelined, one slot"])
def engine(folder: Path, files: dict[str, tuple[Path, Moondream]], request: pytest.FixtureRequest) -> Iterator[Engine]:
    depth, slots = request.param
    with Engine.load(str(folder), "cpu", depth=depth, adapter_slots=slots, adapter_rank=8) as engine:
        for name, (path, _) in files.items():
            engine.load_adapter(name, path)
        yield engine


def content(result: Result) -> object:
    """Everything but scores, which differ by rounding."""
    boxes = [box.pixels(1, 1) for box in result.detections.boxes]
    return boxes, [(spot.x, spot.y) for spot in result.points.points], result.texts


def test_mixed_requests_get_what_merged_weights_give(
    engine: Engine, folder: Path, files: dict[str, tuple[Path, Moondream]], tmp_path: Path
) -> None:
    images = [noise(20, 30, 1), noise(40, 20, 2)]
    wanted: dict[tuple[str | None, int], object] = {}
    for name in (None, *files):
        whole = folder if name is None else write_model(tmp_path / name, TINY, files[name][1])
        with Engine.load(str(whole), "cpu") as plain:
            for i, image in enumerate(images):
                wanted[name, i] = content(plain.submit(image, TASKS).result(WAIT_S))
    assert len(set(map(repr, wanted.values()))) == len(wanted)
    futures: list[tuple[tuple[str | None, int], Future[Result]]] = []
    for _ in range(3):
        for key in wanted:
            futures.append((key, engine.submit(images[key[1]], TASKS, adapter=key[0])))
    for key, future in futures:
        assert content(future.result(WAIT_S)) == wanted[key]
    assert engine._loop._scheduler.at_rest


def test_rows_without_an_adapter_are_exactly_what_they_were(model: Moondream, tmp_path: Path) -> None:
    from saccade.engine.golden.reference import DenseCache
    from saccade.engine.models.lora import AdapterBank, load_adapter

    save_file(matrices(model, 4, 5), tmp_path / "a")
    bank = AdapterBank(model.text, 2, 4)
    bank.fill(2, load_adapter("a", tmp_path / "a", model.text, 4))
    x, at = torch.randn(3, 20, TINY.text.dim), torch.arange(20).expand(3, -1)
    plain = model.text(x, at, DenseCache.empty(TINY.text, 3, 20, x))
    mixed = bank.text(torch.tensor([0, 2, 1]))(x, at, DenseCache.empty(TINY.text, 3, 20, x))
    assert torch.equal(mixed[[0, 2]], plain[[0, 2]])
    assert (mixed[1] - plain[1]).abs().max() > 0.1
    part = bank._text.blocks[0].attn.qkv
    got = torch.cat([x[:1].flatten(0, 1), x[1:, 0]])  # an image, and a token of each of two sequences
    wanted = torch.stack([part.b @ (row @ part.a.t() * (part.rank <= torch.arange(8)).float()) for row in got])
    wanted[-2:] = 0.0
    sums = torch.zeros_like(wanted)
    bank.rows(torch.tensor([2, 0, 1])).spread(1, 20).add(0, "attn.qkv", got, sums)
    torch.testing.assert_close(sums, wanted)
    assert bank._text.wte is model.text.wte
    assert bank._text.blocks[0].attn.qkv.weight is model.text.blocks[0].attn.qkv.weight


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.model."])
def test_peft_folders_are_understood(engine: Engine, model: Moondream, tmp_path: Path, prefix: str) -> None:
    pairs = matrices(model, 4, 9)
    save_file(pairs, tmp_path / "simple", {"alpha": "16"})
    peft = tmp_path / "peft"
    peft.mkdir()
    named = {prefix + name[:-1] + f"lora_{name[-1]}.weight": tensor for name, tensor in pairs.items()}
    save_file(named, peft / "adapter_model.safetensors")
    (peft / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "use_rslora": False}))
    answers = []
    for path in (peft, tmp_path / "simple"):
        engine.load_adapter("one", path)
        answers.append(content(engine.submit(noise(20, 20), TASKS, adapter="one").result(WAIT_S)))
        engine.unload_adapter("one")
    assert answers[0] == answers[1]
    (peft / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "use_dora": True}))
    with pytest.raises(AdapterError, match="use_dora is not supported"):
        engine.load_adapter("one", peft)


def test_an_unloaded_adapter_serves_what_was_submitted_with_it(
    engine: Engine, files: dict[str, tuple[Path, Moondream]]
) -> None:
    image = noise(20, 30, 1)
    red, green = (content(engine.submit(image, TASKS, adapter=name).result(WAIT_S)) for name in ("red", "green"))
    held = Held(engine, image)
    engine.load_adapter("new", files["red"][0])
    before = engine.submit(image, TASKS, adapter="new")
    engine.unload_adapter("new")
    with pytest.raises(AdapterError, match="unknown adapter 'new'; loaded: red, green, blue"):
        engine.submit(image, TASKS, adapter="new")
    engine.load_adapter("new", files["green"][0])
    after = engine.submit(image, TASKS, adapter="new")
    held.release()
    assert (content(before.result(WAIT_S)), content(after.result(WAIT_S))) == (red, green)
    with pytest.raises(AdapterError, match="already"):
        engine.load_adapter("new", files["green"][0])
    engine.unload_adapter("new")
    with pytest.raises(AdapterError, match="unknown adapter 'new'"):
        engine.unload_adapter("new")


def test_streams_take_adapters_too(engine: Engine) -> None:
    image, task = noise(20, 30, 1), Query("why?", 9)
    streamed = {name: "".join(engine.stream(image, task, adapter=name)) for name in (None, "red", "blue")}
    for name, text in streamed.items():
        assert engine.submit(image, [task], adapter=name).result(WAIT_S).texts[0].text == text
    assert len(set(streamed.values())) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs.update({"text.blocks.9.attn.qkv.A": torch.zeros(2, 32)}), "is unknown"),
        (lambda pairs: pairs.update({"vision.blocks.0.attn.qkv.A": torch.zeros(2, 32)}), "is unknown"),
        (lambda pairs: pairs.pop("text.blocks.1.mlp.fc1.B"), r"text.blocks.1.mlp.fc1: LoRA matrix B is missing"),
        (lambda pairs: pairs.update({"text.blocks.0.attn.proj.B": torch.zeros(32, 3)}), r"shapes \(rank, 32\)"),
        (
            lambda pairs: pairs.update(
                dict.fromkeys(("text.blocks.0.attn.proj.A", "text.blocks.0.attn.proj.B"), torch.zeros(32, 32))
            ),
            "adapter_rank=32",
        ),
        (lambda pairs: pairs.clear(), "no LoRA matrices"),
        (lambda pairs: pairs["text.blocks.0.attn.qkv.A"][0].fill_(torch.nan), "contains NaN"),
        (lambda pairs: pairs["text.blocks.1.mlp.fc2.B"][0].fill_(torch.inf), "too large for torch.float32"),
    ],
)
def test_a_file_that_does_not_fit_is_one_clear_line(
    engine: Engine, model: Moondream, tmp_path: Path, change: object, message: str
) -> None:
    pairs = matrices(model, 4, 5)
    change(pairs)  # type: ignore[operator]
    save_file({name: tensor.clone() for name, tensor in pairs.items()}, tmp_path / "bad")
    with pytest.raises(AdapterError, match=message) as caught:
        engine.load_adapter("bad", tmp_path / "bad")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_none_is_one_clear_line(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk" * 9)
    for path in (tmp_path / "nowhere", tmp_path / "junk", tmp_path):
        with pytest.raises(AdapterError) as caught:
            engine.load_adapter("bad", path)
        assert len(str(caught.value).splitlines()) == 1

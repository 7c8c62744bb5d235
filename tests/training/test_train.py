from __future__ import annotations

from pathlib import Path

import pytest
import torch

from saccade.engine.api import Engine
from saccade.engine.models.moondream.model import load
from tests.support.engine import square
from tests.support.training import BOX, CLASSES, random_start, small_config, write_shape, write_start
from training.data import load_split
from training.import_picodet import NANO, convert
from training.train import balance, build, export, main, rate_at

WORDS = torch.arange(10, 10 + len(CLASSES))


def test_the_default_config_exists() -> None:
    for name in ("config.json", "tokenizer.json"):
        assert (NANO / name).is_file()


def test_the_rate_warms_up_and_falls_to_a_fiftieth() -> None:
    rates = [rate_at(i / 1000, 0.02) for i in range(1001)]
    assert rates[0] == 0.0
    assert rates[20] == max(rates) == pytest.approx(1.0)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


def test_rare_classes_are_drawn_more(pack: Path) -> None:
    weights = balance(load_split(pack, "train", 1))
    assert weights.shape == (3,)
    assert weights[2] == pytest.approx(0.7)  # nothing on it
    assert weights[0] >= weights[2]


def test_what_is_exported_is_loaded_by_the_engine(tmp_path: Path) -> None:
    model, start = build(small_config(), convert(random_start(), CLASSES, 2), WORDS)
    assert not any(parameter.requires_grad for parameter in start.parameters())
    write_shape(tmp_path, small_config())
    export(model, tmp_path / "model.safetensors")
    loaded = load(tmp_path, torch.device("cpu"), torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], tensor, atol=1e-2, rtol=1e-3), name


def test_a_run_leaves_a_model_and_goes_on(tmp_path: Path, pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = write_shape(tmp_path / "shape", small_config())
    start, out = write_start(tmp_path / "start.safetensors"), tmp_path / "out"
    given = f"--data {pack} --config {shape} --coco {start} --budget 1000 --stop-after 0 --batch 2 --part 1 --check 2"
    main([*given.split(), "--out", str(out), "--wide", "1"])
    assert '"step": 2,' in capsys.readouterr().out
    with Engine.load(str(out), "cpu") as engine:
        assert engine.detect(square(240, 320, BOX), "cat", conf=0.0).boxes
    main([*given.split(), "--out", str(tmp_path / "more"), "--resume", str(out), "--wide", "0", "--large", "1"])
    assert '"step": 4,' in capsys.readouterr().out
    for checkpoint in out.glob("checkpoint.*"):
        checkpoint.unlink()  # a model that is finished is enough to begin anew
    main([*given.split(), "--out", str(tmp_path / "anew"), "--resume", str(out), "--restart", "--detector-rate", "0"])
    assert '"step": 2,' in capsys.readouterr().out

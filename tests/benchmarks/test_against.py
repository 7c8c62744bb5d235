"""Comparisons with other software: tables, files, plots, and small real runs where the peer is always installed."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.against import readers, reference, vllm
from benchmarks.against.harness import OURS, RESULTS, Comparison, begin, in_rounds, require
from saccade.engine import Engine
from saccade.pipeline.errors import ConfigError
from tests.support import REPO
from tests.support.engine.material import GOLDEN_3

COMMANDS = ("onnxruntime", "readers", "aiortc", "bytetrack", "mot-scores", "reference", "one-queue", "vllm", "plot")
MADE = Comparison(
    "toy",
    "A toy & its peer",
    "Read this.",
    "2026-11-28",
    "2 of 2 CPUs",
    {"peer": "1.2"},
    {"time": "ms", "score": "%"},
    {OURS: {"time": [10.0, 20.0, 12.0], "score": [50.0] * 3}, "peer": {"time": [30.0, 50.0, 24.0]}},
)


def test_the_table_has_medians_and_ratios_of_rounds() -> None:
    assert MADE.median("peer", "time") == 30.0
    assert MADE.ratio("peer", "time") == 2.5  # of 3, 2.5 and 2: not the ratio of the medians
    assert MADE.as_text().splitlines() == [
        "A toy & its peer",
        "          Saccade  peer",
        "time, ms  12.0     30.0 (2.50×)",
        "score, %  50.0     –",
        "2026-11-28, 2 of 2 CPUs; peer 1.2; 3 rounds, medians",
        "Read this.",
    ]


def test_a_result_is_kept_as_json_and_drawn(tmp_path: Path) -> None:
    paths = MADE.save(tmp_path / "new")
    assert Comparison.read(paths[0]) == MADE
    drawing = ElementTree.fromstring(paths[1].read_text(encoding="utf-8"))
    bars = [float(bar.attrib["width"]) for bar in drawing.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert bars == pytest.approx([160.0, 400.0, 400.0])  # each figure has its own scale
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "A toy & its peer (2026-11-28)",
        *("time, ms", "Saccade", "12.0", "peer", "30.0"),
        *("score, %", "Saccade", "50.0"),
    ]


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="JSON file of a saved comparison"):
        Comparison.read(tmp_path / "x.json")


def test_both_sides_run_in_each_turn_and_change_places() -> None:
    ran: list[str] = []

    def side(name: str) -> dict[str, float]:
        ran.append(name)
        return {"time": float(len(ran))}

    made = in_rounds(replace(MADE, values={}), {"a": lambda: side("a"), "b": lambda: side("b")}, 2)
    assert ran == ["a", "b", "a", "b", "b", "a"]
    assert made.values == {"a": {"time": [3.0, 6.0]}, "b": {"time": [4.0, 5.0]}}
    assert {"saccade-live", "torch", "av"} <= begin("x", "", "", {}, ["av"]).versions.keys()


def test_a_missing_peer_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match="needs no_such_peer: pip install no-such-peer"):
        require("json", "no_such_peer", install="no-such-peer")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_comparison_has_help(command: str) -> None:
    done = CliRunner().invoke(bench, ["against", command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output


@pytest.mark.parametrize("command", ["vllm", "reference"])
def test_what_needs_a_gpu_says_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(bench, ["against", command])
    assert done.exit_code != 0
    assert "needs a CUDA GPU; run it on a machine with a GPU" in str(done.exception)


@pytest.mark.slow
def test_readers_decode_the_same_frames() -> None:
    made = readers.compare(rounds=1, seconds=0.2)
    assert list(made.values) == [OURS, "PyAV", "OpenCV"]
    assert all(value > 0 for side in made.values.values() for values in side.values() for value in values)


@pytest.mark.slow
def test_the_engine_is_compared_with_the_reference() -> None:
    made = reference.compare(str(REPO / "tests" / "data" / "golden-tiny"), "cpu", None, 3, rounds=1, frames=2)
    assert made.values.keys() == {OURS, "reference loop"}
    assert made.median(OURS, "p99") >= made.median(OURS, "median") > 0


def test_vllm_is_given_a_model_and_a_plugin(tmp_path: Path) -> None:
    vllm.write_model(tmp_path / "model")
    vllm.write_plugin(tmp_path)
    shape = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["config"]["text"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == shape["vocab_size"]
    assert tokenizer.encode("<image><|md_reserved_0|>ab").tokens == ["<image>", "<|md_reserved_0|>", "a", "b"]
    (found,) = metadata.distributions(path=[str(tmp_path)])
    (entry,) = found.entry_points
    assert entry.group == "vllm.general_plugins"
    assert entry.load() is vllm.register


def test_each_figure_is_measured_from_the_time_of_answers() -> None:
    asked: list[tuple[int, int]] = []

    def answer(count: int, objects: int) -> float:
        asked.append((count, objects))
        return count * (0.1 + 0.03 * objects)

    found = list(vllm.figures(vllm.Program(answer, lambda rows, objects: 2 + rows * 0.003 * objects), 4, 128))
    assert [name for name, _ in found] == [
        *("1 objects", "3 objects", "5 objects"),
        *["32 images at a time, 3 objects"] * 2,
        *("decode step, 1 rows", "decode step, 8 rows", "decode step, 32 rows"),
    ]
    assert [value for _, value in found] == pytest.approx([130, 190, 250, 1 / 0.19, 1 / 0.19, 1, 8, 32])
    assert asked == [(1, 5), (40, 3), *[(1, 1)] * 4, *[(1, 3)] * 4, *[(1, 5)] * 4, (32, 3), (128, 3)]


def test_a_slow_program_gets_fewer_images() -> None:
    asked: list[int] = []

    def answer(count: int, objects: int) -> float:
        asked.append(count)
        return float(count)  # an image a second, and a figure may take a minute

    list(vllm.figures(vllm.Program(answer, lambda rows, objects: 1.0, answer), 1, 128))
    assert asked == [1, 40, 1, 1, 1, 32, 60, 32, 60]


@pytest.mark.slow
def test_saccade_is_timed_over_a_number_of_images() -> None:
    with Engine.load(str(GOLDEN_3), "cpu", drafts=False) as engine:
        program = vllm.saccade_program(engine)
        assert program.answer(34, 2) > 0  # more than at a time
        assert program.decode(2, 3) > 0


@pytest.mark.slow
def test_a_program_that_fails_or_is_stopped_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(ConfigError, match="saccade, fp8: no result"):
        vllm.run("saccade", "fp8", 1, 32, 60)
    failed = capfd.readouterr().err
    assert "EngineError" in failed
    assert "saccade, fp8: failed, before its last figure" in failed
    with pytest.raises(ConfigError, match="saccade, fp8: no result"):
        vllm.run("saccade", "fp8", 1, 32, 0.1)
    assert "saccade, fp8: stopped after 0 s, before its last figure" in capfd.readouterr().err


def test_an_unknown_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="--configs: unknown configuration fp4; use bf16, bf16-fa3, fp8"):
        vllm.compare(1, ["bf16", "fp4"], 1, 32, 60)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_results_are_drawn_as_they_are(path: Path) -> None:
    made = Comparison.read(path)
    assert made.name == path.stem
    assert path.with_suffix(".svg").read_text(encoding="utf-8") == made.as_svg()
    assert f"results/{path.stem}.svg" in (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")

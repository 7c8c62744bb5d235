"""Stages between engine and sinks, and gates before the engine, end to end through a configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from saccade.engine import Engine
from saccade.engine.tasks import Detect
from saccade.pipeline import ConfigError, Output, RunConfig, Streams, load, opened_run
from saccade.pipeline.analytics import GATES, STAGES
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sinks import JsonlSink
from saccade.sources import open_source
from saccade.sources.replay import ReplaySource
from tests.pipeline.analytics.toys import EveryThirdGate, FailingStage, NumberingStage

LONG_S = 60  # far beyond what any of these needs; only so that a hang fails


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGES, "number", NumberingStage)
    monkeypatch.setitem(STAGES, "fail", FailingStage)
    monkeypatch.setitem(GATES, "third", EveryThirdGate)
    monkeypatch.setattr(NumberingStage, "closed", [])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


def config_of(**values: Any) -> RunConfig:
    return load(None, {"detect": "person", "conf": 0.3, "start": 8, "end": 10, **values})


def run(config: RunConfig, out: Path) -> list[dict[str, Any]]:
    with opened_run(config.model_copy(update={"jsonl": str(out)})) as opened:
        assert all(run.join(LONG_S) for run in opened.controller.start())
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_stage_named_in_a_configuration_changes_results(tmp_path: Path) -> None:
    records = run(config_of(source=str(DEMO_CLIP), stages="number"), tmp_path / "out.jsonl")
    assert [record["frame"] for record in records] == list(range(20))
    tracks = [found["track"] for record in records for found in record["objects"]]
    assert tracks == list(range(1, len(tracks) + 1))
    assert len(tracks) > 0
    assert NumberingStage.closed == [len(tracks)]
    assert all(record["latency_ms"]["track"] >= 0 for record in records)


def test_each_stream_has_a_stage_of_its_own(tmp_path: Path) -> None:
    streams = [{"source": str(DEMO_CLIP), "name": name, "stages": ["number"]} for name in ("a", "b")]
    records = run(config_of(streams=streams), tmp_path / "out.jsonl")
    for name in ("a", "b"):
        tracks = [found["track"] for record in records if record["stream"] == name for found in record["objects"]]
        assert tracks == list(range(1, len(tracks) + 1))


def test_a_gate_keeps_frames_from_the_engine_and_counts_them(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Streams(engine, [Output(JsonlSink(out))]) as streams:
        before = engine.counters()["requests_done_total"]
        run = streams.add("clip", open_source(DEMO_CLIP, end=2), [Detect("person")], gates=[EveryThirdGate()])
        assert run.join(LONG_S)
        assert engine.counters()["requests_done_total"] - before == 7
        assert run.report().drops == {"gate": 13}
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["frame"] for record in records] == [0, 3, 6, 9, 12, 15, 18]
    assert [record["dropped_since_last"] for record in records] == [0, 2, 2, 2, 2, 2, 2]


def test_a_gate_is_named_in_a_configuration(tmp_path: Path) -> None:
    records = run(config_of(source=str(DEMO_CLIP), gates=["third"]), tmp_path / "out.jsonl")
    assert [record["frame"] for record in records] == list(range(0, 20, 3))


@pytest.mark.parametrize("where", ["stage", "gate"])
def test_a_live_stream_outlives_a_stage_that_raises(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FailingStage, "fails", frozenset({2, 3, 5}))

    class FailingGate(FailingStage):
        def admit(self, frame: Any) -> bool:
            self.process(frame, None)  # type: ignore[arg-type]
            return True

    out = tmp_path / "out.jsonl"
    source = ReplaySource(open_source(DEMO_CLIP, end=3))
    more: dict[str, Any] = {"stages": [FailingStage()]} if where == "stage" else {"gates": [FailingGate()]}
    with Streams(engine, [Output(JsonlSink(out))]) as streams:
        run = streams.add("clip", source, [Detect("person")], in_flight=1, **more)
        deadline = time.monotonic() + LONG_S
        while run.report().frames < 6:
            assert run.error is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    frames = [record["frame"] for record in records]
    gaps = [after - before - 1 for before, after in pairwise(frames)]
    assert gaps == [record["dropped_since_last"] for record in records[1:]]
    assert run.report().drops["failed"] == 3
    assert "stream clip: processing a frame failed: cannot process a frame, call 2" in caplog.text


def test_a_file_ends_at_a_stage_that_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FailingStage, "fails", frozenset({4}))
    out = tmp_path / "out.jsonl"
    with Streams(engine, [Output(JsonlSink(out))]) as streams:
        run = streams.add("clip", open_source(DEMO_CLIP, end=2), [Detect("person")], stages=[FailingStage()])
        assert run.join(LONG_S)
    assert str(run.error) == "cannot process a frame, call 4"
    assert out.read_text().count("\n") == 4


def test_a_name_that_no_stage_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--stage: unknown stage or gate 'numbr'; available: .*number"):
        load(None, {"source": "a", "detect": "person", "stages": "numbr"})

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from saccade.engine import Engine
from saccade.engine.core.request import StepKind
from saccade.engine.results import Result
from saccade.engine.tasks import Detect
from saccade.engine.tasks.task import Task
from saccade.pipeline.config.queue_policy import NEWEST, WAIT, QueuePolicy
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.sinks import CallbackSink, JsonlSink, Latency, ReaderGoneError, SinkClosedError, SinkError
from saccade.sources import Frame, Source, SourceError, open_source
from saccade.sources.replay import ReplaySource
from tests.support import REPO

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
FRAMES = 30
LONG_S = 60  # far beyond what any of these needs; only so that a deadlock fails instead of hanging
TASKS: list[Task] = [Detect("person")]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.fixture
def clip() -> Source:
    return open_source(CLIP, end=FRAMES / 10)


class GateSink:
    """Takes nothing until its gate opens: the slowest sink there can be."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.taken: list[Frame] = []
        self.closed = False

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        assert self.gate.wait(LONG_S)
        self.taken.append(frame)

    def close(self) -> None:
        self.closed = True


class EndingSink(GateSink):
    """Raises `error` at its third frame."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.gate.set()
        self.error = error

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        super().write(frame, result, latency)
        if len(self.taken) == 3:
            raise self.error


def finish(run: Run) -> None:
    assert run.join(LONG_S)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("saccade ")] == []


def run_for(run: Run, frames: int) -> None:
    """Start a run, and stop it once it has so many results, or has ended by itself."""
    run.start()
    deadline = time.monotonic() + LONG_S
    while not run.ended and run.report().frames < frames and time.monotonic() < deadline:
        time.sleep(0.01)
    run.stop()
    finish(run)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_until(path: Path, lines: int) -> None:
    deadline = time.monotonic() + LONG_S
    while path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_every_frame_comes_out_once_and_in_order(engine: Engine, clip: Source, tmp_path: Path, in_flight: int) -> None:
    out = tmp_path / "out.jsonl"
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out))], in_flight=in_flight)
    run.start()
    finish(run)
    assert run.error is None
    assert [record["frame"] for record in records(out)] == list(range(FRAMES))
    report = run.report()
    assert report.frames == FRAMES
    assert report.objects == sum(len(record["objects"]) for record in records(out))
    assert report.drops == {}
    assert report.corrupt_packets == 0
    assert report.fps > 0


class SlowStage:
    """Takes 30 ms a frame."""

    def process(self, frame: Frame, result: Result) -> Result:
        time.sleep(0.03)
        return result


def test_the_latency_of_a_frame_adds_up(engine: Engine, clip: Source, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    # One frame at a time: then the total holds no wait for earlier frames, and a part left out of it shows.
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out))], in_flight=1, stages=[SlowStage()])
    run.start()
    finish(run)
    latencies = [record["latency_ms"] for record in records(out)]
    assert len(latencies) == FRAMES
    for latency in latencies:
        parts = [latency[stage] for stage in ("decode", "queue", "prefill", "decode_tokens", "track")]
        assert all(part >= 0 for part in parts)
        assert latency["decode"] > 0
        assert latency["prefill"] > 0
        assert latency["track"] >= 30
        assert sum(parts) <= latency["total"] + 0.3  # rounded each


def test_newest_wins_and_drops_are_reported_on_the_next_frame(engine: Engine, clip: Source, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out))], queue=NEWEST, in_flight=1)
    run.start()
    finish(run)
    seen = records(out)
    assert seen[-1]["frame"] == FRAMES - 1
    expected = -1
    for record in seen:
        expected += record["dropped_since_last"] + 1
        assert record["frame"] == expected
    assert run.report().drops == ({"full": FRAMES - len(seen)} if len(seen) < FRAMES else {})


def test_a_slow_sink_that_may_lose_frames_never_delays_another(engine: Engine, clip: Source, tmp_path: Path) -> None:
    out, slow = tmp_path / "out.jsonl", GateSink()
    run = Run(clip, engine, TASKS, [Output(slow, NEWEST), Output(JsonlSink(out))])
    run.start()
    wait_until(out, FRAMES)
    assert slow.taken == []
    slow.gate.set()
    finish(run)
    assert len(slow.taken) <= 2  # what it held all the time, and the newest
    assert slow.taken[-1].index == FRAMES - 1
    assert sum(frame.dropped_before + 1 for frame in slow.taken) == FRAMES
    assert [record["dropped_since_last"] for record in records(out)] == [0] * FRAMES
    assert run.report().drops == {"sink full": FRAMES - len(slow.taken)}


def test_a_slow_sink_that_may_lose_nothing_holds_the_source_back(engine: Engine, clip: Source, tmp_path: Path) -> None:
    out, slow = tmp_path / "out.jsonl", GateSink()
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out)), Output(slow)])
    run.start()
    # One in the slow sink's hands, its outbox full, and one waiting to get in: the other sink has had all of these.
    wait_until(out, 1 + WAIT.size + 1)
    assert not run.join(0.2)
    assert len(records(out)) == 1 + WAIT.size + 1
    slow.gate.set()
    finish(run)
    assert [frame.index for frame in slow.taken] == list(range(FRAMES))
    assert len(records(out)) == FRAMES


def test_a_failing_sink_is_paused_and_the_others_get_all(
    engine: Engine, clip: Source, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, failing = tmp_path / "out.jsonl", EndingSink(SinkError("cannot write x: No space left on device"))
    run = Run(clip, engine, TASKS, [Output(failing), Output(JsonlSink(out))])
    run.start()
    finish(run)
    assert [record["frame"] for record in records(out)] == list(range(FRAMES))
    assert "cannot write x: No space left on device; dropped results: " in str(run.error)  # a file's video has a hole
    assert failing.closed
    (status, _) = run.sink_statuses()
    assert status.lost == FRAMES - sum(frame.index != 2 for frame in failing.taken)
    assert caplog.text.count("No space left on device; dropping results until a retry succeeds") == 1


def test_a_file_run_ends_when_no_sink_can_be_written(engine: Engine, clip: Source) -> None:
    sinks = [EndingSink(SinkError("cannot write x")), EndingSink(SinkError("cannot write y"))]
    run = Run(clip, engine, TASKS, [Output(sink) for sink in sinks])
    run.start()
    finish(run)
    assert "dropped results" in str(run.error)
    assert run.report().frames < FRAMES


def test_an_error_of_a_callback_ends_the_run(engine: Engine, clip: Source) -> None:
    error = ValueError("a bug of the program")

    def fail(*_: object) -> None:
        raise error

    run = Run(clip, engine, TASKS, [Output(CallbackSink(fail))])
    run.start()
    finish(run)
    assert run.error is error


@pytest.mark.parametrize("alone", [True, False])
def test_a_lost_reader_ends_its_sink_and_a_run_without_another(engine: Engine, clip: Source, alone: bool) -> None:
    pipe, other = EndingSink(ReaderGoneError("the reader is gone")), EndingSink(SinkError("never"))
    other.write = GateSink.write.__get__(other)  # type: ignore[method-assign] # it takes everything
    run = Run(clip, engine, TASKS, [Output(pipe), *([] if alone else [Output(other)])])
    run.start()
    finish(run)
    assert run.error is None
    assert pipe.closed
    assert len(pipe.taken) == 3
    if not alone:
        assert [frame.index for frame in other.taken] == list(range(FRAMES))


def test_a_closed_window_ends_the_run_without_an_error(engine: Engine, clip: Source) -> None:
    window = EndingSink(SinkClosedError("the video window was closed"))
    run = Run(clip, engine, TASKS, [Output(window)])
    run.start()
    finish(run)
    assert run.error is None
    assert window.closed


def test_an_error_of_the_engine_ends_the_run(clip: Source, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    engine = Engine.load("nano", device="cpu")
    engine.close()
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out))])
    run.start()
    finish(run)
    assert run.error is not None
    assert records(out) == []


@pytest.mark.parametrize(("fails", "survives"), [({2, 3, 5}, True), ({*range(2, 14)}, False)])
def test_a_live_stream_outlives_frames_the_engine_fails_on(
    fails: set[int], survives: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, calls = tmp_path / "out.jsonl", count()
    with Engine.load("nano", device="cpu") as engine:
        launch = engine._executor.launch

        def failing(slot: int, step: Any) -> None:
            if step.kind is StepKind.PREFILL and next(calls) in fails:
                raise RuntimeError("out of memory")
            launch(slot, step)

        engine._executor.launch = failing
        run = Run(ReplaySource(open_source(CLIP)), engine, TASKS, [Output(JsonlSink(out))], in_flight=1)
        run_for(run, 6)
    report, kept = run.report(), records(out)
    assert "processing a frame failed: out of memory" in caplog.text
    if survives:
        assert run.error is None
        assert report.drops["failed"] == 3
        frames = [record["frame"] for record in kept]
        gaps = [after - before - 1 for before, after in pairwise(frames)]
        assert gaps == [record["dropped_since_last"] for record in kept[1:]]  # each is reported, whatever the cause
    else:
        assert str(run.error) == "out of memory"
        assert report.drops["failed"] == 10
        assert len(kept) == 2


class SpottedSource(ReplaySource):
    """A camera, every fourth frame of which cannot be converted: on a busy machine one alone may be superseded."""

    def __iter__(self) -> Iterator[Frame]:
        for frame in super().__iter__():
            yield frame.changed(convert=lambda: 1 / 0) if frame.index % 4 == 3 else frame


@pytest.mark.parametrize("policy", ["newest", "keep 4"])
def test_a_live_stream_outlives_a_frame_without_an_image(engine: Engine, tmp_path: Path, policy: str) -> None:
    source = SpottedSource(open_source(CLIP))
    output = Output(JsonlSink(tmp_path / "out.jsonl"))
    run = Run(source, engine, TASKS, [output], queue=QueuePolicy.parse(policy))
    run_for(run, 6)
    assert run.error is None
    assert run.report().drops["failed"] >= 1


class BreakingSource:
    """A real clip whose medium is pulled out after five frames."""

    gpu: int | None = None
    decoder = ""

    def __init__(self, clip: Source) -> None:
        self._clip = clip
        self.name, self.info, self.close = clip.name, clip.info, clip.close

    @property
    def corrupt_packets(self) -> int:
        return self._clip.corrupt_packets

    def __iter__(self) -> Iterator[Frame]:
        for frame in self._clip:
            if frame.index == 5:
                raise SourceError("clip.mp4: the disk was removed")
            yield frame


def test_frames_read_before_the_source_fails_are_finished(engine: Engine, clip: Source, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run = Run(BreakingSource(clip), engine, TASKS, [Output(JsonlSink(out))])
    run.start()
    finish(run)
    assert isinstance(run.error, SourceError)
    assert [record["frame"] for record in records(out)] == list(range(5))


@pytest.mark.parametrize("queue", [WAIT, NEWEST, QueuePolicy(3, "drop oldest")])
def test_stopping_finishes_what_is_in_flight_and_counts_the_rest(
    engine: Engine, clip: Source, tmp_path: Path, queue: QueuePolicy
) -> None:
    out = tmp_path / "out.jsonl"
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out))], queue=queue)
    run.start()
    wait_until(out, 1)
    run.stop()
    run.stop()
    finish(run)
    assert run.error is None
    frames = [record["frame"] for record in records(out)]
    assert frames == sorted(set(frames))
    assert run.report().frames == len(frames)


def test_stopping_before_the_first_frame(engine: Engine, clip: Source, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run = Run(clip, engine, TASKS, [Output(JsonlSink(out))])
    run.stop()
    run.start()
    finish(run)
    assert records(out) == []
    assert run.report().frames == 0
    assert run.report().fps == 0

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest

from saccade.engine import Engine
from saccade.engine.results import Result
from saccade.engine.tasks import Detect
from saccade.pipeline.config import ListedStream
from saccade.pipeline.config.queue_policy import NEWEST, WAIT
from saccade.pipeline.errors import StreamError
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.streams import Streams
from saccade.sinks import Latency, SinkError
from saccade.sources import Frame, LiveSource, Source, SourceError, open_source
from saccade.sources.replay import ReplaySource
from tests.support import REPO

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
LONG_S = 60  # far beyond what any of these needs; only so that a hang fails
PERSON = [Detect("person")]


class Collector:
    """A sink for all streams that keeps what it is given, by stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: dict[str, list[Frame]] = {}
        self.results: dict[str, list[Result]] = {}
        self.ended: list[str] = []
        self.closed = 0
        self.error = error

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        self.taken.setdefault(frame.stream, []).append(frame)
        self.results.setdefault(frame.stream, []).append(result)

    def end(self, stream: str) -> None:
        self.ended.append(stream)

    def close(self) -> None:
        self.closed += 1
        if self.error:
            raise self.error


class StuckSink(Collector):
    """A sink that does not come back from its first write until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        assert self.gate.wait(LONG_S)
        super().write(frame, result, latency)


class Broken:
    """A real clip whose medium is pulled out after three frames."""

    gpu: int | None = None
    decoder = ""

    def __init__(self, clip: Source) -> None:
        self._clip = clip
        self.name, self.info, self.close, self.corrupt_packets = clip.name, clip.info, clip.close, 0

    def __iter__(self) -> Iterator[Frame]:
        for frame in self._clip:
            if frame.index == 3:
                raise SourceError("rtsp://me:secret@cam/1: the disk was removed")
            yield frame


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


def clip(frames: int = 10) -> Source:
    return open_source(CLIP, end=frames / 10)


def wait_for(what: object, *, so: bool = True) -> None:
    deadline = time.monotonic() + LONG_S
    while bool(what()) is not so:  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("saccade ")]


def test_streams_share_one_sink_which_is_closed_once(engine: Engine) -> None:
    sink, own = Collector(), Collector()
    with Streams(engine, [Output(sink)]) as streams:
        runs = [streams.add("door", clip(), PERSON), streams.add("yard", clip(6), PERSON, outputs=[Output(own)])]
        assert streams.names == ["door", "yard"]
        assert streams.get("yard") is runs[1]
        assert all(run.join(LONG_S) for run in runs)
        wait_for(lambda: streams.names, so=False)
        assert sorted(sink.ended) == ["door", "yard"]
        assert sink.closed == 0
    assert sink.closed == 1
    assert {name: [frame.index for frame in taken] for name, taken in sink.taken.items()} == {
        "door": list(range(10)),
        "yard": list(range(6)),
    }
    assert [frame.stream for frame in own.taken["yard"]] == ["yard"] * 6
    assert (own.closed, own.ended) == (1, [])
    assert no_threads_left()


def test_a_stream_without_a_thread_to_run_in_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, source, start, left = Collector(), clip(), threading.Thread.start, [2]

    def start_two(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    with Streams(engine, [Output(sink)]) as streams:
        monkeypatch.setattr(threading.Thread, "start", start_two)
        with pytest.raises(StreamError, match="can't start new thread"):
            streams.add("door", source, PERSON)
        monkeypatch.undo()
        assert streams.names == []
        streams.add("door", source, PERSON).join(LONG_S)
    assert (list(sink.taken), sink.closed) == (["door"], 1)


def test_a_failed_stream_stops_no_other_and_stays_listed(engine: Engine) -> None:
    ended: list[Run] = []
    sink = Collector()
    with Streams(engine, [Output(sink)]) as streams:
        streams.add("bad", Broken(clip()), PERSON, on_end=ended.append)  # type: ignore[arg-type]
        good = streams.add("good", clip(), PERSON)
        assert good.join(LONG_S)
        wait_for(lambda: ended)
        (status,) = streams.snapshot()
        assert (status.name, status.state, status.ok) == ("bad", "failed", False)
        assert status.reason == "rtsp://cam/1: the disk was removed"
        with pytest.raises(StreamError, match="does not exist"):
            streams.get("bad")
        streams.remove("bad")
        assert streams.snapshot() == []
    assert isinstance(ended[0].error, SourceError)
    assert good.error is None
    assert len(sink.taken["good"]) == 10
    assert len(sink.taken["bad"]) == 3


def test_prompts_change_while_it_runs_from_the_next_frame_on(engine: Engine) -> None:
    sink = Collector()
    with Streams(engine, [Output(sink)]) as streams:
        run = streams.add("door", clip(20), [Detect("person", conf=0.2)], in_flight=1)
        wait_for(lambda: len(sink.results.get("door", [])) >= 3)
        run.update(ListedStream(source="clip.mp4", detect=["chair"], conf=0.0, max_objects=2))
        assert run.tasks == (Detect("chair", conf=0.0, max_objects=2),)
        assert run.join(LONG_S)
    labels = [{box.label for box in result.detections.boxes} for result in sink.results["door"]]
    assert {"person"} in labels[:3]
    assert labels[-1] == {"chair"}
    changed = labels.index({"chair"})
    assert all(one == {"chair"} for one in labels[changed:])


def test_a_stuck_sink_of_one_stream_delays_no_other(engine: Engine) -> None:
    sink, stuck = Collector(), StuckSink()
    with Streams(engine, [Output(sink)]) as streams:
        streams.add("slow", clip(), PERSON, outputs=[Output(stuck)])
        other = streams.add("other", clip(), PERSON, outputs=[Output(stuck, NEWEST)])
        wait_for(lambda: len(sink.taken.get("other", [])) == 10)
        with pytest.raises(StreamError, match="'other' did not stop within"):
            streams.remove("other", timeout_s=0.1)
        stuck.gate.set()
        assert other.join(LONG_S)


def test_a_blocked_sink_delays_no_other_and_its_loss_counts(
    engine: Engine,
) -> None:
    sink, stuck = Collector(), StuckSink()
    with Streams(engine, [Output(stuck), Output(sink)]) as streams:
        run = streams.add("door", ReplaySource(clip(200)), PERSON)
        wait_for(lambda: len(sink.taken.get("door", [])) >= 12)
        assert run.report().drops["sink full"] >= 12 - 1 - 8  # one in its hands, eight waiting
        stuck.gate.set()
    given = [frame.index for frame in sink.taken["door"]]
    late = stuck.taken["door"]
    assert [frame.index for frame in late] == [given[0], *given[-len(late) + 1 :]]
    assert sum(frame.dropped_before for frame in late) > len(given) - len(late) - 1


def test_names_are_taken_once_and_are_safe_in_paths_and_topics(engine: Engine) -> None:
    with Streams(engine, max_streams=2) as streams:
        streams.add("a", clip(200), PERSON)
        for name, message in (
            ("a", "already"),
            ("..", "invalid stream name"),
            ("a/b", "invalid stream name"),
            ("", "invalid stream name"),
            ("#", "invalid stream name"),
        ):
            with pytest.raises(StreamError, match=message):
                streams.add(name, clip(), PERSON)
        streams.add("b", clip(200), PERSON)
        with pytest.raises(StreamError, match="limit of 2 running streams"):
            streams.add("c", clip(), PERSON)
        streams.remove("a")
        assert streams.names == ["b"]
        with pytest.raises(StreamError, match="does not exist"):
            streams.remove("a")
    with pytest.raises(StreamError, match="shutting down"):
        streams.add("d", clip(), PERSON)
    assert no_threads_left()


def test_a_sink_that_fails_to_close_keeps_no_other_open(
    engine: Engine,
) -> None:
    full, fine = Collector(SinkError("cannot finish x: No space left on device")), Collector()
    streams = Streams(engine, [Output(full), Output(fine)])
    with pytest.raises(SinkError, match="No space"):
        streams.close()
    streams.close()
    assert (full.closed, fine.closed) == (1, 1)


def test_the_status_of_a_camera_that_is_not_there(engine: Engine) -> None:
    camera = open_source("rtsp://me:secret@127.0.0.1:1/door")
    assert isinstance(camera, LiveSource)
    with Streams(engine) as streams:
        streams.add("door", camera, PERSON)
        wait_for(lambda: streams.snapshot()[0].reason)
        (status,) = streams.snapshot()
        assert (status.state, status.reason, status.ok) == ("connecting", "connection failed", False)
        assert status.detail == "127.0.0.1:1: Connection refused"
        assert status.source == "rtsp://127.0.0.1:1/door"
    assert no_threads_left()


def test_a_model_that_does_not_answer_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.pipeline.runtime.streams._STUCK_S", 0.01)
    with Streams(engine) as streams:
        streams.add("door", clip(), PERSON, tiles=2)
        seen = []
        wait_for(lambda: [seen.append(one) for one in streams.snapshot() if one.state == "stuck"])
        (status,) = seen
        assert not status.ok
        assert status.reason is not None
        assert re.fullmatch(r"no result from the model for \d+ s", status.reason)


def test_what_happens_now_is_counted(engine: Engine) -> None:
    with Streams(engine) as streams:
        file = streams.add("file", clip(3), PERSON)
        assert file.join(LONG_S)
        assert file.report().recent.age_ms is None
        source = ReplaySource(clip(10))
        run = streams.add("door", source, PERSON, queue=WAIT)
        wait_for(lambda: run.report().frames >= 10)
        run.stop()
        assert run.join(LONG_S)
        report = run.report()
    assert report.read >= report.frames >= 10
    assert report.waiting == {"engine": 0}
    for histogram in report.histograms.values():
        assert sum(histogram.counts) == report.frames
    assert report.histograms["prefill"].sum_ms == pytest.approx(report.frames * report.latency.prefill)
    now = report.recent
    assert now.fps > 0
    assert now.p50_ms is not None
    assert now.p99_ms is not None
    assert 0 < now.p50_ms <= now.p99_ms
    assert now.age_ms is not None
    assert now.age_ms > 0


def test_a_stream_that_is_opened_anew_is_listed_all_the_while(engine: Engine) -> None:
    with Streams(engine) as streams:
        streams.add("door", ReplaySource(open_source(str(CLIP))), PERSON)
        with streams.reopening("door"):
            (status,) = streams.snapshot()
            assert (status.name, status.state, status.ok) == ("door", "connecting", False)
            assert streams.names == ["door"]
            assert not streams.idle
            for refused in (streams.reopening("door").__enter__, lambda: streams.remove("door")):
                with pytest.raises(StreamError, match="'door' is being reopened"):
                    refused()
            streams.add("door", ReplaySource(open_source(str(CLIP))), PERSON)
        assert [status.ok for status in streams.snapshot()] == [True]


def test_a_stream_that_cannot_be_opened_anew_stays_as_failed(engine: Engine) -> None:
    with Streams(engine) as streams:
        streams.add("door", ReplaySource(open_source(str(CLIP))), PERSON)
        for reason in ("its file has gone", "it is still not there"):  # and it may be tried again
            with pytest.raises(SourceError), streams.reopening("door"):
                raise SourceError(reason)
            (status,) = streams.snapshot()
            assert (status.name, status.state, status.reason) == ("door", "failed", reason)
            assert not streams.idle  # so that the command goes on
        streams.remove("door")
        assert streams.idle
        assert not streams.snapshot()

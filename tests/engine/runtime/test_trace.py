from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.engine import Detect, Engine, Query
from saccade.engine.golden.random_model import random_engine
from saccade.engine.runtime.cpu_executor import CpuStream
from saccade.engine.runtime.cuda_executor import CudaStream
from saccade.engine.runtime.monitor import Monitor, Span, StepPart, Trace, Track
from saccade.engine.runtime.streams import Stream
from tests.support.engine import TINY, noise, one_thread

WAIT_S = 60.0
TASKS = [Detect("cup", 3, 0.0), Detect("a long name", 2, 0.0)]
DRAWN = Query("why?", 3, temperature=1.0, seed=1)


@pytest.fixture(scope="module", autouse=True)
def small_tensors() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=[1, 2], ids=["blocking", "pipelined"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with random_engine("cpu", config=TINY, depth=request.param, n_pages=200) as engine:
        yield engine


def work(engine: Engine, images: int = 4) -> None:
    for answer in [engine.submit(noise(16, 16, n), TASKS) for n in range(images)]:
        answer.result(WAIT_S)


def settled(engine: Engine) -> dict[str, float]:
    """The counters once what ran to waste has been read as well."""
    latest = time.monotonic() + WAIT_S
    while engine.counters()["batch_slots_used"] and time.monotonic() < latest:
        time.sleep(0.005)
    return engine.counters()


def test_a_trace_shows_every_part_of_every_step(engine: Engine) -> None:
    work(engine)
    before = settled(engine)
    with engine.tracing() as trace:
        work(engine)
        engine.submit(noise(16, 16), [DRAWN]).result(WAIT_S)
        after = settled(engine)
    work(engine, 1)  # is no part of it any more
    steps = sum(after[key] - before[key] for key in ("steps_prefill_total", "steps_decode_total"))
    rows = sum(after[key] - before[key] for key in ("sequences_prefill_total", "sequences_decode_total"))
    compute, copies, host = (trace.spans(track) for track in ("compute", "copy", "host"))
    forwards = [span for span in compute if span.name in ("prefill", "decode")]
    assert len(forwards) == steps
    assert sum(int(str(span.args["rows"])) for span in forwards) == rows
    assert [span.args["step"] for span in forwards] == sorted(span.args["step"] for span in forwards)  # type: ignore[type-var]
    assert all(span.name == span.args["kind"] for span in forwards)
    drawn = {span.args["step"] for span in compute if span.name == "sample"}  # the likeliest come with the forward
    assert drawn
    assert drawn < {span.args["step"] for span in forwards}
    assert len(copies) == steps + len(drawn), "of values to the host, and of what drawing needs to the device"
    for name in ("launch", "finalize", "commit", "wait"):
        assert {span.args["step"] for span in host if span.name == name} == {span.args["step"] for span in forwards}
    for name in ("sequences in flight", "images waiting", "free pages"):
        assert [one for one in trace.counts() if one.name == name]


def test_spans_come_in_the_order_of_the_step(engine: Engine) -> None:
    with engine.tracing() as trace:
        work(engine, 2)
        engine.submit(noise(16, 16), [DRAWN]).result(WAIT_S)
    of: dict[tuple[str, Any], Span] = {}
    for track in ("host", "compute", "copy"):
        for span in trace.spans(track):
            assert span.end >= span.start >= trace.started
            name = "forward" if span.name in ("prefill", "decode") else span.name
            of[name, span.args.get("step")] = span  # of copies that to the host, which is the last
    whole = [step for name, step in of if name == "commit" and ("launch", step) in of]
    assert whole
    for step in whole:
        launch, finalize, commit, wait = (of[name, step] for name in ("launch", "finalize", "commit", "wait"))
        forward, copy = of["forward", step], of["copy", step]
        assert launch.start <= forward.start <= forward.end <= copy.start
        if sample := of.get(("sample", step)):
            assert forward.end <= sample.start <= sample.end <= copy.start
            assert finalize.start <= sample.start
        assert wait.start <= wait.end <= commit.start <= commit.end
        assert copy.end <= commit.start
    compute = trace.spans("compute")
    assert all(one.end <= other.start for one, other in pairwise(compute))


def test_only_a_pipelined_engine_launches_before_it_has_read(engine: Engine) -> None:
    with engine.tracing() as trace:
        work(engine)
    host = trace.spans("host")
    ends = {span.args["step"]: span.end for span in host if span.name == "wait"}
    launched = {span.args["step"]: span.start for span in host if span.name == "launch"}
    launched_early = [step for step, at in launched.items() if isinstance(step, int) and at < ends.get(step - 1, 0.0)]
    zombies = engine.counters()["zombies_total"]
    assert bool(launched_early) == (engine._loop.slots.depth == 2)
    assert zombies == 0 or launched_early


def test_the_file_is_what_perfetto_imports(engine: Engine, tmp_path: Path) -> None:
    with engine.tracing() as trace:
        work(engine, 2)
    trace.save(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())
    events = saved["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "C", "M"}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["host", "compute", "copy"]
    for event in events:
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["tid"] in tracks
        elif event["ph"] == "C":
            assert event["ts"] >= 0
            assert list(event["args"]) == ["value"]
    (longest,) = {max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")}
    last = max(span.end for track in ("host", "compute", "copy") for span in trace.spans(track))
    assert longest == pytest.approx(1e6 * (last - trace.started), abs=1.0)
    for tid in tracks:  # what lies in another ends in it, or an importer drops it
        stack: list[float] = []
        for event in [e for e in events if e["ph"] == "X" and e["tid"] == tid]:
            while stack and stack[-1] <= event["ts"] + 1e-3:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1] + 2e-3
            stack.append(end)


def test_a_trace_is_bounded_and_keeps_the_newest() -> None:
    trace = Trace(capacity=3)
    for number in range(5):
        trace.add(Span(str(number), "host", number, number + 1))
        trace.count("n", number)
    assert [span.name for span in trace.spans("host")] == ["2", "3", "4"]
    assert [one.value for one in trace.counts()] == [2, 3, 4]


def test_what_began_before_the_trace_has_no_negative_time() -> None:
    trace = Trace()
    trace.add(Span("early", "compute", trace.started - 1.0, trace.started + 1.0))
    trace.add(Span("odd", "elsewhere", trace.started, trace.started + 1.0))
    events = [event for event in trace.to_dict()["traceEvents"] if event["ph"] == "X"]  # type: ignore[attr-defined]
    assert [(event["name"], event["ts"]) for event in events] == [("early", 0.0), ("odd", 1e6)]
    assert len({event["tid"] for event in events}) == 2


def test_one_trace_at_a_time_and_then_another(engine: Engine) -> None:
    with engine.tracing(), pytest.raises(RuntimeError, match="already"), engine.tracing():
        pass
    with pytest.raises(ZeroDivisionError), engine.tracing():
        raise ZeroDivisionError
    with engine.tracing() as trace:
        work(engine, 1)
    assert trace.spans("compute")


def test_counters_add_up(engine: Engine) -> None:
    before = settled(engine)
    dropped = engine.submit(noise(16, 16), TASKS)
    dropped.cancel()
    failed = engine.submit(noise(16, 16), TASKS, deadline_s=-1.0)
    work(engine, 3)
    assert failed.exception(WAIT_S) is not None
    after = settled(engine)
    grown = {key: after[key] - before[key] for key in after}
    assert grown["requests_done_total"] + grown["requests_cancelled_total"] == 4
    assert grown["requests_cancelled_total"] == float(dropped.cancelled())
    assert grown["requests_failed_total"] == 1
    assert grown["sequences_prefill_total"] >= 6
    assert after["mean_batch_size"] == after["sequences_decode_total"] / after["steps_decode_total"]
    assert after["pages_capacity"] == 199
    assert 0 <= after["bubble"] < 1
    assert grown["busy_seconds_total"] > 0
    for key in ("batch_slots_used", "pages_used", "images_waiting", "sequences_decoding"):
        assert after[key] == 0, key


def test_streams_are_timed_from_the_first_reading_of_counters() -> None:
    with random_engine("cpu", config=TINY, depth=2, n_pages=200) as engine:
        work(engine, 1)
        while engine._loop.slots.in_flight:
            time.sleep(0.001)
        before = engine.counters()
        work(engine, 1)
        after = settled(engine)
    assert before["steps_prefill_total"] > 0
    assert before["busy_seconds_total"] == 0 == before["bubble"]
    assert after["busy_seconds_total"] > 0


def test_counters_are_read_while_everything_runs(engine: Engine) -> None:
    stop = threading.Event()
    seen: list[dict[str, float]] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(engine.counters())
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    work(engine, 8)
    stop.set()
    reader.join(WAIT_S)
    assert max(one["pages_used"] for one in seen) > 0
    assert max(one["batch_slots_used"] for one in seen) > 0
    for key in seen[0]:
        if key.endswith("_total"):
            values = [one[key] for one in seen]
            assert values == sorted(values), key


def test_time_without_work_is_idle_and_no_bubble(engine: Engine) -> None:
    work(engine, 1)
    before = settled(engine)
    time.sleep(0.3)
    work(engine, 1)
    after = settled(engine)
    assert after["idle_seconds_total"] - before["idle_seconds_total"] > 0.25
    assert after["bubble_seconds_total"] - before["bubble_seconds_total"] < 0.25


def test_a_gap_is_a_bubble_only_while_there_was_work() -> None:
    monitor = Monitor()
    track = Track("compute", monitor)
    for rests, start, end in ((0, 1.0, 2.0), (0, 2.5, 3.0), (1, 9.0, 10.0), (1, 10.0, 11.0)):
        track.ran(StepPart("decode", 1, "decode", 1, rests), start, end)
    assert (track.busy_s, track.bubble_s) == (3.5, 0.5)


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.now = 0
        self.spans: list[tuple[int, float, float]] = []

    def about(self) -> int:
        self.now += 1
        return self.now

    def ran(self, about: int, start: float, end: float) -> None:
        self.spans.append((about, start, end))


def test_a_stream_tells_when_its_work_ran() -> None:
    stream = CpuStream("watched")
    notes = Notes()
    stream.run(lambda: None)
    stream.watch(notes)
    asked = time.perf_counter()
    stream.run(lambda: time.sleep(0.02))
    stream.run(lambda: 1 / 0)  # type: ignore[func-returns-value, arg-type]
    stream.run(lambda: None)  # skipped, as what failed before it has not been raised
    event = stream.record()
    stream.settle(wait=True)
    assert [about for about, _, _ in notes.spans] == [1, 2]
    (_, start, end), (_, then, _) = notes.spans
    assert asked <= start <= end - 0.02
    assert end <= then
    with pytest.raises(ZeroDivisionError):
        event.synchronize()
    stream.watch(None)
    stream.run(lambda: None)
    stream.close()
    stream.settle(wait=True)  # there is nothing to wait for
    assert len(notes.spans) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_cuda_stream_tells_on_the_hosts_clock_and_never_waits() -> None:
    device = torch.device("cuda")

    def opened(name: str) -> Stream:
        return CudaStream(device) if device.type == "cuda" else CpuStream(name)

    stream, other, notes = opened("compute"), opened("copy"), Notes()
    stream.watch(notes)
    a, b = torch.rand(2, 4096, 4096, device=device)

    def multiply() -> None:
        for _ in range(20):
            torch.mm(a, a, out=b)

    stream.run(multiply)  # libraries set themselves up
    stream.settle(wait=True)
    notes.spans.clear()
    torch.cuda.synchronize()
    before = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            stream.run(multiply)
            other.wait(stream.record())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    given = time.perf_counter()
    stream.settle(wait=True)
    after = time.perf_counter()
    assert [about for about, _, _ in notes.spans] == [2, 3, 4]
    assert before - 1e-3 <= notes.spans[0][1]
    assert notes.spans[-1][2] <= after + 1e-3
    assert all(start < end for _, start, end in notes.spans)
    assert all(one[2] <= other[1] + 1e-6 for one, other in pairwise(notes.spans))
    assert given < notes.spans[-1][2], "giving work has waited for it"


def test_tracing_an_engine_that_closes_meanwhile_ends() -> None:
    engine = random_engine("cpu", config=TINY, depth=2, n_pages=200)
    with engine.tracing() as trace:
        work(engine, 1)
        engine.close()
    assert trace.spans("copy")
    assert engine.counters()["requests_done_total"] == 1


def test_a_cancelled_request_is_counted_once() -> None:
    with random_engine("cpu", config=TINY, depth=2, n_pages=200) as engine:
        answers = [engine.submit(noise(16, 16, n), [Detect("cup", 20, 0.0)]) for n in range(6)]
        for answer in answers:
            answer.cancel()
            answer.cancel()
        ended = 0
        for answer in answers:
            try:
                answer.result(WAIT_S)
            except CancelledError:
                ended += 1
        counters = settled(engine)
        assert counters["requests_cancelled_total"] == ended
        assert counters["requests_done_total"] == 6 - ended

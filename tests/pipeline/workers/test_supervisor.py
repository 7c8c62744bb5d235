"""The supervisor with workers that follow a script: what it asks of them, and what it makes of their answers."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.pipeline.errors import StreamError
from saccade.pipeline.workers import quarantine, states, supervisor
from saccade.pipeline.workers.open_events import OpenEvents
from saccade.pipeline.workers.states import RefusedError
from tests.support.cameras import wait_for
from tests.support.scripted_workers import CONFIG, LONG_S, Scene, ScriptedWorker, scene, seat_of
from tests.support.sinks.rule_events import BEGIN


def test_streams_wait_until_all_workers_are_ready() -> None:
    made = Scene(["1", "2"])
    made.supervisor.start()
    opening = [made.supervisor.open(CONFIG, "door") for _ in range(4)]
    made.worker("1").get_ready()
    assert made.worker("1").asked == []
    made.worker("2").get_ready()
    made.place()
    for name in ("1", "2"):
        assert len(made.worker(name).asked) == 2
        made.worker(name).answer()
    assert [one.result(LONG_S) for one in opening] == ["door", "door-2", "door-3", "door-4"]
    assert made.supervisor.close(LONG_S)


def test_a_stream_that_is_refused_is_forgotten() -> None:
    with scene("1") as made:
        opening = made.supervisor.open(CONFIG, "door")
        command = made.worker("1").asked.pop()
        made.worker("1").refuse(command, "SourceError", "no such file")
        with pytest.raises(RefusedError, match="no such file") as refused:
            opening.result(LONG_S)
        assert refused.value.kind == "SourceError"
        assert made.supervisor.streams() == {}


def test_a_lost_stream_is_opened_again_as_it_was_last() -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "door", checked=True)
        first = made.worker("1")
        first.answer()
        stream = {"name": "door", "state": "live", "settings": {**CONFIG, "detect": ["cat"]}}
        first.tell("report", busy=0.1, rss_bytes=1, streams=[stream])
        first.end("SIGKILL")
        assert made.lost == [("door", True)]
        second = made.worker("1", 1)
        second.get_ready()
        (command,) = made.worker("1").asked
        assert (command["config"]["detect"], command["again"], command["checked"]) == (["cat"], True, True)
        second.answer()
        assert made.phase("door") == "open"


def test_a_file_that_was_being_read_has_failed() -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "clip")
        made.worker("1").answer(live=False)
        made.worker("1").end("SIGSEGV")
        assert made.phase("clip") == "failed"
        assert "SIGSEGV" in made.supervisor.finished()["clip"]["error"]
        made.worker("1", 1).get_ready()
        assert made.worker("1").asked == []
        again = made.supervisor.restart("clip")
        made.worker("1").answer(live=False)
        assert again.result(LONG_S) == "clip"


def test_each_of_several_lost_files_tells_the_reason_once() -> None:
    with scene("1") as made:
        for name in ("clip", "film"):
            made.supervisor.open(CONFIG, name)
        made.worker("1").answer(live=False)
        made.worker("1").end("SIGKILL")
        errors = {message["error"] for message in made.supervisor.finished().values()}
        assert errors == {"its worker has ended (SIGKILL) before the file was through"}


@pytest.mark.parametrize("opens", [True, False])
def test_a_configuration_given_while_a_stream_opens_is_taken(opens: bool) -> None:
    with scene("1") as made:
        first = made.supervisor.open(CONFIG, "door")
        worker = made.worker("1")
        second = made.supervisor.restart("door", {**CONFIG, "detect": ["cat"]})
        if opens:
            worker.answer()
        else:
            worker.refuse(worker.asked.pop(), "SourceError", "no such host")
        assert not any((first.done(), second.done()))
        made.place()
        worker.answer()
        assert (first.result(LONG_S), second.result(LONG_S)) == ("door", "door")
        assert worker.open["door"]["config"]["detect"] == ["cat"]


def test_a_worker_that_stays_away_gives_its_streams_to_others() -> None:
    with scene() as made:
        for number in range(2):
            made.supervisor.open(CONFIG, f"door{number}")
            made.worker(str(number + 1)).answer()
        assert [list(made.worker(name).open) for name in ("1", "2")] == [["door0"], ["door1"]]
        made.worker("1").end("SIGKILL")
        wait_for(lambda: bool(made.worker("2").asked), LONG_S)
        made.worker("2").answer()
        assert set(made.worker("2").open) == {"door0", "door1"}


def test_a_worker_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene("1") as made:
        monkeypatch.setattr(states, "SILENT_S", 0.1)
        wait_for(lambda: made.made["1"][0].killed, LONG_S)
        monkeypatch.undo()
        made.worker("1", 1).get_ready()


def test_a_worker_that_ends_before_it_is_killed_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene() as made:
        first, second = made.worker("1"), made.worker("2")

        def end_both(worker: ScriptedWorker) -> None:
            first.end("SIGKILL")
            second.end("SIGSEGV")

        monkeypatch.setattr(ScriptedWorker, "kill", end_both)
        monkeypatch.setattr(states, "SILENT_S", 0.1)
        wait_for(lambda: second.state == "ended", LONG_S)
        monkeypatch.undo()
        for name in ("1", "2"):
            made.worker(name, 1).get_ready()


def test_a_stream_that_crashes_its_workers_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "PROBATION_S", 0.02)
    names = {f"door{number}" for number in range(4)}
    with scene() as made:
        for name in sorted(names | {"poison"}):
            made.supervisor.open(CONFIG, name)
        crashes = 0
        deadline = time.monotonic() + LONG_S
        while made.phase("poison") != "failed" or any(made.phase(name) != "open" for name in names):
            assert time.monotonic() < deadline
            for number in made.made:
                worker = made.worker(number)
                seat_of(made, number).retry_at = 0.0  # or the test would wait
                if worker.state == "starting" and seat_of(made, number).worker is worker:
                    worker.get_ready()
                worker.answer()
                if "poison" in worker.open:
                    worker.end("SIGSEGV")
                    crashes += 1
            time.sleep(0.005)
        assert crashes == quarantine.STRIKES + 1
        assert "SIGSEGV" in str(made.supervisor.streams()["poison"].reason)


def test_workers_that_end_at_once_are_started_less_often() -> None:
    seat = states.WorkerSeat("1")
    delays = []
    for _ in range(9):
        seat.url, seat.ready_at = "http://127.0.0.1", 100.0
        seat.note_end(101.0, "SIGSEGV")
        delays.append(seat.retry_at - 101.0)
    assert delays == [0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    seat.url, seat.ready_at = "http://127.0.0.1", 200.0
    seat.note_end(260.0, "SIGKILL")
    assert seat.retry_at == 260.0


@pytest.mark.parametrize(("name", "reason"), [("door", "already"), ("a/b", "no name for a stream"), ("", "no name")])
def test_names_are_free_and_valid(name: str, reason: str) -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "door")
        with pytest.raises(StreamError, match=reason):
            made.supervisor.open(CONFIG, name, or_similar=False)
        with pytest.raises(StreamError, match="no stream is called"):
            made.supervisor.close_stream("window")


def test_a_late_answer_of_an_older_opening_is_nothing() -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "door")
        key = made.worker("1").asked[0]["key"]
        made.worker("1").answer()
        closing = made.supervisor.close_stream("door")
        made.worker("1").answer()
        closing.result(LONG_S)
        made.supervisor.open(CONFIG, "door")
        made.worker("1").answer()
        made.worker("1").tell("closed", stream="door", key=key, error=None)
        made.worker("1").tell("gone", stream="door", key=key, error=None)
        assert made.phase("door") == "open"


def test_events_are_handed_to_the_next_worker_or_ended() -> None:
    heard: list[tuple[str, str]] = []
    known = OpenEvents(lambda record, machine: heard.append((record["type"], record["id"])))
    with scene("1", events=known) as made:
        for name in ("door", "yard"):
            made.supervisor.open(CONFIG, name)
        first = made.worker("1")
        first.answer()
        for name in ("door", "yard"):
            first.tell("event", record={**BEGIN, "stream": name, "id": name})
        seen = {"name": "door", "state": "live", "events": {"door": BEGIN["frame_time"] + 9}}
        first.tell("report", busy=0.1, rss_bytes=1, streams=[seen])
        made.supervisor.close_stream("yard")  # which the worker does not live to do
        first.end("SIGKILL")
        second = made.worker("1", 1)
        wait_for(lambda: seat_of(made, "1").worker is second, LONG_S)
        second.get_ready()
        made.place()
        (command,) = second.asked
        assert [(one["id"], one["frame_time"]) for one in command["events"]] == [("door", BEGIN["frame_time"] + 9)]
        assert heard == [("begin", "door"), ("begin", "yard"), ("end", "yard")]
        second.end("SIGKILL")
        made.supervisor.close_stream("door")  # while no worker has it
        assert heard[3:] == [("end", "door")]


def test_a_message_that_cannot_be_handled_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with scene("1") as made:
        made.worker("1").tell("event", record={})
        made.worker("1").tell("report", busy="?")
        assert caplog.text.count("KeyError") == 2
        made.supervisor.open(CONFIG, "door")
        made.worker("1").answer()
        assert made.phase("door") == "open"


def test_streams_are_placed_when_something_changes_not_always(monkeypatch: pytest.MonkeyPatch) -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "door")
        made.worker("1").answer()
        placed: list[float] = []
        made.place()
        monkeypatch.setattr(made.supervisor._table, "place", lambda seats, now: placed.append(now))
        monkeypatch.setattr(supervisor, "REPORT_S", 1e9)
        for _ in range(20):
            made.worker("1").tell("report", busy=0.1, rss_bytes=1, streams=[])
        assert placed == []
        made.supervisor.open(CONFIG, "window")
        wait_for(lambda: bool(placed), LONG_S)


STEP_NAMES = ["open", "close", "restart", "change", "drain", "answer", "end", "ready"]
STEPS = st.lists(st.tuples(st.sampled_from(STEP_NAMES), st.integers(0, 3)), max_size=40)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_whatever_happens_every_stream_runs_once_in_the_end(steps: list[tuple[str, int]]) -> None:
    wanted: set[str] = set()
    with scene() as made:
        for step, number in steps:
            name, worker = f"door{number}", made.worker(str(number % 2 + 1))
            if step == "open" and name not in made.supervisor.streams():
                made.supervisor.open(CONFIG, name, or_similar=False)
                wanted.add(name)
            elif step in ("close", "restart", "change") and name in wanted:
                if step == "close":
                    made.supervisor.close_stream(name)
                    wanted.discard(name)
                else:
                    made.supervisor.restart(name, {**CONFIG, "conf": number / 10} if step == "change" else None)
            elif step == "drain":
                seat_of(made, worker.name).draining ^= True
            elif step == "answer":
                worker.answer()
            elif step == "end" and worker.state == "ready":
                worker.end("SIGKILL")
            elif step == "ready" and worker.state == "starting":
                worker.get_ready()
        deadline = time.monotonic() + LONG_S
        while True:
            for name in made.made:
                seat = seat_of(made, name)
                seat.retry_at, seat.draining = 0.0, False  # or the test would wait
                if made.worker(name).state == "starting" and seat.worker is made.worker(name):
                    made.worker(name).get_ready()
                made.worker(name).answer()
            streams = made.supervisor.streams()
            settled = all(stream.phase == "open" for stream in streams.values())
            if streams.keys() == wanted and settled:
                break
            assert time.monotonic() < deadline, streams
            made.supervisor._wake.set()
            time.sleep(0.005)
        running = [stream for name in made.made for stream in made.worker(name).open]
        assert sorted(running) == sorted(wanted)

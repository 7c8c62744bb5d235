"""Streams that move between workers that follow a script, and workers that are replaced."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from saccade.pipeline.workers.protocol import MakeWorker
from saccade.pipeline.workers.rolling import RollError, next_name, replace_workers
from saccade.pipeline.workers.states import RefusedError
from tests.support.scripted_workers import CONFIG, LONG_S, Scene, ScriptedWorker, scene, seat_of


def moving(made: Scene) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A stream that worker 1 has, and is asked to let go of for 2."""
    made.supervisor.open(CONFIG, "door")
    first, second = made.worker("1"), made.worker("2")
    first.answer()
    seat_of(made, "1").draining = True
    made.place()
    return first, second


def test_a_stream_moves_when_its_worker_has_let_go() -> None:
    with scene() as made:
        first, second = moving(made)
        assert ([(one["do"], one["moves"]) for one in first.asked], second.asked) == ([("close", True)], [])
        first.answer()
        assert made.lost == [("door", False)]
        made.place()
        assert [(one["do"], one["events"]) for one in second.asked] == [("open", [])]
        second.answer()
        assert (made.phase("door"), list(second.open), first.open) == ("open", ["door"], {})


@pytest.mark.parametrize("dies", ["first", "second"])
def test_a_worker_that_dies_while_a_stream_moves_costs_no_stream(dies: str) -> None:
    with scene() as made:
        first, second = moving(made)
        if dies == "first":
            first.end("SIGKILL")
        else:
            first.answer()
            made.place()
            second.end("SIGKILL")
            second = made.worker("2", 1)
            second.get_ready()
        made.place()
        second.answer()
        assert list(second.open) == ["door"]


def test_a_stream_that_the_next_worker_refuses_waits_with_its_configuration() -> None:
    with scene() as made:
        first, second = moving(made)
        first.answer()
        made.place()
        second.refuse(second.asked.pop(), "EngineError", "no such class")
        made.place()
        assert (first.asked, second.asked) == ([], [])
        assert made.supervisor.streams()["door"].stays == "no such class"
        made.supervisor.drain("1", False)
        made.place()
        assert [one["do"] for one in (*first.asked, *second.asked)] == ["open"]


def test_a_stream_goes_on_as_it_was_where_another_configuration_is_refused() -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "door")
        worker = made.worker("1")
        worker.answer()
        done = made.supervisor.restart("door", {**CONFIG, "detect": ["cat"]})
        assert [(one["do"], one["moves"]) for one in worker.asked] == [("close", True)]  # its events go on
        worker.answer()
        made.place()
        worker.refuse(worker.asked.pop(), "EngineError", "no cats")
        with pytest.raises(RefusedError, match="no cats"):
            done.result(LONG_S)
        made.place()
        worker.answer()
        assert (made.phase("door"), worker.open["door"]["config"]["detect"]) == ("open", ["person"])
        done = made.supervisor.restart("door", {**CONFIG, "detect": ["dog"]})
        worker.answer()
        made.place()
        worker.answer()
        assert done.result(LONG_S) == "door"
        assert made.supervisor.streams()["door"].config["detect"] == worker.open["door"]["config"]["detect"] == ["dog"]


def work(made: Scene, refuses: str = "", fails: str = "") -> None:
    """Have every worker do what it is asked: the one of a name refuses streams, or cannot begin."""
    for name in list(made.made):
        worker = made.made[name][-1]
        if worker.state == "starting" and name == fails:
            worker.tell("failed", error="no such model")
            worker.end("exit code 1")
        elif worker.state == "starting" and any(seat.worker is worker for seat in made.supervisor.seats()):
            worker.get_ready()
        elif name == refuses:
            for command in [one for one in worker.asked if one["do"] == "open"]:
                worker.asked.remove(command)
                worker.refuse(command, "EngineError", "no cats")
        worker.answer()


def roll(made: Scene, configs: dict[str, Any], **how: str) -> Exception | None:
    """Replace all workers; returns the error that it ends with."""
    errors: list[Exception] = []
    make: MakeWorker = made._make

    def replace() -> None:
        try:
            replace_workers(made.supervisor, make, configs)
        except RollError as error:
            errors.append(error)

    thread = threading.Thread(target=replace)
    thread.start()
    deadline = time.monotonic() + LONG_S
    while thread.is_alive():
        assert time.monotonic() < deadline
        work(made, **how)
        thread.join(0.01)
    return errors[0] if errors else None


def filled(made: Scene) -> dict[str, str]:
    """Four streams, and the worker of each."""
    for number in range(4):
        made.supervisor.open(CONFIG, f"door{number}")
        made.place()
        work(made)
    return places(made)


def places(made: Scene) -> dict[str, str]:
    return {name: str(stream.worker) for name, stream in made.supervisor.streams().items() if stream.phase == "open"}


def test_workers_are_replaced_with_their_streams_configuration() -> None:
    with scene() as made:
        filled(made)
        assert roll(made, {"door1": {**CONFIG, "detect": ["cat"]}}) is None
        assert [seat.name for seat in made.supervisor.seats()] == ["1.2", "2.2"]
        assert (set(places(made)), set(places(made).values())) == ({f"door{n}" for n in range(4)}, {"1.2", "2.2"})
        streams = made.supervisor.streams()
        assert [streams[f"door{number}"].config["detect"] for number in (0, 1)] == [["person"], ["cat"]]
        assert [made.made[name][-1].state for name in ("1", "2")] == ["ended", "ended"]
        assert not any(stream.config["detect"] == ["cat"] for name, stream in streams.items() if name != "door1")


@pytest.mark.parametrize(
    ("how", "names", "reason"),
    [
        ({"fails": "1.2"}, ["1", "2"], "worker 1 cannot be replaced: no such model"),
        ({"refuses": "1.2"}, ["1", "2"], "no cats"),
        ({"fails": "2.2"}, ["2", "1.3"], "worker 2 cannot be replaced: no such model"),
    ],
)
def test_what_cannot_be_replaced_goes_on_as_it_was(how: dict[str, str], names: list[str], reason: str) -> None:
    with scene() as made:
        before = filled(made)
        error = roll(made, {name: {**CONFIG, "detect": ["cat"]} for name in before}, **how)
        assert reason in str(error)
        assert [seat.name for seat in made.supervisor.seats()] == names
        deadline = time.monotonic() + LONG_S
        while places(made).keys() != before.keys():
            assert time.monotonic() < deadline
            made.place()
            work(made)
        assert all(stream.config["detect"] == ["person"] for stream in made.supervisor.streams().values())
        assert sorted(name for worker in made.made.values() for name in worker[-1].open) == sorted(before)


@pytest.mark.parametrize(("name", "others", "following"), [("1", set(), "1.2"), ("2.3", {"2.4"}, "2.5")])
def test_generations_have_names_of_their_own(name: str, others: set[str], following: str) -> None:
    assert next_name(name, others) == following

"""Streams that move between workers that follow a script, and workers that are replaced."""

from __future__ import annotations

import pytest

from saccade.pipeline.workers.states import RefusedError
from tests.support.scripted_workers import CONFIG, LONG_S, Scene, ScriptedWorker, scene, seat_of


def moving(made: Scene) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A stream that worker 1 has, and 2 is asked to take."""
    made.supervisor.open(CONFIG, "door")
    first, second = made.worker("1"), made.worker("2")
    first.answer()
    seat_of(made, "1").draining = True
    made.place()
    return first, second


def test_a_stream_moves_when_the_other_worker_has_frames() -> None:
    with scene() as made:
        first, second = moving(made)
        (command,) = second.asked
        assert (command["held"], first.asked, list(first.open)) == (True, [], ["door"])
        second.answer()
        assert ([(one["do"], one["moves"]) for one in first.asked], second.open) == ([("close", True)], {})
        first.answer()
        assert made.lost == [("door", False)]
        assert second.asked == [
            {"do": "begin", "stream": "door", "key": command["key"], "after": [1.0, "arrival"], "events": []}
        ]
        second.answer()
        assert (made.phase("door"), list(second.open), first.open) == ("open", ["door"], {})


@pytest.mark.parametrize("dies", ["first", "second"])
def test_a_worker_that_dies_while_a_stream_moves_costs_no_stream(dies: str) -> None:
    with scene() as made:
        first, second = moving(made)
        if dies == "first":
            first.end("SIGKILL")
            assert [one["do"] for one in second.asked] == ["open", "begin"]
            second.answer()
            assert list(second.open) == ["door"]
        else:
            second.end("SIGKILL")
            assert (first.asked, list(first.open), made.phase("door")) == ([], ["door"], "open")


def test_a_stream_stays_that_the_other_worker_refuses() -> None:
    with scene() as made:
        first, second = moving(made)
        key = second.asked.pop()["key"]
        second.tell("refused", stream="door", key=key, kind="EngineError", error="no such class")
        made.place()
        assert (first.asked, second.asked) == ([], [])
        assert made.supervisor.streams()["door"].stays == "no such class"


def test_a_source_that_is_there_once_moves_with_a_gap() -> None:
    with scene() as made:
        first, second = moving(made)
        key = second.asked.pop()["key"]
        second.tell("refused", stream="door", key=key, kind="SourceError", error="busy")
        first.answer()
        made.place()
        assert [(one["do"], "held" in one) for one in second.asked] == [("open", False)]
        second.answer()
        assert list(second.open) == ["door"]


def test_another_configuration_is_tried_before_the_old_one_ends() -> None:
    with scene("1") as made:
        made.supervisor.open(CONFIG, "door")
        worker = made.worker("1")
        worker.answer()
        done = made.supervisor.restart("door", {**CONFIG, "detect": ["cat"]})
        key = worker.asked.pop()["key"]
        worker.tell("refused", stream="door", key=key, kind="EngineError", error="no cats")
        with pytest.raises(RefusedError, match="no cats"):
            done.result(LONG_S)
        assert (made.phase("door"), made.supervisor.streams()["door"].config["detect"]) == ("open", ["person"])
        done = made.supervisor.restart("door", {**CONFIG, "detect": ["dog"]})
        worker.answer()
        assert done.result(LONG_S) == "door"
        assert (list(worker.open), worker.open["door"]["config"]["detect"]) == (["door"], ["dog"])
        assert made.supervisor.streams()["door"].config["detect"] == ["dog"]

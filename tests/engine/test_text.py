"""Free text through the engine: drawn, stopped, streamed, held to choices, and ended at a deadline."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from saccade.engine import Caption, DeadlineError, Detect, Engine, EngineClosedError, EngineError, Query, Result, Task
from tests.support.engine import Held, noise

WAIT_S = 60
IMAGE = noise(30, 30)


@pytest.fixture(scope="module", params=[1, 2], ids=["blocking", "pipelined"])
def tiny(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu", depth=request.param) as engine:
        yield engine


def ask(engine: Engine, *tasks: Task) -> list[str]:
    return [text.text for text in engine.submit(IMAGE, tasks).result(WAIT_S).texts]


# Temperature, top-p, seed


def drawn(seed: int, **more: Any) -> Query:
    return Query("why?", 12, temperature=1.5, seed=seed, **more)


def test_a_seed_gives_the_same_alone_in_a_batch_at_either_depth(tiny: Engine, folder: Path) -> None:
    tasks = [drawn(1), drawn(2), drawn(2, top_p=0.4), Caption("short", 9, temperature=0.7, seed=-5), Query("why?", 9)]
    alone = [ask(tiny, task)[0] for task in tasks]
    assert ask(tiny, *tasks, Detect("x", 3, 0.0)) == alone
    assert len(set(alone)) == len(alone)
    with Engine.load(str(folder), "cpu", depth=1) as blocking:
        assert ask(blocking, *reversed(tasks)) == alone[::-1]


def test_without_a_seed_each_answer_is_drawn_anew(tiny: Engine) -> None:
    assert len(set(ask(tiny, *[Query("why?", 12, temperature=2.0)] * 6))) == 6


def test_the_least_temperature_and_the_least_top_p_are_greedy(tiny: Engine) -> None:
    greedy = ask(tiny, Query("why?", 12))
    assert ask(tiny, Query("why?", 12, temperature=1e-4, seed=3)) == greedy
    assert ask(tiny, Query("why?", 12, temperature=5.0, top_p=1e-6, seed=3)) == greedy


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"stop": ""},
        {"stop": ("a", "")},
    ],
)
def test_numbers_out_of_range_are_one_clear_line(wrong: dict[str, Any]) -> None:
    for task in (Query, Caption):
        with pytest.raises(ValueError, match=next(iter(wrong))) as caught:
            task("normal", **wrong)
        assert "\n" not in str(caught.value)


# Stop strings


def test_the_text_ends_before_the_first_stop_string(tiny: Engine) -> None:
    (whole,) = ask(tiny, drawn(1))
    assert len(whole) > 20
    for first in (0, 1, 7):
        for length in (1, 3, 9):  # `<id>` by `<id>`: some of them lie across tokens
            stop = whole[first : first + length]
            assert ask(tiny, drawn(1, stop=stop)) == [whole[: whole.index(stop)]]
    assert ask(tiny, drawn(1, stop=("never", whole[8:12], whole[4:8]))) == [whole[: whole.index(whole[4:8])]]


# Streaming


def test_pieces_are_the_text(tiny: Engine) -> None:
    for task in (drawn(4), Caption("short", 5), drawn(1, stop=">")):
        with tiny.stream(IMAGE, task) as pieces:
            got = list(pieces)
        assert "".join(got) == ask(tiny, task)[0]
        assert len(got) > 1 or task.stop
        assert list(pieces) == []


def test_pieces_come_before_the_end(tiny: Engine) -> None:
    pieces = tiny.stream(IMAGE, Query("why?", 40, temperature=1.5, seed=1))
    assert next(pieces)
    assert len(list(pieces)) > 5


def test_an_error_is_raised_by_the_stream(tiny: Engine) -> None:
    pieces = tiny.stream(IMAGE, Query("why? " * 40))
    with pytest.raises(EngineError, match="long"):
        next(pieces)
    with pytest.raises(StopIteration):
        next(pieces)


@pytest.mark.parametrize("way", ["close", "with", "forget"])
def test_a_stream_that_is_left_early_drops_the_work(folder: Path, way: str) -> None:
    with Engine.load(str(folder), "cpu", depth=2) as tiny:
        held = Held(tiny, IMAGE)
        pieces = tiny.stream(IMAGE, Query("why?", 60, temperature=1.5, seed=1))
        future = pieces._future
        if way == "close":
            pieces.close()
        elif way == "with":
            with pieces:
                pass
        else:
            del pieces
            gc.collect()
        assert future.cancelled()
        held.release()
        assert ask(tiny, Query("why?", 3))
        assert tiny._loop._scheduler.at_rest


def test_closing_wakes_a_reader_that_waits(tiny: Engine) -> None:
    held = Held(tiny, IMAGE)
    pieces = tiny.stream(IMAGE, drawn(1))
    read: list[list[str]] = []
    reader = threading.Thread(target=lambda: read.append(list(pieces)))
    reader.start()
    pieces.close()
    reader.join(WAIT_S)
    held.release()
    assert read == [[]]


def test_an_error_of_on_text_ends_its_request_only(tiny: Engine) -> None:
    def fail(piece: str) -> None:
        raise RuntimeError(f"cannot print {piece}")

    for task in (Query("why?", 9), Query("is it?", choices=CHOICES)):
        with pytest.raises(RuntimeError, match="cannot print"):
            tiny._submit(IMAGE, [task], on_text=fail).result(WAIT_S)
    assert ask(tiny, Query("why?", 3))


# Choices


CHOICES = ("yes", "no", "none", "not at all")


def test_an_answer_is_one_of_the_choices(tiny: Engine) -> None:
    alone = [ask(tiny, Query(f"is it {n}?", choices=CHOICES))[0] for n in range(8)]
    assert set(alone) <= set(CHOICES)
    together = [Query(f"is it {n}?", choices=CHOICES) for n in range(8)]
    assert ask(tiny, *together, drawn(1), Detect("x", 3, 0.0)) == [*alone, *ask(tiny, drawn(1))]


def test_choices_can_be_drawn_and_every_one_can_come(tiny: Engine) -> None:
    tasks = [Query("is it?", choices=CHOICES, temperature=30.0, seed=seed) for seed in range(60)]
    answers = ask(tiny, *tasks)
    assert set(Counter(answers)) == set(CHOICES)
    assert ask(tiny, *tasks[:7]) == answers[:7]


def test_a_choice_needs_no_tokens_granted_and_streams_whole(tiny: Engine) -> None:
    task = Query("is it?", 0, choices=CHOICES, stop="o")
    assert list(tiny.stream(IMAGE, task)) == ask(tiny, task)
    assert ask(tiny, task)[0] in CHOICES
    assert ask(tiny, Query("is it?", choices=["only this"])) == ["only this"]  # type: ignore[arg-type]


@pytest.mark.parametrize("choices", ["yes", ("yes", "")])
def test_choices_that_are_none_are_one_clear_line(choices: Any) -> None:
    with pytest.raises(ValueError, match="choice"):
        Query("is it?", choices=choices)


@pytest.mark.parametrize(("choices", "message"), [(("漢字",), "no token"), (("x" * 200, "y"), "long")])
def test_choices_without_tokens_or_room_are_one_clear_line(
    tiny: Engine, choices: tuple[str, ...], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        ask(tiny, Query("is it?", choices=choices))
    assert len(str(caught.value).splitlines()) == 1


# Deadlines


def fails_late(future: Future[Result], message: str) -> None:
    with pytest.raises(DeadlineError, match=message) as caught:
        future.result(WAIT_S)
    assert len(str(caught.value).splitlines()) == 1


def test_a_deadline_before_the_start(tiny: Engine) -> None:
    held = Held(tiny, IMAGE)
    late, kept = (tiny.submit(IMAGE, [Query("why?", 3)], deadline_s=s) for s in (0.01, WAIT_S))
    time.sleep(0.05)
    held.release()
    fails_late(late, "before the prefill")
    assert kept.result(WAIT_S).texts
    fails_late(tiny.submit(IMAGE, [Query("why?", 3)], deadline_s=-1.0), "before the prefill")


def test_a_deadline_while_it_is_answered(tiny: Engine) -> None:
    """The reader of the first piece holds the loop until the deadline of its own answer has passed."""
    begun = threading.Event()
    started = time.monotonic()

    def hold(_: str) -> None:
        begun.set()
        time.sleep(max(0.0, started + 0.6 - time.monotonic()))

    late = tiny._submit(IMAGE, [Query("why?", 60, temperature=1.5, seed=1)], 1, 0.5, on_text=hold)
    fails_late(late, "during the answer|before the prefill")
    assert ask(tiny, Query("why?", 3))
    deadline = time.monotonic() + WAIT_S
    while not tiny._loop._scheduler.at_rest:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_windows_of_a_late_image_are_dropped(tiny: Engine) -> None:
    held = Held(tiny, IMAGE)
    late = tiny.submit(IMAGE, [Detect("x", 3, 0.0)], 3, deadline_s=0.01)
    time.sleep(0.05)
    held.release()
    fails_late(late, "before")
    assert ask(tiny, Query("why?", 3))
    assert tiny._loop._scheduler.waiting == 0


def test_a_deadline_that_is_no_number_is_refused(tiny: Engine) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        tiny.submit(IMAGE, [Query("why?", 3)], deadline_s=float("nan"))


def test_closing_fails_what_a_stream_waits_for(folder: Path) -> None:
    engine = Engine.load(str(folder), "cpu")
    held = Held(engine, IMAGE)
    pieces = engine.stream(IMAGE, Query("why?", 5))
    closing = threading.Thread(target=engine.close)
    closing.start()
    time.sleep(0.05)
    held.release()
    closing.join(WAIT_S)
    with pytest.raises(EngineClosedError):
        list(pieces)

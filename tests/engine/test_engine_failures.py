"""What may go wrong in or around an engine ends one request, with one clear error, and nothing else."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.engine import (
    Caption,
    DeadlineError,
    Detect,
    Engine,
    EngineClosedError,
    EngineError,
    Point,
    Query,
    Result,
    Task,
)
from saccade.engine.config import EngineConfig
from saccade.engine.errors import RequestTooLargeError
from saccade.engine.model_loader import open_model
from saccade.engine.models.protocol import ModelLimits, Phase, Prompts
from saccade.engine.results import ResultPart, Text
from saccade.engine.tasks.task import Answers, OnText, OutputState, Sampled, TokenRule
from saccade.engine.tasks.text_output import TextOutput
from tests.support.engine import Held, noise

WAIT_S = 60
IMAGE = noise(16, 16)
GOOD = Detect("x", 2, 0.0)


def answered(engine: Engine) -> bool:
    return len(engine.submit(IMAGE, [GOOD]).result(WAIT_S).detections) == 2


def at_rest(engine: Engine) -> bool:
    latest = time.monotonic() + WAIT_S
    while not engine._loop._scheduler.at_rest and time.monotonic() < latest:
        time.sleep(0.002)
    return engine._loop._scheduler.at_rest


# Tasks that are none


@pytest.mark.parametrize(
    "make",
    [
        lambda: Detect("person", 2.5),  # type: ignore[arg-type]
        lambda: Detect("person", -1),
        lambda: Detect("person", True),
        lambda: Detect("person", math.inf),  # type: ignore[arg-type]
        lambda: Detect("person", conf=math.nan),
        lambda: Detect("person", conf=math.inf),
        lambda: Detect(""),
        lambda: Point("person", conf=-math.inf),
        lambda: Point(None),  # type: ignore[arg-type]
        lambda: Query("?", 3.0),  # type: ignore[arg-type]
        lambda: Query("?", math.nan),  # type: ignore[arg-type]
        lambda: Query("?", seed=1.5),  # type: ignore[arg-type]
        lambda: Query("?", top_p=math.nan),
        lambda: Caption("normal", math.inf),  # type: ignore[arg-type]
        lambda: Caption("brief"),  # type: ignore[arg-type]
        lambda: Caption(temperature=math.inf),
    ],
)
def test_a_task_refuses_arguments_out_of_range(make: Callable[[], Task]) -> None:
    with pytest.raises(ValueError, match="got") as caught:
        make()
    assert "\n" not in str(caught.value)


# Tasks and output states that raise


class BrokenError(Exception):
    pass


class BrokenOutput(TextOutput):
    """Raises in one of its parts, the first or a later time that it is called."""

    __slots__ = ("_calls", "_most", "_part")

    def __init__(self, part: str, calls: int) -> None:
        self._part, self._calls = part, calls
        super().__init__(-1, 6, 20)

    @property
    def steps(self) -> int:
        self._fail("steps")
        return self._most

    @steps.setter
    def steps(self, value: int) -> None:
        self._most = value

    def next_phase(self) -> Phase | None:
        self._fail("next_phase")
        return super().next_phase()

    def rule(self) -> TokenRule:
        self._fail("rule")
        return super().rule()

    def commit(self, sampled: Sampled) -> bool:
        self._fail("commit")
        return super().commit(sampled)

    def finish(self) -> None:
        self._fail("finish")

    def _fail(self, part: str) -> None:
        if part == self._part:
            self._calls -= 1
            if self._calls < 0:
                raise BrokenError(part)


@dataclass(frozen=True)
class BrokenTask(Task):
    """Raises in one part of its own or of its output state."""

    skill = "query"
    part: str
    calls: int = 0

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        return cls(text)

    @property
    def asked(self) -> str:
        return "?"

    @property
    def empty(self) -> bool:
        return False

    def prompt(self, prompts: Prompts) -> list[int]:
        if self.part == "prompt":
            raise BrokenError("prompt")
        return prompts.query("?")

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        if self.part == "output":
            raise BrokenError("output")
        return BrokenOutput(self.part, self.calls)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        if self.part == "collect":
            raise BrokenError("collect")
        return [Text("?", "")]


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "part", ["prompt", "output", "steps", "next_phase", "rule", "commit", "finish", "collect", "none"]
)
def test_a_task_that_raises_ends_its_own_request_only(tiny: Engine, part: str, calls: int) -> None:
    held = Held(tiny, IMAGE)
    before = tiny.submit(IMAGE, [GOOD, Query("?", 3)])
    error: BaseException | None
    try:
        broken = tiny.submit(IMAGE, [BrokenTask(part, calls), Query("?", 9)])
    except BrokenError as raised:
        error = raised
        held.release()
    else:
        held.release()
        error = broken.exception(WAIT_S)
    reached = part != "none" and (part != "finish" or calls == 0)  # `finish` is called once
    assert isinstance(error, BrokenError) == reached
    result = before.result(WAIT_S)
    assert (len(result.detections), len(result.texts)) == (2, 1)
    assert answered(tiny)
    assert at_rest(tiny)


def test_one_window_that_is_refused_ends_its_image_only(folder: Path) -> None:
    loaded, info, vocabulary = open_model(str(folder), "cpu", None)
    with Engine(loaded, info, vocabulary, EngineConfig(n_pages=8)) as small:
        for _ in range(20):  # the first window is refused while the others are on their way
            future = small.submit(IMAGE, [Detect("x", 20, 0.0)] * 3, tiles=3)
            with pytest.raises(RequestTooLargeError, match="send fewer or shorter prompts"):
                future.result(WAIT_S)
        assert issubclass(RequestTooLargeError, EngineError)
        assert answered(small)


# Futures


def test_waiting_for_a_cancelled_future_returns_at_once(tiny: Engine) -> None:
    held = Held(tiny, IMAGE)
    cancelled, kept = (tiny.submit(IMAGE, [GOOD]) for _ in range(2))
    seen: list[Future[Result]] = []
    cancelled.add_done_callback(seen.append)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: next(as_completed([cancelled, kept], WAIT_S)))
        assert cancelled.cancel()
        assert waiting.result(WAIT_S) is cancelled
    done, others = wait([cancelled], WAIT_S)
    assert (done, others) == ({cancelled}, set())
    held.release()
    assert len(kept.result(WAIT_S).detections) == 2
    assert wait([cancelled, kept], WAIT_S).not_done == set()
    assert at_rest(tiny)
    assert seen == [cancelled]


def test_futures_that_are_kept_keep_no_crops(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, crops = tiny._maker.cut, list[weakref.ref[NDArray[np.uint8]]]()

    def remember(image: Any, region: Any) -> Any:
        prepared = prepare(image, region)
        crops.append(weakref.ref(prepared.pixels))
        return prepared

    monkeypatch.setattr(tiny, "_maker", replace(tiny._maker, cut=remember))
    held = Held(tiny, IMAGE)
    tasks: list[Task] = [GOOD, Query("?", 3)]
    futures = [tiny.submit(IMAGE, tasks) for _ in range(3)]
    futures += [tiny.submit(IMAGE, tasks, deadline_s=1e-3), tiny.submit(IMAGE, tasks, tiles=2, deadline_s=1e-3)]
    futures += [tiny.submit(IMAGE, [BrokenTask(part)]) for part in ("rule", "commit", "collect")]
    images = [noise(16, 16, seed) for seed in (1, 2)]
    refused = [weakref.ref(image) for image in images]
    futures += [tiny.submit(images[0], [Query("why? " * 40)]), tiny.submit(images[1], tasks, deadline_s=-1.0)]
    images.clear()
    futures[0].cancel()
    time.sleep(0.01)
    held.release()
    wait(futures, WAIT_S)
    assert answered(tiny)
    assert at_rest(tiny)
    tiny.submit(IMAGE, []).result(WAIT_S)
    gc.collect()
    assert len(crops) > len(futures)
    assert {ref() is None for ref in (*crops, *refused)} == {True}
    assert sum(future.cancelled() or future.exception() is not None for future in futures) == 8


def test_a_closed_engine_raises_a_new_error_each_time(folder: Path) -> None:
    engine = Engine.load(str(folder), "cpu")
    engine.close()
    lengths, errors, images = set[int](), set[int](), list[weakref.ref[NDArray[np.uint8]]]()
    kept: list[EngineClosedError] = []
    for number in range(100):
        image = noise(16, 16, number)
        images.append(weakref.ref(image))
        try:
            engine.submit(image, [GOOD])
        except EngineClosedError as error:
            lengths.add(len(traceback.extract_tb(error.__traceback__)))
            if number % 10 == 0:
                kept.append(error.with_traceback(None))
            errors.add(id(error.__cause__ or error.__context__))
    del image
    assert len(lengths) == 1
    assert errors == {id(None)}
    assert len({id(error) for error in kept}) == 10
    assert {ref() for ref in images} == {None}


# Callbacks


def test_a_callback_may_use_the_engine(tiny: Engine) -> None:
    found: list[int] = []
    texts: list[str] = []
    done = threading.Event()

    def again(_: Future[Result]) -> None:
        found.append(len(tiny.detect(IMAGE, "x", 2, 0.0)))
        texts.append("".join(tiny.stream(IMAGE, Query("?", 5))))
        done.set()

    held = Held(tiny, IMAGE)
    tiny.submit(IMAGE, [GOOD]).add_done_callback(again)
    held.release()
    assert done.wait(WAIT_S)
    assert (found, texts) == ([2], [tiny.query(IMAGE, "?", 5).text])


@pytest.mark.parametrize("leave", [sys.exit, lambda: 1 / 0])
def test_a_callback_that_raises_ends_nothing(tiny: Engine, leave: Callable[[], object]) -> None:
    held = Held(tiny, IMAGE)
    first, second = (tiny.submit(IMAGE, [GOOD]) for _ in range(2))
    seen = threading.Event()
    first.add_done_callback(lambda _: leave())
    second.add_done_callback(lambda _: seen.set())
    held.release()
    assert seen.wait(WAIT_S)
    assert answered(tiny)


def test_waiting_in_the_engine_s_own_thread_is_refused(tiny: Engine) -> None:
    errors: list[str] = []
    done = threading.Event()

    def wait(_: Future[Result]) -> None:
        for waits in (
            lambda: tiny.submit(IMAGE, [GOOD]).result(WAIT_S),
            lambda: tiny.submit(IMAGE, [GOOD]).exception(),
            lambda: tiny.stream(IMAGE, Query("?", 5)).answer,
            lambda: next(tiny.stream(IMAGE, Query("?", 5))),
            lambda: tiny.encode(IMAGE),
            lambda: tiny.run_idle(lambda _: None),
        ):
            try:
                waits()
            except EngineError as error:
                errors.append(str(error))
        done.set()

    held = Held(tiny, IMAGE)
    first = tiny.submit(IMAGE, [GOOD])
    first.call_when_done(wait)
    held.release()
    assert done.wait(WAIT_S)
    assert len(errors) == 6
    assert all("the engine's own thread" in error for error in errors)
    assert len(first.result().detections) == 2
    assert answered(tiny)


def test_callbacks_run_for_what_a_closing_engine_finishes(folder: Path) -> None:
    engine = Engine.load(str(folder), "cpu", depth=2)
    futures = [engine.submit(IMAGE, [GOOD, Query("?", 20)]) for _ in range(4)]
    seen = [threading.Event() for _ in futures]
    for future, event in zip(futures, seen, strict=True):
        future.add_done_callback(lambda _, event=event: event.set())
    engine.close()
    assert all(event.wait(WAIT_S) for event in seen)


# Processes and threads


def test_benchmarks_run_only_while_the_engine_is_idle(tiny: Engine) -> None:
    called: list[object] = []

    def timed(executor: object) -> float:
        called.append(executor)
        return 0.5

    held = Held(tiny, IMAGE)
    waiting = tiny.submit(IMAGE, [GOOD])
    with ThreadPoolExecutor(1) as pool:
        timing = pool.submit(tiny.run_idle, timed)
        latest = time.monotonic() + WAIT_S
        while len(tiny._loop._inbox) < 2 and time.monotonic() < latest:
            time.sleep(0.002)
        held.release()
        with pytest.raises(EngineError, match="idle"):
            timing.result(WAIT_S)
    assert called == []
    waiting.result(WAIT_S)
    assert at_rest(tiny)
    assert tiny.run_idle(timed) == 0.5
    with (
        tiny.encode(IMAGE),
        pytest.raises(EngineError, match="stores no encoded images"),
    ):  # whose pages it may write over
        tiny.run_idle(timed)
    assert called == [tiny._executor]
    assert tiny.run_idle(timed) == 0.5


# Deadlines of large images


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_large_image_that_cannot_make_it_is_not_cut(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, tiles: int
) -> None:
    cut: list[int] = []
    prepare = tiny._maker.cut
    monkeypatch.setattr(
        tiny, "_maker", replace(tiny._maker, cut=lambda image, region: cut.append(image.size) or prepare(image, region))
    )
    large = np.zeros((6000, 8000, 3), np.uint8)
    future = tiny.submit(large, [GOOD], tiles, deadline_s=0.05)
    assert future.done()
    with pytest.raises(DeadlineError, match=r"cropping this image takes .* s, which exceeds the deadline"):
        future.result()
    assert cut == []
    assert tiny.counters()["requests_failed_total"] == 1
    assert answered(tiny)

"""How long an engine, its images and what its callers give it live: no longer than something still needs them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from saccade.engine import Caption, Detect, Engine, Point, TextStream
from saccade.engine.config import EngineConfig
from saccade.engine.models.protocol import ModelLimits
from saccade.engine.results import ResultPart
from saccade.engine.runtime.streams import Watcher
from saccade.engine.tasks.task import Answers
from tests.support.engine import Held, noise

WAIT_S = 15
IMAGE = noise(16, 16)
GOOD = Detect("x", 2, 0.0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Frame:
    """What a caller's callback may hold."""


def gone(ref: weakref.ref[object]) -> bool:
    latest = time.monotonic() + WAIT_S
    while ref() is not None and time.monotonic() < latest:
        time.sleep(0.002)
    return ref() is None


@pytest.mark.usefixtures("no_collector")
def test_what_a_callback_holds_goes_with_its_future(tiny: Engine) -> None:
    frame, called = Frame(), threading.Event()
    future = tiny.submit(IMAGE, [GOOD])
    held = weakref.ref(frame)

    def callback(_: object, frame: Frame = frame) -> None:
        called.set()

    future.add_done_callback(callback)
    assert called.wait(WAIT_S)
    del future, callback, frame
    assert gone(held)


@dataclass(slots=True, frozen=True)
class LeavingTask(Detect):
    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        sys.exit("a task of another package")


@pytest.mark.usefixtures("no_collector")
def test_what_is_answered_is_left_to_no_collector(tiny: Engine) -> None:
    for _ in range(20):
        tiny.submit(IMAGE, [GOOD, Point("x", 2, 0.0)], tiles=2).result(WAIT_S)
    assert gc.collect() < 20


def test_a_task_that_calls_exit_ends_its_own_request_only(tiny: Engine) -> None:
    future = tiny.submit(IMAGE, [LeavingTask("x", 2, 0.0)])
    assert wait([future], WAIT_S).done
    assert isinstance(future.exception(), SystemExit)
    assert len(tiny.submit(IMAGE, [GOOD]).result(WAIT_S).detections) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_action_that_raises_leaves_no_request_waiting(folder: Path) -> None:
    engine = Engine.load(str(folder), "cpu")
    loop = engine._loop

    def leave() -> None:
        raise SystemExit

    with loop._wake:  # so that both arrive together
        loop._post(leave)
        future = engine.submit(IMAGE, [GOOD])
    assert isinstance(future.exception(WAIT_S), SystemExit)
    engine.close()


def test_a_stream_collected_inside_counters_does_not_deadlock(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = tiny._executor.streams["compute"]
    watch = compute.watch

    def collect(watcher: Watcher | None) -> None:
        gc.collect()  # as an allocation may at any moment
        watch(watcher)

    monkeypatch.setattr(compute, "watch", collect)
    held = Held(tiny, IMAGE)
    try:
        box: list[object] = [tiny.stream(IMAGE, Caption())]
        box.append(box)
        del box
        counted = threading.Thread(target=tiny.counters, daemon=True)
        counted.start()
        counted.join(WAIT_S)
        assert not counted.is_alive()
    finally:
        held.release()


def test_a_forked_child_drops_a_stream_without_the_loop(tiny: Engine) -> None:
    held = Held(tiny, IMAGE)
    try:
        stream = tiny.stream(IMAGE, Caption())
        with tiny._loop._wake:
            forked = threading.Thread(target=drop_in_child, args=(stream,), daemon=True)  # in which it is held for ever
            forked.start()
            forked.join(WAIT_S)
            assert not forked.is_alive()
        stream.close()
    finally:
        held.release()


def drop_in_child(stream: TextStream) -> None:
    child = os.fork()
    if not child:
        signal.alarm(10)
        stream.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        threading.Event().wait()


@pytest.mark.parametrize("name", ["depth", "n_pages", "images_per_prefill", "max_sequences", "draft_misses"])
@pytest.mark.parametrize("value", [0, 1.5, "4"])
def test_a_configuration_refuses_values_out_of_range(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_no_more_images_in_a_prefill_than_there_is_room_for(folder: Path) -> None:
    with pytest.raises(ValueError, match="at most 64"):
        EngineConfig(images_per_prefill=65)
    with pytest.raises(ValueError, match="depth"):
        Engine.load(str(folder), "cpu", depth=0)

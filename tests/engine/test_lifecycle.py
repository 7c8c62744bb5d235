"""How requests and engines end: cancelled, refused, closed, failed, and beside each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from saccade.engine import (
    Detect,
    Engine,
    EngineClosedError,
    EngineError,
    Point,
    Query,
    Result,
)
from saccade.engine.config import EngineConfig
from saccade.engine.errors import RequestTooLargeError
from saccade.engine.model_loader import open_model
from tests.support.engine import Held, noise, same

WAIT_S = 60  # far beyond what any of these needs; only so that a deadlock fails instead of hanging


@pytest.fixture
def tiny(folder: Path) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu") as engine:
        yield engine


def test_cancelling_before_the_start_drops_the_work(tiny: Engine) -> None:
    held = Held(tiny, noise(16, 16))
    dropped, kept = (tiny.submit(noise(16, 16, seed), [Detect("x", 2, 0.0)]) for seed in (1, 2))
    assert dropped.cancel()
    held.release()
    assert len(kept.result(WAIT_S).detections) == 2
    with pytest.raises(CancelledError):
        dropped.result(WAIT_S)
    assert not held.first.cancel()


def test_closing_fails_what_has_not_begun_and_ends_the_thread(folder: Path) -> None:
    engine = Engine.load(str(folder), "cpu")
    held = Held(engine, noise(16, 16))
    waiting = [engine.submit(noise(16, 16), [Detect("x", 2, 0.0)]) for _ in range(5)]
    assert waiting[3].cancel()
    closing = threading.Thread(target=engine.close)
    closing.start()
    refused = threading.Event()
    while not refused.is_set():  # once nothing is taken any more, the engine is closing
        try:
            waiting.append(engine.submit(noise(16, 16), []))
        except EngineClosedError:
            refused.set()
    held.release()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert held.first.exception(WAIT_S) is None
    for i, future in enumerate(waiting):
        if i == 3:
            assert future.cancelled()
        else:
            assert isinstance(future.exception(WAIT_S), EngineClosedError)


def test_a_closed_engine_refuses_and_may_be_closed_again(folder: Path) -> None:
    with Engine.load(str(folder), "cpu") as engine:
        assert engine.detect(noise(16, 16), "x", 1, 0.0)
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit(noise(16, 16), [Detect("x")])
    with pytest.raises(EngineClosedError, match="closed"):
        engine.detect(noise(16, 16), "x")


def test_many_may_close_at_once(folder: Path) -> None:
    engine = Engine.load(str(folder), "cpu")
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(engine.close) for _ in range(8)]:
            done.result(WAIT_S)


def test_an_error_belongs_to_its_future_only(tiny: Engine) -> None:
    image = noise(16, 16)
    before = tiny.detect(image, "x", 2, 0.0)
    broken = [tiny.submit(image, [Detect(label, 2, 0.0)]) for label in ("漢字", "x" * 500)]
    after = tiny.submit(image, [Detect("x", 2, 0.0)])
    for future in broken:
        assert future.exception(WAIT_S) is not None
    assert after.result(WAIT_S).detections == before


def test_what_can_never_fit_fails_alone(folder: Path) -> None:
    loaded, info, vocabulary = open_model(str(folder), "cpu", None)
    with Engine(loaded, info, vocabulary, EngineConfig(n_pages=8)) as small:
        future = small.submit(noise(16, 16), [Detect("x", 9, 0.0)] * 9)
        with pytest.raises(RequestTooLargeError, match="send fewer or shorter prompts") as caught:
            future.result(WAIT_S)
        assert isinstance(caught.value, EngineError)
        assert len(small.detect(noise(16, 16), "x", 2, 0.0)) == 2


def test_an_error_of_a_callback_does_not_stop_the_thread(tiny: Engine) -> None:
    def fail(_: Future[Result]) -> None:
        raise RuntimeError("a caller's own mistake")

    held = Held(tiny, noise(16, 16))
    tiny.submit(noise(16, 16), []).add_done_callback(fail)
    after = tiny.submit(noise(16, 16), [Detect("x", 1, 0.0)])
    held.release()
    assert len(after.result(WAIT_S).detections) == 1


def test_many_threads_each_get_their_own_answer(tiny: Engine) -> None:
    images = [noise(12 + 3 * i, 40 - 3 * i, i) for i in range(6)]
    tasks = [Detect("x", 2, 0.0), Point("y", 1, 0.0), Query("why?", 2)]
    wanted = [tiny.submit(image, tasks).result(WAIT_S) for image in images]

    def ask(worker: int) -> list[bool]:
        order = np.random.default_rng(worker).permutation(len(images))
        futures = [(i, tiny.submit(images[i], tasks)) for i in order]
        return [same(future.result(WAIT_S), wanted[i]) for i, future in futures]

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(ask, range(8)):
            assert all(answers)


def test_results_come_in_the_order_of_submission(tiny: Engine) -> None:
    order: list[int] = []
    held = Held(tiny, noise(16, 16))
    futures = [tiny.submit(noise(16, 16), []) for _ in range(10)]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: order.append(i))
    held.release()
    for future in futures:
        future.result(WAIT_S)
    assert order == sorted(order)

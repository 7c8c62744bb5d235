"""What becomes of an engine that is forked away or dropped without being closed."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

from saccade.engine import (
    Detect,
    Engine,
    EngineError,
    Query,
)
from tests.support.engine import noise

WAIT_S = 60
IMAGE = noise(16, 16)
GOOD = Detect("x", 2, 0.0)


def answered(engine: Engine) -> bool:
    return len(engine.submit(IMAGE, [GOOD]).result(WAIT_S).detections) == 2


def test_a_forked_child_is_refused_with_an_error(tiny: Engine) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            refused = 0
            for ask in (lambda: tiny.submit(IMAGE, [GOOD]), lambda: tiny.stream(IMAGE, Query("?"))):
                try:
                    ask()
                except EngineError as error:
                    refused += "fork" in str(error)
            tiny.close()  # of the parent's threads: nothing
            code = 0 if refused == 2 else 2
        finally:
            os._exit(code)
    latest = time.monotonic() + WAIT_S
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < latest:
        time.sleep(0.01)
    if status[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert (status[0], os.waitstatus_to_exitcode(status[1])) == (child, 0)
    assert answered(tiny)


def test_an_engine_that_is_dropped_ends_its_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    engine = Engine.load(str(folder), "cpu")
    called = threading.Event()
    future = engine.submit(IMAGE, [GOOD])
    future.add_done_callback(lambda _: called.set())
    future.result(WAIT_S)
    assert called.wait(WAIT_S)
    mine = set(threading.enumerate()) - before
    assert {thread.name for thread in mine} >= {"saccade-engine"}
    del engine
    gc.collect()
    for thread in mine:
        thread.join(WAIT_S)
    assert [thread.name for thread in mine if thread.is_alive()] == []
    assert len(future.result().detections) == 2


def test_an_engine_that_is_dropped_finishes_what_it_began(folder: Path) -> None:
    futures = (
        Engine.load(str(folder), "cpu").submit(IMAGE, [GOOD]),
        Engine.load(str(folder), "cpu").stream(IMAGE, Query("?", 5)),
    )
    gc.collect()
    assert len(futures[0].result(WAIT_S).detections) == 2
    assert "".join(futures[1])

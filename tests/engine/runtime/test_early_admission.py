"""Images are prepared while a prefill runs, by real threads, on an engine whose model only takes time."""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from saccade.engine import Detect, SupersededError
from saccade.engine.core.step import StepKind
from tests.support.engine.timed_executor import timed_engine

WAIT_S = 60
IMAGE = np.zeros((8, 8, 3), np.uint8)


def slow_image() -> NDArray[np.uint8]:
    time.sleep(0.01)
    return IMAGE


def test_frames_are_admitted_while_a_prefill_runs() -> None:
    with timed_engine(lambda kind, n: 0.03 if kind is StepKind.PREFILL else 1e-3, objects=1) as engine:
        scheduler, early = engine._loop._scheduler, []
        admit = scheduler.admit_early

        def counted() -> None:
            waiting = scheduler.waiting
            admit()
            early.append(waiting - scheduler.waiting)

        scheduler.admit_early = counted  # type: ignore[method-assign]
        futures = []
        for _ in range(25):
            futures += [engine.submit(slow_image, [Detect("person")], stream=key) for key in range(6)]
            time.sleep(0.02)
        errors = [future.exception(WAIT_S) for future in futures]
    assert {type(error) for error in errors} <= {type(None), SupersededError}
    assert all(len(future.result().detections) == 1 for future in futures[-6:])
    assert sum(early) > 6


def test_a_full_prefill_is_not_held_back_for_newer_frames() -> None:
    with timed_engine(lambda kind, n: 4e-3, objects=0) as engine:
        scheduler, cycle, lacking = engine._loop._scheduler, engine._loop._cycle, list[int]()
        pause = cycle._pause

        def counted(until: float, count: float) -> None:
            if math.isfinite(until):
                lacking.append(scheduler.lacking)
            pause(until, count)

        cycle._pause = counted  # type: ignore[method-assign]
        futures = [engine.submit(IMAGE, [Detect("person")]) for _ in range(40 * engine.config.images_per_prefill)]
        for future in futures:
            assert not future.result(WAIT_S).detections.boxes
        assert all(missing > 0 for missing in lacking)
        assert len(lacking) < 20, "prefills follow each other from the 14th on, and are full but for the last"

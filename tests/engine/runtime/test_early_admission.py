"""Images are prepared while a prefill runs, by real threads, on an engine whose model only takes time."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from saccade.engine import Detect, SupersededError
from saccade.engine.core.request import StepKind
from tests.support.engine.timed_executor import timed_engine

WAIT_S = 60
IMAGE = np.zeros((8, 8, 3), np.uint8)


def slow_image() -> NDArray[np.uint8]:
    time.sleep(0.01)
    return IMAGE


def test_frames_are_admitted_while_a_prefill_runs() -> None:
    with timed_engine(lambda kind, n: 0.03 if kind is StepKind.PREFILL else 1e-3, objects=1) as engine:
        scheduler, taken = engine._loop._scheduler, []
        admit = scheduler.admit

        def counted(*, early: bool = False) -> None:
            waiting = scheduler.waiting
            admit(early=early)
            if early:
                taken.append(waiting - scheduler.waiting)

        scheduler.admit = counted  # type: ignore[method-assign]
        futures = []
        for _ in range(25):
            futures += [engine.submit(slow_image, [Detect("person")], stream=key) for key in range(6)]
            time.sleep(0.02)
        errors = [future.exception(WAIT_S) for future in futures]
    assert {type(error) for error in errors} <= {type(None), SupersededError}
    assert all(len(future.result().detections) == 1 for future in futures[-6:])
    assert sum(taken) > 6

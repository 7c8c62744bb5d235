"""Drafts through the real loop, with arithmetic for a model; `test_random_schedules` has them among all else."""

from __future__ import annotations

from saccade.engine.tasks.task import Sampling
from tests.engine.runtime.test_random_schedules import Arrival, Asked, Workload, check, run
from tests.support.engine.stand_in import CONTENTS


def test_drafts_of_the_same_answers_are_right() -> None:
    """Images repeat after `CONTENTS`: of answers to the same prompt, one in so many is the one before it."""
    ask = Asked("boxes", (7, 8), 5, 0.1, Sampling(), 9), Asked("text", (7,), 5, 0.1, Sampling(), 9)
    work = Workload(tuple(Arrival(ask, 0, 2e-3, None, None, f"{n % CONTENTS}") for n in range(24)), 60, 8, 1, 1)
    for depth in (1, 2):
        outcome = run(work, depth, 0)
        check(work, outcome)
        assert outcome.errors == [None] * 24
        assert outcome.drafts.accepted > 0.7 * outcome.drafts.drafted > 0
        assert outcome.drafts.saved > 50

"""What requests hold while they wait, and that it is given back however they end."""

from __future__ import annotations

import pytest

from saccade.engine.core.admission import PagePool
from saccade.engine.core.request import KeptPrefix, Request, Sequence, State
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.tasks.text_output import TextOutput
from tests.support.engine.requests import request_of, sizes

PAGE, PREFIX = 4, 10


class EndedError(Exception):
    pass


@pytest.mark.parametrize("how", ["replaced", "cancelled", "late", "closed"])
def test_a_frame_that_ends_planned_gives_back_what_it_held(how: str) -> None:
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 1, 2), PagePool(40), PREFIX, clock=lambda: 0.0)
    kept, errors = KeptPrefix(), list[BaseException | None]()

    def frame() -> Request[int]:
        sequences = [Sequence[int]((1,), TextOutput(-1, 2, 20))]
        return request_of(None, sequences, lambda _, error: errors.append(error), 10.0, frame=True, reads=kept)

    scheduler.submit(request_of(0, [], keeps=kept))
    scheduler.submit(request_of(1, [Sequence((1,), TextOutput(-1, 2, 20))]))
    step = scheduler.next_step()
    assert step is not None
    scheduler.commit(step, [(1.0, 0.0, 0.0)])
    scheduler.submit(first := frame(), "door")
    scheduler.admit()  # it waits for the one batch slot
    assert scheduler.admission.requests == [first]
    assert first.state is State.PLANNED
    if how == "replaced":
        scheduler.submit(frame(), "door")
    elif how == "cancelled":
        scheduler.cancel(first, EndedError())
    elif how == "late":
        scheduler.expire(10.0)
    assert len(errors) == (how != "closed")
    scheduler.cancel_all(EndedError())
    scheduler.release_prefix(kept)
    assert scheduler.at_rest

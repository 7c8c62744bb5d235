"""What requests hold while they wait, and that it is given back however they end."""

from __future__ import annotations

import pytest

from saccade.engine.core.kv_pages import PagePool
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import ImageRequest, KeptPrefix, Sequence
from saccade.engine.tasks.text_output import TextOutput

PAGE, PREFIX = 4, 10


class EndedError(Exception):
    pass


class Frame:
    """A submission about a kept prefix."""

    deadline = 10.0

    def __init__(self, kept: KeptPrefix) -> None:
        self._kept = kept
        self.error: BaseException | None = None

    def plan(self) -> list[ImageRequest[int]]:
        sequences = [Sequence((1,), TextOutput(-1, 2, 20))]
        return [ImageRequest(None, sequences, lambda request, error: None, reads=self._kept)]

    def end(self, error: BaseException) -> None:
        self.error = error


@pytest.mark.parametrize("how", ["replaced", "withdrawn", "late", "closed"])
def test_a_frame_that_ends_planned_gives_back_what_it_held(how: str) -> None:
    scheduler: Scheduler[int] = Scheduler(PagePool(40), PAGE, PREFIX, 1, 2, clock=lambda: 0.0)
    kept = KeptPrefix()
    scheduler.add(ImageRequest(0, [], lambda request, error: None, keeps=kept))
    scheduler.add(ImageRequest(1, [Sequence((1,), TextOutput(-1, 2, 20))], lambda request, error: None))
    step = scheduler.next_step()
    assert step is not None
    scheduler.commit(step, [(1.0, 0.0, 0.0)])
    scheduler.submit(frame := Frame(kept), "door")
    scheduler.admit()  # it waits for the one batch slot
    assert len(frame_parts := scheduler.admission.requests) == 1
    assert frame_parts[0].measured
    if how == "replaced":
        scheduler.submit(Frame(kept), "door")
    elif how == "withdrawn":
        scheduler.withdraw(frame, EndedError())
    elif how == "late":
        scheduler.expire(10.0)
    assert (frame.error is None) == (how == "closed")
    scheduler.cancel_all(EndedError())
    scheduler.release_prefix(kept)
    assert scheduler.at_rest

"""Random schedules through the real loop, scheduler and streams, at both depths, with arithmetic for a model.

`SACCADE_SCHEDULES=10000` tries as many schedules instead of a few hundred.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from itertools import count
from threading import Event
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from saccade.engine.core.admission import PagePool, Resources
from saccade.engine.core.request import Request, Sequence, State
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.speculative import Speculation
from saccade.engine.errors import DeadlineError, EngineClosedError, RequestTooLargeError
from saccade.engine.models.protocol import Adapter, ReasoningTokens
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.tasks.objects import BoxesOutput, ObjectsOutput, PointsOutput
from saccade.engine.tasks.task import OutputState, Sampling
from saccade.engine.tasks.text_output import ChoiceOutput, ReasoningOutput, TextOutput
from tests.support.engine.requests import request_of, sizes
from tests.support.engine.stand_in import COORD, EOS, FaultError, Faulty, StandIn, ViolationError, alone

PAGE, PREFIX, ROOM = 4, 10, 24
WAIT_S = 30.0
ADAPTERS = [None, *(Adapter(name, {}) for name in "abc")]
OPTIONS = [
    {tokens: str(tokens) for tokens in options}
    for options in (((1,), (2,)), ((1,), (1, 2), (3, 4, 5)), ((2, 2, 2, 2), (2, 2, 1), (5,)))
]


@dataclass(frozen=True)
class Asked:
    """A prompt, and everything that makes its output."""

    kind: str
    prompt: tuple[int, ...]
    length: int
    conf: float
    sampling: Sampling
    stop: int

    def output(self) -> OutputState:
        if self.kind == "boxes":
            return BoxesOutput(self.length, self.conf, ROOM)
        if self.kind == "points":
            return PointsOutput(self.length, self.conf, ROOM)
        if self.kind == "choice":
            return ChoiceOutput(OPTIONS[self.length % 3], ROOM, self.sampling)
        if self.kind == "reasoning":
            tokens = ReasoningTokens(3, (3, 1, 2)[: 1 + self.length % 3], (EOS,), COORD, frozenset({2, 4}))
            answer: OutputState = TextOutput(EOS, 4, 4, self.sampling)
            if self.stop % 2:
                answer = ChoiceOutput(OPTIONS[self.length % 3], 5, self.sampling)
            return ReasoningOutput(answer, tokens, self.length, str, self.sampling)
        return TextOutput(EOS, 2 * self.length, ROOM, self.sampling, lambda token: token == self.stop)


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes after the one before, and what may become of it."""

    asked: tuple[Asked, ...]
    adapter: int
    after_s: float
    deadline_s: float | None
    cancel: int | None  # together with the arrival of the request so many places further
    stream: str | None = None  # whose earlier answers are drafts of its own


@dataclass(frozen=True)
class Workload:
    arrivals: tuple[Arrival, ...]
    n_pages: int
    n_batch_slots: int
    n_adapters: int
    together: int


asked = st.builds(
    Asked,
    st.sampled_from(["boxes", "points", "text", "text", "choice", "reasoning"]),
    st.one_of(st.sampled_from([(7,), (7, 8)]), st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple)),
    st.integers(1, 5),
    st.sampled_from([0.1, 0.5, 0.7]),
    st.builds(Sampling, st.sampled_from([0.0, 1.0]), st.just(1.0), st.integers(0, 9)),
    st.integers(1, 9),
)
arrivals = st.builds(
    Arrival,
    st.lists(asked, max_size=4).map(tuple),
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    st.sampled_from([0.0, 0.0, 0.0, 2e-4, 1e-3]),
    st.sampled_from([None, None, None, None, 0.0, 5e-4, 2e-3, 30.0]),
    st.sampled_from([None, None, None, None, None, 0, 1, 2]),
    st.sampled_from([None, "door", "door", "yard"]),
)
workloads = st.builds(
    Workload,
    st.lists(arrivals, min_size=1, max_size=10).map(tuple),
    st.integers(8, 60),
    st.integers(1, 8),
    st.integers(1, 2),
    st.integers(1, 3),
)


@dataclass
class Outcome:
    """How each request ended, with its answers."""

    errors: list[BaseException | None]
    sequences: list[list[Any]]
    zombies: int
    hit: set[int]
    drafts: Speculation


def answer_of(output: OutputState) -> object:
    if isinstance(output, ReasoningOutput):
        return output.reasoning, answer_of(output.answer)
    if isinstance(output, ChoiceOutput):
        return [dict(node.children) for node in output._nodes]
    return output.objects if isinstance(output, ObjectsOutput) else output.tokens  # type: ignore[attr-defined]


def run(work: Workload, depth: int, seed: int, loops: type[StepLoop[int]] = StepLoop, faults: float = 0.0) -> Outcome:
    pool = PagePool(work.n_pages)
    config = replace(sizes(PAGE, work.n_batch_slots, work.together, work.n_adapters), depth=depth)
    scheduler: Scheduler[int] = Scheduler(config, pool, PREFIX)
    executor = Faulty(depth, work.n_batch_slots, work.n_pages, random.Random(seed), faults)
    loop = loops(executor, scheduler, config)
    loop.start()
    ended: dict[int, BaseException | None] = {}
    requests: list[Request[int]] = []
    for number, one in enumerate(work.arrivals):
        time.sleep(one.after_s)
        deadline = float("inf") if one.deadline_s is None else time.monotonic() + one.deadline_s
        sequences = [Sequence[int](ask.prompt, ask.output()) for ask in one.asked]

        def done(request: Request[int], error: BaseException | None, number: int = number) -> None:
            assert number not in ended, "reported twice"
            ended[number] = error

        requests.append(request_of(number, sequences, done, deadline, ADAPTERS[one.adapter]))
        loop.submit(requests[-1], one.stream)
        for before, other in enumerate(work.arrivals[: number + 1]):
            if other.cancel is not None and before + other.cancel == number:
                loop.cancel(requests[before], CancelledError())
    latest = time.monotonic() + WAIT_S
    while len(ended) < len(requests):
        assert time.monotonic() < latest, "the loop stands still"
        time.sleep(2e-4)
    loop.close(EngineClosedError("closed"))
    assert scheduler.at_rest
    assert not any(sequence.inflight_refs for request in requests for sequence in request.windows[0].sequences)
    assert all(one.state is State.OVER and one.windows[0].image is None for one in requests)
    errors = [ended[number] for number in range(len(requests))]
    return Outcome(
        errors,
        [[answer_of(sequence.output) for sequence in request.windows[0].sequences] for request in requests],
        scheduler.zombies,
        executor.hit,
        scheduler.speculation,
    )


def check(work: Workload, outcome: Outcome) -> None:
    """Every request has ended as it may, and the answers are those that it would get alone."""
    for number, (one, error) in enumerate(zip(work.arrivals, outcome.errors, strict=True)):
        if error is None:
            wanted = []
            for ask in one.asked:
                output = ask.output()
                alone(number, ADAPTERS[one.adapter], ask.prompt, output, PREFIX)
                wanted.append(answer_of(output))
            assert outcome.sequences[number] == wanted
        elif isinstance(error, CancelledError):
            assert one.cancel is not None
        elif isinstance(error, DeadlineError):
            assert one.deadline_s is not None
        elif isinstance(error, FaultError):
            assert number in outcome.hit
        else:
            assert isinstance(error, RequestTooLargeError), error


@settings(
    max_examples=int(os.environ.get("SACCADE_SCHEDULES", "250")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ],  # threads do not fail twice in the same way: nothing to shrink
)
@given(work=workloads, seed=st.integers(0, 2**32))
def test_pipelined_answers_equal_blocking_ones(work: Workload, seed: int) -> None:
    blocking, pipelined = run(work, 1, seed), run(work, 2, seed)
    check(work, blocking)
    check(work, pipelined)
    for a, b, x, y in zip(blocking.errors, pipelined.errors, blocking.sequences, pipelined.sequences, strict=True):
        assert isinstance(a, RequestTooLargeError) == isinstance(b, RequestTooLargeError)
        assert a is not None or b is not None or x == y
    assert blocking.zombies == 0 or any(one.cancel is not None or one.deadline_s for one in work.arrivals)


@settings(
    max_examples=int(os.environ.get("SACCADE_SCHEDULES", "250")) // 2,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(work=workloads, seed=st.integers(0, 2**32), rate=st.sampled_from([0.02, 0.1, 0.5, 1.0]))
def test_a_step_that_fails_anywhere_ends_its_own_requests_only(work: Workload, seed: int, rate: float) -> None:
    for depth in (1, 2):
        check(work, run(work, depth, seed, faults=rate))


def outcomes(loop: StepLoop[int], count: int) -> dict[int, BaseException | None]:
    """How requests end that are added one behind the other."""
    ended: dict[int, BaseException | None] = {}
    for number in range(count):

        def done(request: Request[int], error: BaseException | None, number: int = number) -> None:
            ended[number] = error

        try:
            loop.submit(request_of(number, [Sequence[int]((1,), BoxesOutput(5, 0.0, ROOM))], done))
        except BaseException as error:
            ended[number] = error
        latest = time.monotonic() + WAIT_S
        while number not in ended:
            assert time.monotonic() < latest, "the loop stands still"
            time.sleep(1e-4)
    return ended


def test_a_deadline_is_not_awaited_behind_a_step() -> None:
    """On a CPU a prefill may take seconds: whoever waits for one hears of a deadline when it passes."""
    config = replace(sizes(PAGE, 4, 1), depth=1)
    scheduler: Scheduler[int] = Scheduler(config, PagePool(60), PREFIX)
    executor = StandIn(1, 4, 60, random.Random(0), slowest_s=0.0)
    executor._calls = True
    gate, late, done = Event(), Event(), Event()
    executor.streams["compute"].run(lambda: assert_set(gate))
    loop = StepLoop(executor, scheduler, config)
    loop.start()
    errors: list[BaseException | None] = []

    def ended(request: Request[int], error: BaseException | None) -> None:
        errors.append(error)
        (late if len(errors) == 1 else done).set()

    loop.submit(request_of(0, [Sequence[int]((1,), BoxesOutput(1, 0.0, ROOM))], ended))
    loop.submit(request_of(1, [Sequence[int]((1,), BoxesOutput(1, 0.0, ROOM))], ended, time.monotonic() + 0.05))
    assert late.wait(WAIT_S)
    assert isinstance(errors[0], DeadlineError)
    gate.set()
    assert done.wait(WAIT_S)
    assert errors[1] is None
    loop.close(EngineClosedError("closed"))
    assert scheduler.at_rest


def assert_set(event: Event) -> None:
    assert event.wait(WAIT_S)


class GoneError(BaseException):
    """No Exception: nothing goes on after it."""


GONE = "the engine has failed: no more"


def breaking(part: str, error: BaseException, call: int) -> StepLoop[int]:
    """A loop on an executor of which a part raises when it is called for that time."""
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 4, 1), PagePool(60), PREFIX)
    executor = StandIn(2, 4, 60, random.Random(0))
    whole, calls = getattr(executor, part), count(1)

    def breaks(slot: int, step: Any) -> Any:
        if next(calls) == call:
            executor.failed(slot)
            raise error
        return whole(slot, step)

    setattr(executor, part, breaks)
    loop = StepLoop(executor, scheduler, sizes(PAGE, 4, 1))
    loop.start()
    return loop


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("part", ["launch", "finalize"])
def test_the_loop_outlives_a_step_that_cannot_be_launched(part: str, call: int) -> None:
    error = MemoryError("no more")
    loop = breaking(part, error, call)
    ended = outcomes(loop, 4)
    loop.close(EngineClosedError("closed"))
    assert [number for number in ended if ended[number] is not None] == [0]
    assert ended[0] is error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("part", ["launch", "finalize", "read"])
def test_no_request_waits_for_a_loop_that_has_failed(part: str) -> None:
    loop = breaking(part, GoneError("no more"), 5)
    ended = outcomes(loop, 8)
    loop._thread.join(WAIT_S)
    loop.close(EngineClosedError("closed"))
    assert isinstance(ended[0], GoneError)
    for error in list(ended.values())[1:]:
        assert isinstance(error, GoneError) or (type(error), str(error)) == (EngineClosedError, GONE)
    with pytest.raises(EngineClosedError, match=GONE):
        loop.submit(request_of(9, []))


# Checks of the checks: each of these engines is broken in one place, and one of the tests above would fail.

BUSY = Workload(
    tuple(
        Arrival(
            tuple(
                Asked(kind, (n, n + 1, n + 2), 5, 0.5, Sampling(1.0, 1.0, n), 9) for kind in ("text", "choice", "boxes")
            ),
            n % 4,
            0.0,
            None,
            None,
        )
        for n in range(12)
    ),
    n_pages=60,
    n_batch_slots=6,
    n_adapters=1,
    together=1,
)


def assert_violation(work: Workload, message: str, loops: type[StepLoop[int]] = StepLoop) -> None:
    seen = []
    for seed in range(20):
        outcome = run(work, 2, seed, loops)
        seen += [str(error) for error in outcome.errors if isinstance(error, ViolationError)]
    assert any(message in one for one in seen), seen


def test_the_same_work_succeeds_unbroken() -> None:
    outcome = run(BUSY, 2, 0)
    check(BUSY, outcome)
    assert outcome.errors == [None] * 12
    assert outcome.zombies > 0
    assert run(BUSY, 1, 0).zombies == 0


def test_launching_a_slot_that_is_not_read_is_detected() -> None:
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 4, 1), PagePool(30), PREFIX)
    scheduler.submit(request_of(0, [Sequence((1,), TextOutput(EOS, 9, ROOM))]))
    executor = StandIn(2, 4, 30, random.Random(0))
    for slot in (0, 1, 0):
        step = scheduler.next_step()
        assert step is not None
        if slot:
            executor.read(0, step)
            executor.guard.launch(0)  # as if another step had taken the slot meanwhile
        executor.launch(slot, step)
        executor.finalize(slot, step)
    with pytest.raises(ViolationError, match="has been read"):
        executor.read(0, step)
    executor.close()


def test_writing_a_slot_that_is_being_copied_is_detected() -> None:
    executor = StandIn(2, 4, 30, random.Random(0), slowest_s=0.0)
    executor.guard.write(0, 1)
    with pytest.raises(ViolationError, match="being copied"):
        executor.guard.write(0, 3)
    with pytest.raises(ViolationError, match="before it has been copied"):
        executor.guard.read(0)
    executor.close()


def test_releasing_pages_of_a_step_in_flight_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Resources.release

    def hasty(self: Resources, sequence: Sequence[int]) -> None:
        refs, sequence.inflight_refs = sequence.inflight_refs, 0
        release(self, sequence)
        sequence.inflight_refs = refs

    monkeypatch.setattr(Resources, "release", hasty)
    assert_violation(BUSY, "has been given away")


def test_sampling_before_the_commit_is_detected() -> None:
    class Eager(StepLoop[int]):
        """Finalizes a step as soon as it is launched."""

        def __init__(self, executor: Any, scheduler: Any, config: Any) -> None:
            launch, finalize = executor.launch, executor.finalize

            def both(slot: int, step: Any) -> None:
                launch(slot, step)
                finalize(slot, step)

            executor.launch, executor.finalize = both, lambda slot, step: None
            super().__init__(executor, scheduler, config)

    assert_violation(BUSY, "is sampled before", Eager)

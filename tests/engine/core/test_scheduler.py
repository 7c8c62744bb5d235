"""Scheduler, pages and output states against random workloads, with no model behind them."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.core.admission import AdapterSlots, PagePool, StreamSettings
from saccade.engine.core.request import NO_SLOT, PrefillWindow, Request, Sequence, State, Step, StepKind
from saccade.engine.core.scheduler import Scheduler, SlotState, StepSlots
from saccade.engine.errors import DeadlineError, RequestTooLargeError
from saccade.engine.models.protocol import Adapter, Phase
from saccade.engine.tasks.objects import BoxesOutput, ObjectsOutput, PointsOutput
from saccade.engine.tasks.text_output import TextOutput
from tests.support.engine.requests import request_of, sizes

EOS = 0
PAGE, PREFIX = 4, 10


class CancelledError(Exception):
    pass


@given(st.lists(st.sampled_from(["allocate", "share", "release"]), max_size=60), st.integers(1, 12), st.randoms())
def test_pages_are_free_exactly_while_they_have_no_holder(acts: list[str], size: int, random: random.Random) -> None:
    pool, held = PagePool(size), list[tuple[int, ...]]()
    for act in acts:
        if act == "allocate":
            count = random.randint(0, size)
            if count > pool.n_free:
                with pytest.raises(ValueError, match="free"):
                    pool.allocate(count)
            else:
                held.append(pool.allocate(count))
        elif held:
            pages = random.choice(held)
            if act == "share":
                pool.share(pages)
                held.append(pages)
            else:
                held.remove(pages)
                pool.release(pages)
        assert pool.n_free == size - len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert pool.n_free == size


def test_releasing_what_has_no_holder_is_refused() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="is already free"):
        pool.release(pages)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(pages)


class Device:
    """Samples by itself, as a model would: what a row gets depends only on its image, its prompt and its step."""

    def __init__(self) -> None:
        self.steps_of: dict[int, int] = {}
        self.images: dict[PrefillWindow[int], int] = {}  # a window gives up its image once it is prefilled

    def run(self, step: Step[int]) -> list[tuple[float, float, float]]:
        sampled = []
        for row in step.sequences:
            key, window = id(row.sequence), row.sequence.window
            if step.kind is StepKind.PREFILL:
                assert window.image is not None
                self.steps_of[key], self.images[window] = 0, window.image
            number = self.steps_of[key]
            self.steps_of[key] = number + 1
            sampled.append(model(self.images[window], row.sequence.prompt, number, row.phase))
        return sampled


def model(image: int, prompt: tuple[int, ...], number: int, phase: Phase) -> tuple[float, float, float]:
    noise = random.Random(f"{image} {prompt} {number}")
    if phase >= Phase.TOKEN:
        return float(noise.choice([EOS, 1, 2, 3, 4, 5])), 0.0, 0.0
    if phase is Phase.X_OR_EOS:
        return noise.uniform(-1, 2), noise.random(), 0.0
    return noise.random(), noise.random(), 0.0


def alone(image: int, prompt: tuple[int, ...], output: ObjectsOutput | TextOutput) -> object:
    """The answer of a loop that knows no steps in flight."""
    number = 0
    while (phase := output.next_phase()) is not None:
        if output.commit(model(image, prompt, number, phase)):
            break
        number += 1
    return output.objects if isinstance(output, ObjectsOutput) else output.tokens


def make_output(noise: random.Random) -> ObjectsOutput | TextOutput:
    if noise.random() < 0.3:
        return TextOutput(EOS, noise.randint(1, 9), 20)
    return (BoxesOutput if noise.random() < 0.6 else PointsOutput)(
        noise.randint(1, 4), noise.choice([0.1, 0.5, 0.7]), 20
    )


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 2),
    pages=st.integers(12, 60),
    batch_slots=st.integers(1, 8),
    together=st.integers(1, 3),
    n_requests=st.integers(1, 12),
)
def test_any_workload_answers_as_if_alone_and_frees_all(
    seed: int, depth: int, pages: int, batch_slots: int, together: int, n_requests: int
) -> None:
    noise = random.Random(seed)
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, batch_slots, together), PagePool(pages), PREFIX)
    device, slots = Device(), StepSlots(depth)
    ended: dict[int, BaseException | None] = {}
    cancelled: set[int] = set()
    requests: list[tuple[Request[int], list[object]]] = []
    launched: deque[tuple[int, Step[int], list[tuple[float, float, float]]]] = deque()

    def arrive() -> None:
        image = len(requests)
        asked = [
            (tuple(noise.choices(range(9), k=noise.randint(1, 5))), noise.randrange(2**32))
            for _ in range(noise.randint(1, 4))
        ]
        sequences = [Sequence[int](prompt, make_output(random.Random(s))) for prompt, s in asked]
        request = request_of(image, sequences, lambda one, error: ended.__setitem__(image, error))
        wanted = [alone(image, prompt, make_output(random.Random(s))) for prompt, s in asked]
        scheduler.submit(request)
        if request.state is State.OVER:
            assert isinstance(ended[image], RequestTooLargeError)
            cancelled.add(image)
        requests.append((request, wanted))

    turns = 0
    while len(requests) < n_requests or launched or not scheduler.at_rest:
        turns += 1
        assert turns < 5000, "the scheduler stands still"
        while len(requests) < n_requests and noise.random() < 0.4:
            arrive()
        if requests and noise.random() < 0.05:
            image = noise.randrange(len(requests))
            if image not in ended:
                scheduler.cancel(requests[image][0], CancelledError())
                cancelled.add(image)
        step = scheduler.next_step() if slots.can_launch else None
        slot = None
        if step is not None:
            rows = [row.sequence for row in step.sequences]
            assert len(set(map(id, rows))) == len(rows)
            assert not any(sequence.finalized for sequence in rows)
            slot = slots.launch()
            launched.append((slot, step, device.run(step)))
        oldest = launched[0] if launched else None
        if oldest and slots.state(oldest[0]) is SlotState.FINALIZED and (step is None or not slots.can_launch):
            launched.popleft()
            slots.commit(oldest[0])
            scheduler.commit(oldest[1], oldest[2])
            scheduler.report()
        if slot is not None:
            slots.finalize(slot)
    assert scheduler.at_rest
    assert set(ended) == set(range(n_requests))
    for image, (request, wanted) in enumerate(requests):
        assert request.windows[0].image is None
        if image in cancelled:
            assert isinstance(ended[image], CancelledError | RequestTooLargeError)
        else:
            assert ended[image] is None
            got = [
                one.output.objects if isinstance(one.output, ObjectsOutput) else one.output.tokens
                for one in request.windows[0].sequences
            ]
            assert got == wanted


@pytest.mark.parametrize(
    ("together", "live", "decodes"),
    [(4, [True], 9), (4, [False], 9), (1, [True], 3), (1, [False], 3), (2, [False, True], 3)],
)
def test_decode_steps_come_between_prefills(together: int, live: list[bool], decodes: int) -> None:
    """More of them while too few images wait to fill a prefill."""
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 50, together), PagePool(200), PREFIX)
    for newest in (False, True):
        scheduler.admission.configure(newest, StreamSettings(newest=newest))

    def add() -> None:
        for newest in live:
            scheduler.submit(request_of(0, [Sequence[int]((1,), TextOutput(-1, 20, 20))], frame=newest), newest)

    add()
    kinds = []
    for number in range(decodes + 2):
        step = scheduler.next_step()
        assert step is not None
        kinds.append(step.kind)
        scheduler.commit(step, [(1.0, 0.0, 0.0)] * len(step.sequences))
        if not number:
            add()
    assert kinds == [StepKind.PREFILL, *[StepKind.DECODE] * decodes, StepKind.PREFILL]


def test_the_windows_of_a_frame_are_prefilled_together() -> None:
    """Also while the frames of other streams wait."""

    def make(request: Request[int]) -> list[PrefillWindow[int]]:
        return [PrefillWindow(request, [Sequence((1,), TextOutput(-1, 20, 20))], 0, number=i) for i in range(2)]

    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 50, 4), PagePool(200), PREFIX)
    for number in range(4):
        scheduler.submit(Request(make, lambda *_: None, frame=True), number)
    shown: list[tuple[object, int]] = []
    while len(shown) < 8:
        step = scheduler.next_step()
        assert step is not None
        shown += [(window.request.stream, window.number) for window in step.windows]
        scheduler.commit(step, [(1.0, 0.0, 0.0)] * len(step.sequences))
    assert sorted(shown) == [(stream, number) for stream in range(4) for number in range(2)]
    for (stream, number), (next_stream, next_number) in zip(shown[::2], shown[1::2], strict=True):
        assert (stream, number, next_number) == (next_stream, 0, 1), shown


@pytest.mark.parametrize(("windows", "prefills"), [(1, [2, 2, 1]), (2, [4, 4, 2]), (4, [6, 6, 6, 2])])
def test_a_prefill_begins_some_requests_and_has_room_for_more_of_their_windows(
    windows: int, prefills: list[int]
) -> None:
    def make(request: Request[int]) -> list[PrefillWindow[int]]:
        return [PrefillWindow(request, [Sequence((1,), TextOutput(-1, 20, 20))], 0, number=i) for i in range(windows)]

    config = replace(sizes(PAGE, 50, 6), requests_per_prefill=2)
    scheduler: Scheduler[int] = Scheduler(config, PagePool(200), PREFIX)
    for number in range(5):
        scheduler.submit(Request(make, lambda *_: None, frame=True), number)
    seen: list[int] = []
    while sum(seen) < 5 * windows:
        step = scheduler.next_step()
        assert step is not None
        seen += [len(step.windows)] if step.windows else []
        scheduler.commit(step, [(1.0, 0.0, 0.0)] * len(step.sequences))
    assert seen == prefills


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), together=st.integers(1, 4), depth=st.integers(1, 2), live=st.booleans())
def test_under_load_neither_starves_the_other(seed: int, together: int, depth: int, live: bool) -> None:
    """There is room for all. Images come in bursts as fast as they are prefilled, and faster; texts are long."""
    dice = random.Random(seed)
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 10_000, together, drafts=False), PagePool(100_000), PREFIX)
    if live:  # an answer about a frame, which goes on
        scheduler.submit(request_of(-1, [Sequence[int]((1,), TextOutput(-1, 400, 400))], frame=True), "door")
    launched = deque[Step[int]]()
    waiting: dict[int, int] = {}  # images that wait, and the step by which they are to be prefilled
    last: dict[Sequence[int], int] = {}  # sequences and the step that they were last part of
    image = 0
    for now in range(150):
        for _ in range(dice.choice([0, 0, 1, together, 3 * together])):
            sequences = [Sequence[int]((1,), TextOutput(EOS, 60, 60)) for _ in range(dice.randint(1, 3))]
            scheduler.submit(request_of(image, sequences), "stream")
            waiting[image] = now + 10 * -(-(len(waiting) + 1) // together)
            image += 1
        step = scheduler.next_step()
        if step is not None:
            launched.append(step)
            for window in step.windows:
                assert window.image is not None
                assert now < waiting.pop(window.image, math.inf)
            for row in step.sequences:
                assert now - last.get(row.sequence, now) <= 2
                last[row.sequence] = now
        assert all(now < latest for latest in waiting.values())
        assert all(now - then < 2 for sequence, then in last.items() if not sequence.finalized)
        while len(launched) >= depth:
            done = launched.popleft()
            scheduler.commit(done, [(float(dice.random() > 0.05), 0.0, 0.0)] * len(done.sequences))
    assert image > 60


def test_deadlines_end_requests_wherever_they_are() -> None:
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 2, 1), PagePool(200), PREFIX)
    ended: dict[int, BaseException | None] = {}

    def request(image: int, deadline: float) -> Request[int]:
        def done(request: Request[int], error: BaseException | None) -> None:
            ended[image] = error

        return request_of(image, [Sequence((1,), TextOutput(-1, 20, 20))], done, deadline)

    for image, deadline in enumerate([5.0, 9.0, 2.0, 7.0, 1e9]):
        scheduler.submit(request(image, deadline))
    flying = [scheduler.next_step() for _ in range(2)]
    scheduler.expire(1.9)
    assert ended == {}
    scheduler.expire(2.0)  # waits for a batch slot
    assert list(ended) == [2]
    scheduler.expire(5.0)  # in flight: its batch slot is released when both steps are committed
    assert list(ended) == [2, 0]
    assert "during the answer" in str(ended[0])
    assert "before the prefill" in str(ended[2])
    for step in flying:
        assert step is not None
        scheduler.commit(step, [(1.0, 0.0, 0.0)] * len(step.sequences))
        scheduler.report()
    scheduler.expire(8.0)
    assert list(ended) == [2, 0, 3]
    scheduler.expire(1e8)
    assert list(ended) == [2, 0, 3, 1]
    assert all(isinstance(error, DeadlineError) for error in ended.values())
    assert not scheduler.at_rest
    scheduler.expire(1e9)
    assert scheduler.at_rest


def test_requests_wait_for_an_adapter_slot_and_share_it() -> None:
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 50, 4, n_adapters=1), PagePool(200), PREFIX)
    red, blue = Adapter("red", {}), Adapter("blue", {})

    def request(image: int, adapter: Adapter | None) -> Request[int]:
        return request_of(image, [Sequence((1,), TextOutput(-1, 2, 20))], adapter=adapter)

    requests = [request(0, red), request(1, None), request(2, red), request(3, blue), request(4, None)]
    for one in requests:
        scheduler.submit(one)
    launches = []
    while not scheduler.at_rest:
        step = scheduler.next_step()
        assert step is not None
        launches.append([one.image for one in step.windows])
        scheduler.commit(step, [(1.0, 0.0, 0.0)] * len(step.sequences))
        scheduler.report()
    assert launches == [[0, 1, 2], [], [3, 4], []]
    assert [one.windows[0].adapter_slot for one in requests] == [1, NO_SLOT, 1, 1, NO_SLOT]
    none: Scheduler[int] = Scheduler(sizes(PAGE, 50, 4), PagePool(200), PREFIX)
    none.submit(late := request(5, red))
    assert late.state is State.OVER
    assert none.at_rest


def test_an_adapter_stays_in_its_slot_until_another_needs_it() -> None:
    slots, (a, b, c) = AdapterSlots(2), (Adapter(name, {}) for name in "abc")
    for adapter, slot in ((a, 1), (b, 2), (a, 1)):
        assert slots.find(adapter) == slot
        slots.acquire(slot, adapter)
    assert (slots.find(c), slots.n_free, slots.find(None)) == (None, 0, NO_SLOT)
    with pytest.raises(ValueError, match="in use by adapter 'a'"):
        slots.acquire(1, c)
    slots.release(1)
    slots.release(2)
    assert (slots.find(c), slots.find(b)) == (2, 2)
    slots.release(1)
    assert (slots.find(c), slots.find(a), slots.n_free) == (2, 1, 2)  # b was released before a
    slots.acquire(2, c)
    assert slots.find(b) == 1
    with pytest.raises(ValueError, match="is already free"):
        slots.release(1)


def test_an_output_that_fails_ends_its_request_only() -> None:
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 8, 2), PagePool(40), PREFIX)
    ended: dict[int, BaseException | None] = {}

    def done(number: int) -> Callable[[Request[int], BaseException | None], None]:
        return lambda request, error: ended.__setitem__(number, error)

    def fail(token: int) -> bool:
        raise RuntimeError("no such token")

    scheduler.submit(request_of(0, [Sequence((1,), TextOutput(EOS, 2, 20, on_token=fail)) for _ in range(2)], done(0)))
    scheduler.submit(request_of(1, [Sequence((1,), TextOutput(EOS, 2, 20))], done(1)))
    steps = [scheduler.next_step() for _ in range(2)]
    for step in steps:
        assert step is not None
        scheduler.commit(step, [(1.0, 0.0, 0.0)] * len(step.sequences))
        scheduler.report()
    assert str(ended[0]) == "no such token"
    assert ended[1] is None
    assert scheduler.at_rest


def test_a_failed_step_ends_its_requests_and_frees_all() -> None:
    scheduler: Scheduler[int] = Scheduler(sizes(PAGE, 8, 2), PagePool(40), PREFIX)
    ended: list[BaseException | None] = []
    answers = [Sequence((1,), TextOutput(-1, 5, 20)) for _ in range(3)]
    scheduler.submit(request_of(0, answers, lambda request, error: ended.append(error)))
    step = scheduler.next_step()
    assert step is not None
    scheduler.fail(step, error := RuntimeError("out of memory"))
    assert ended == [error]
    assert scheduler.at_rest

"""Streams that share an engine: the newest frame of each, shares by weight, rates, deadlines; in simulated time."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.config import EngineConfig
from saccade.engine.core.admission import Admission, AdmissionLead, ServiceTime, StreamSettings
from saccade.engine.core.request import Request, State, Step
from saccade.engine.errors import DeadlineError, SupersededError
from saccade.pipeline.bench.cameras.report import fair_shares
from tests.support.engine.requests import request_of
from tests.support.engine.simulation import Camera, Cost, Frame, Simulation, bench_cameras, h200_bf16, h200_fp8, jain

CONFIG = EngineConfig()


class Queue:
    """An admission whose scheduler only notes what ends, and plans what is next."""

    def __init__(self) -> None:
        self.admission: Admission[int] = Admission(CONFIG, self.end)
        self.errors: dict[Request[int], BaseException] = {}
        self.asked: list[Request[int]] = []

    def end(self, request: Request[int], error: BaseException) -> None:
        assert request.state is not State.OVER, "ended twice"
        request.state, self.errors[request] = State.OVER, error
        self.admission.over(request, 0.0, learn=False)

    def offer(
        self, key: object, now: float = 0.0, deadline: float = math.inf, windows: int = 1, *, frame: bool = True
    ) -> Request[int]:
        request = request_of(0, [], deadline=deadline, frame=frame, windows=windows)
        self.asked.append(request)
        self.admission.offer(request, key, now)
        return request

    def begin(self, now: float = 0.0) -> Request[int] | None:
        """Admit a window of the next request; the request, if there is one."""
        request = self.admission.next(now)
        if request is not None:
            if not request.windows:
                request.windows = request.make_windows(request)
                self.admission.planned(request)
            self.admission.admit(request, now)
        return request

    def over(self, request: Request[int], now: float, *, learn: bool = True) -> None:
        request.state = State.OVER
        self.admission.over(request, now, learn=learn)


def test_a_newer_frame_takes_the_place_of_one_that_waits() -> None:
    queue = Queue()
    frames = [queue.offer("door") for _ in range(3)]
    assert [type(queue.errors.get(frame)) for frame in frames] == [SupersededError, SupersededError, type(None)]
    assert len(queue.admission) == 1
    assert queue.begin() is frames[2]
    newer = queue.offer("door")  # what has begun is not superseded
    assert frames[2] not in queue.errors
    queue.over(frames[2], 1.0)
    assert queue.begin(1.0) is newer


def test_a_stream_that_keeps_all_runs_them_in_order() -> None:
    queue = Queue()
    requests = [queue.offer("file", frame=False) for _ in range(4)]
    assert [queue.begin() for _ in range(5)] == [*requests, None]


def test_no_more_frames_are_run_at_a_time_than_the_stream_may() -> None:
    queue = Queue()
    queue.admission.configure("door", StreamSettings(in_flight=1))
    queue.offer("door")
    begun = queue.begin()
    assert begun is not None
    queue.offer("door")
    assert queue.begin() is None
    queue.over(begun, 0.1)
    assert queue.begin(0.1) is not None


def test_settings_outlive_thousands_of_other_streams() -> None:
    """Streams that were given none are forgotten in time, with what was learned of them."""
    admission = Queue().admission
    for number in range(6000):
        admission.configure(number, StreamSettings(weight=4.0))
    for number in range(6000):
        admission.stream(("passing", number))
    assert all(admission.stream(number).settings.weight == 4.0 for number in range(6000))
    assert len(admission._streams) < 6000 + 4500


def test_a_frame_that_cannot_be_in_time_costs_nothing() -> None:
    queue = Queue()
    queue.offer("door")
    begun = queue.begin()
    assert begun is not None
    queue.over(begun, 0.4)
    late = queue.offer("door", deadline=1.2)
    assert queue.begin(1.0) is None
    assert isinstance(queue.errors[late], DeadlineError)
    assert not late.windows
    assert "an answer takes 0.4" in str(queue.errors[late])
    early = queue.offer("door", deadline=1.2)
    assert queue.begin(0.5) is early


def test_an_estimate_that_is_never_met_is_doubted() -> None:
    service = ServiceTime()
    service.measured(1.0)
    first, tries = service.seconds, 0
    while service.seconds > 0.2:
        service.doubt(CONFIG.service_doubt)
        tries += 1
    assert first > 1.0
    assert tries < 50


def test_images_are_admitted_as_early_as_they_need() -> None:
    lead = AdmissionLead(CONFIG)
    assert lead.admit_at(8, 1.0) == math.inf  # nothing is known
    lead.prefilled(8, 0.040)
    lead.prefilled(8, 0.030)
    assert lead.admit_at(8, 1.0) == math.inf  # nothing has to be prepared
    for _ in range(60):
        lead.prepared(0.010)
    assert lead.admit_at(8, 1.0) == pytest.approx(1.0 + 0.030 - 0.010, abs=1e-4)
    assert lead.admit_at(4, 1.0) == math.inf
    for _ in range(60):
        lead.prepared(0.1)
    assert lead.admit_at(8, 1.0) == 1.0


def test_a_prefill_that_was_read_late_counts_as_shorter() -> None:
    lead = AdmissionLead(CONFIG)
    for _ in range(60):
        lead.prepared(0.010)
    lead.prefilled(8, 0.040, late=True)
    assert lead.admit_at(8, 1.0) == pytest.approx(1.0 + CONFIG.lead_late * 0.040 - 0.010, abs=1e-4)


@pytest.mark.parametrize(
    "bad",
    [{"weight": 0}, {"weight": math.nan}, {"weight": "1"}, {"max_fps": 0}, {"max_fps": math.inf}, {"in_flight": 0}],
)
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got"):
        StreamSettings(**bad)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["offer", "add", "next", "over", "cancel", "configure", "forget"]),
            st.integers(0, 3),
        ),
        max_size=80,
    ),
    seed=st.integers(0, 2**32),
)
def test_each_request_is_run_or_ends_once(acts: list[tuple[str, int]], seed: int) -> None:
    dice, now = random.Random(seed), 0.0
    queue = Queue()
    running: list[Request[int]] = []
    begun: set[Request[int]] = set()

    def begin() -> bool:
        request = queue.begin(now)
        if request is not None and request not in begun:
            begun.add(request)
            running.append(request)
        return request is not None

    for act, key in acts:
        now += dice.choice([0.0, 0.01, 0.3])
        if act == "offer":
            queue.offer(key, now, dice.choice([math.inf, now + 0.5, now]), dice.choice([1, 1, 3]))
        elif act == "add":
            queue.offer(dice.choice([None, 9]), now, windows=dice.choice([1, 2]), frame=False)
        elif act == "next":
            begin()
        elif act == "over" and running:
            queue.over(running.pop(dice.randrange(len(running))), now, learn=dice.random() < 0.7)
        elif act == "cancel" and queue.admission.requests:
            request = dice.choice(queue.admission.requests)
            if request in running:
                running.remove(request)
            queue.end(request, RuntimeError("cancelled"))
        elif act == "configure":
            rate = dice.choice([None, 2.0])
            queue.admission.configure(key, StreamSettings(dice.choice([0.5, 1, 4]), rate, dice.choice([1, 2])))
        elif act == "forget":
            queue.admission.forget(key)
        assert len(queue.admission) == sum(request.n_waiting for request in queue.admission.requests)
    for _ in range(1000):
        now += 1.0
        while begin():
            pass
        while running:
            queue.over(running.pop(), now, learn=False)
        if not len(queue.admission):
            break
    assert not len(queue.admission)
    assert all(request in begun or request in queue.errors for request in queue.asked)
    assert all(not stream.running for stream in queue.admission._streams.values())


@settings(max_examples=25, deadline=None)
@given(
    cameras=st.lists(st.tuples(st.floats(1, 15), st.sampled_from([1, 1, 4])), min_size=16, max_size=32),
    load=st.floats(1.2, 4),
    seed=st.integers(0, 2**32),
)
def test_no_camera_gets_less_than_its_share(cameras: list[tuple[float, int]], load: float, seed: int) -> None:
    """Of a server of 150 frames a second: what a camera offers below its max-min share is taken, else that share."""
    dice, pace, seconds = random.Random(seed), 1 / 150, 6.0
    scale = load / pace / sum(fps for fps, _ in cameras)
    queue = Queue()
    due: list[tuple[float, int]] = []
    for number, (fps, weight) in enumerate(cameras):
        queue.admission.configure(number, StreamSettings(weight=weight))
        phase = dice.random()
        due += [((phase + i) / (fps * scale), number) for i in range(int(seconds * fps * scale))]
    waiting, now = deque(sorted(due)), 0.0
    offered, looks = [0] * len(cameras), [0] * len(cameras)
    while waiting:
        while waiting and waiting[0][0] <= now:
            at, number = waiting.popleft()
            offered[number] += 1
            queue.offer(number, at)
        chosen = queue.begin(now)
        if chosen is not None:
            looks[chosen.stream] += 1  # type: ignore[index]
            queue.over(chosen, now, learn=False)
            now += pace
        elif waiting:
            now = waiting[0][0]
    shares = fair_shares(offered, [weight for _, weight in cameras], sum(looks))
    for number, share in enumerate(shares):
        assert looks[number] >= 0.85 * share - 4, (number, looks, shares)


def ages(sim: list[list[float]]) -> list[float]:
    return [age for one in sim for age in one]


def test_mixed_cameras_share_alike_and_frames_are_fresh() -> None:
    """64 cameras of 5 to 30 frames a second at one GPU: 6.9 times what it can do."""
    cameras = [Camera(5 + 25 * i / 63, deadline_s=0.2) for i in range(64)]
    seen = Simulation(cameras).run(10)
    assert jain([one.looks for one in seen]) > 0.99
    launched = ages([one.launch_ages for one in seen])
    assert np.percentile(launched, 99) < 0.1
    assert sum(one.looks for one in seen) > 0.95 * 10 * 160  # what it does without deadlines
    for one in seen:
        assert sum(one.ends.values()) == one.offered
        assert set(one.ends) <= {"done", "SupersededError", "DeadlineError"}


def test_looks_are_in_proportion_to_weights() -> None:
    cameras = [Camera(25, StreamSettings(weight=1 if i % 4 else 4)) for i in range(64)]
    seen = Simulation(cameras).run(15)
    heavy, light = (np.mean([one.looks for one in seen[i::4]]) for i in (0, 1))
    assert heavy / light == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(
    ("cost", "weights", "prepare_s"),
    [(h200_bf16, (1,), 1e-3), (h200_fp8, (1,), 3e-3), (h200_fp8, (1, 1, 1, 4), 1e-3)],
)
def test_an_overload_is_shared_and_fills_the_device(cost: Cost, weights: tuple[float, ...], prepare_s: float) -> None:
    """`saccade bench cameras` at twice the capacity, in simulated time."""
    seen = bench_cameras(cost, weights=weights, host_s=1e-3, prepare_s=prepare_s)
    assert seen.fps >= 0.95 * seen.closed_loop_fps
    assert seen.jain >= 0.99
    assert seen.launch_p99_ms <= 100
    assert seen.deadlines_met >= 0.99
    for weight in set(weights):
        rows = [row for row in seen.rows if row.weight == weight]
        assert np.mean([row.share for row in rows]) == pytest.approx(1, abs=0.05)


def test_max_fps_holds_and_leaves_no_turn_out() -> None:
    seen = Simulation([Camera(30, StreamSettings(max_fps=7))]).run(10)
    assert seen[0].looks == pytest.approx(70, abs=1)


def test_one_that_bursts_and_one_that_freezes_hurt_nobody_else() -> None:
    calm = [Camera(8) for _ in range(6)]
    frozen, bursting = Camera(30, end=3.0), Camera(400, begin=2.0, end=6.0)
    alone = Simulation(calm).run(8)
    beside = Simulation([*calm, frozen, bursting]).run(8)
    for before, after in zip(alone, beside, strict=False):
        assert after.looks > 0.9 * before.looks
    assert beside[7].ends["SupersededError"] > 1000


def test_large_images_take_their_share_and_no_more() -> None:
    seen = Simulation([Camera(10, crops=9), *(Camera(10) for _ in range(31))]).run(10)
    assert jain([one.looks for one in seen]) > 0.99


def test_a_step_that_is_done_does_not_wait_for_an_estimate() -> None:
    """After one slow prefill the moment to admit the next images lies behind the end of all that follow."""
    first = [0.5]

    def cost(step: Step[Frame]) -> float:
        return first.pop() if first and step.windows else 0.004 if step.windows else 0.001

    sim = Simulation([Camera(100, steps=2)], cost, prepare_s=1e-3)
    (seen,) = sim.run(2.0)
    assert seen.result_ages[0] > 0.5
    assert max(seen.result_ages[3:]) < 0.06, "no step is read late for a moment that is awaited"
    assert seen.looks > 100

"""Streams that share an engine: the newest frame of each, shares by weight, rates, deadlines; in simulated time."""

from __future__ import annotations

import math
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.core.admission import Admission
from saccade.engine.core.lead import AdmissionLead
from saccade.engine.core.step import ImageRequest
from saccade.engine.core.streams import ServiceTime, StreamSettings
from saccade.engine.errors import DeadlineError, SupersededError
from saccade.pipeline.bench.cameras import fair_shares
from tests.support.engine.simulation import Camera, Cost, Simulation, bench_cameras, h200_bf16, h200_fp8, jain


class Asked:
    """A submission that notes what becomes of it."""

    def __init__(self, deadline: float = math.inf, parts: int = 1) -> None:
        self.deadline, self._parts = deadline, parts
        self.planned = False
        self.error: BaseException | None = None

    def plan(self) -> list[ImageRequest[int]]:
        assert not self.planned
        self.planned = True
        return [ImageRequest(0, [], lambda request, error: None) for _ in range(self._parts)]

    def end(self, error: BaseException) -> None:
        assert self.error is None, "ended twice"
        self.error = error


def test_a_newer_frame_takes_the_place_of_one_that_waits() -> None:
    admission: Admission[int] = Admission()
    frames = [Asked() for _ in range(3)]
    for frame in frames:
        admission.offer(frame, "door")
    assert [type(frame.error) for frame in frames] == [SupersededError, SupersededError, type(None)]
    assert (admission.superseded, len(admission)) == (2, 1)
    chosen = admission.next(0.0)
    assert chosen is not None
    assert [frame.planned for frame in frames] == [False, False, True]
    begun = admission.admit(chosen, 0.0)
    admission.offer(newer := Asked(), "door")  # what has begun is not replaced
    assert frames[2].error is None
    admission.over(begun, 1.0, learn=True)
    assert admission.next(1.0) is not None
    assert newer.planned


def test_a_stream_that_keeps_all_runs_them_in_order() -> None:
    admission: Admission[int] = Admission()
    admission.configure("file", StreamSettings(newest=False))
    requests = [ImageRequest(number, [], lambda request, error: None) for number in range(4)]
    for request in requests:
        admission.add(request, "file")
    seen = []
    while (waiting := admission.next(0.0)) is not None:
        seen.append(admission.admit(waiting, 0.0))
    assert seen == requests


def test_no_more_frames_are_run_at_a_time_than_the_stream_may() -> None:
    admission: Admission[int] = Admission()
    admission.configure("door", StreamSettings(in_flight=1))
    admission.offer(Asked(), "door")
    waiting = admission.next(0.0)
    assert waiting is not None
    begun = admission.admit(waiting, 0.0)
    admission.offer(Asked(), "door")
    assert admission.next(0.0) is None
    admission.over(begun, 0.1, learn=True)
    assert admission.next(0.1) is not None


def test_settings_outlive_thousands_of_other_streams() -> None:
    """Streams that were given none are forgotten in time, with what was learned of them."""
    admission: Admission[int] = Admission()
    for number in range(6000):
        admission.configure(number, StreamSettings(weight=4.0))
    for number in range(6000):
        admission.stream(("passing", number))
    assert all(admission.stream(number).settings.weight == 4.0 for number in range(6000))
    assert len(admission._streams) < 6000 + 4500


def test_a_frame_that_cannot_be_in_time_costs_nothing() -> None:
    admission: Admission[int] = Admission()
    admission.offer(Asked(), "door")
    waiting = admission.next(0.0)
    assert waiting is not None
    admission.over(admission.admit(waiting, 0.0), 0.4, learn=True)
    admission.offer(late := Asked(deadline=1.2), "door")
    assert admission.next(1.0) is None
    assert isinstance(late.error, DeadlineError)
    assert not late.planned
    assert "an answer takes 0.4" in str(late.error)
    admission.offer(early := Asked(deadline=1.2), "door")
    assert admission.next(0.5) is not None
    assert early.planned


def test_an_estimate_that_is_never_met_is_doubted() -> None:
    service = ServiceTime()
    service.measured(1.0)
    first, tries = service.seconds, 0
    while service.seconds > 0.2:
        service.doubt()
        tries += 1
    assert first > 1.0
    assert tries < 50


def test_images_are_admitted_as_early_as_they_need() -> None:
    lead = AdmissionLead(decodes=3)
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
            st.sampled_from(["offer", "add", "next", "over", "withdraw", "expire", "configure", "forget"]),
            st.integers(0, 3),
        ),
        max_size=80,
    ),
    seed=st.integers(0, 2**32),
)
def test_each_request_is_run_or_ends_once(acts: list[tuple[str, int]], seed: int) -> None:
    dice, now = random.Random(seed), 0.0
    admission: Admission[int] = Admission()
    asked: list[Asked] = []
    running: list[ImageRequest[int]] = []
    for act, key in acts:
        now += dice.choice([0.0, 0.01, 0.3])
        if act == "offer":
            asked.append(Asked(dice.choice([math.inf, now + 0.5, now]), dice.choice([0, 1, 1, 3])))
            admission.offer(asked[-1], key)
        elif act == "add":
            admission.add(ImageRequest(0, [], lambda request, error: None), dice.choice([None, 9]))
        elif act == "next" and (waiting := admission.next(now)) is not None:
            running.append(admission.admit(waiting, now))
        elif act == "over" and running:
            admission.over(running.pop(dice.randrange(len(running))), now, learn=dice.random() < 0.7)
        elif act == "withdraw" and asked:
            admission.withdraw(dice.choice(asked), RuntimeError("cancelled"))
        elif act == "expire":
            for part in admission.expire(now):
                admission.over(part, now, learn=False)
        elif act == "configure":
            rate = dice.choice([None, 2.0])
            admission.configure(key, StreamSettings(dice.choice([0.5, 1, 4]), rate, dice.choice([1, 2])))
        elif act == "forget":
            admission.forget(key)
        assert len(admission) == len(admission.requests)
    while running:
        admission.over(running.pop(), now, learn=True)
    for _ in range(1000):
        now += 1.0
        while (waiting := admission.next(now)) is not None:
            admission.over(admission.admit(waiting, now), now, learn=False)
        if not len(admission):
            break
    assert not len(admission)
    for one in asked:
        assert one.planned or one.error is not None


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
    admission: Admission[int] = Admission()
    due: list[tuple[float, int]] = []
    for number, (fps, weight) in enumerate(cameras):
        admission.configure(number, StreamSettings(weight=weight))
        phase = dice.random()
        due += [((phase + i) / (fps * scale), number) for i in range(int(seconds * fps * scale))]
    waiting, now = deque(sorted(due)), 0.0
    offered, looks = [0] * len(cameras), [0] * len(cameras)
    while waiting:
        while waiting and waiting[0][0] <= now:
            at, number = waiting.popleft()
            offered[number] += 1
            admission.offer(Asked(), number, at)
        chosen = admission.next(now)
        if chosen is not None:
            looks[chosen.stream.key] += 1  # type: ignore[index]
            admission.over(admission.admit(chosen, now), now, learn=False)
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


def test_prefills_with_nothing_between_are_launched_ahead() -> None:
    lead = AdmissionLead(decodes=3)
    lead.launched(0.002)
    assert lead.launch_at(8, 1.0) == math.inf
    for _ in range(20):
        lead.prefilled(8, 0.030)
    ahead = 1.0 + 0.030 - 0.0025  # with two deviations
    assert lead.launch_at(8, 1.0) == pytest.approx(ahead, abs=1e-6) == lead.admit_at(8, 1.0)  # all are prepared
    lead.prepared(0.008)
    assert lead.admit_at(8, 1.0) < ahead - 0.008
    for _ in range(6):
        for _ in range(3):
            lead.decoded()
        lead.prefilled(8, 0.030)
    assert lead.launch_at(8, 1.0) == math.inf


def test_a_slow_first_prefill_does_not_make_all_others_late() -> None:
    """What is admitted by an estimate is read when that is over: a prefill that had run before took less."""
    lead, now, takes = AdmissionLead(decodes=0), 0.0, 0.003
    lead.prepared(0.001)
    for number in range(40):
        spent = 0.05 if not number else max(takes, lead.admit_at(8, now) - now)
        lead.prefilled(8, spent, waited=spent <= takes)
        now += spent
    assert lead.admit_at(8, now) - now < takes

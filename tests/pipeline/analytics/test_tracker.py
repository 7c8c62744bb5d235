"""Crossings, occlusions and re-entries of objects on known paths, at any frame rate; and what holds for any boxes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.analytics.tracker import Tracker, TrackerSettings
from tests.pipeline.analytics import scenes
from tests.pipeline.analytics.scenes import follow, numbers_of, straight, watch

ORACLE = Path(__file__).parent / "data" / "botsort.json"

ACROSS = straight((0.1, 0.5), (0.9, 0.5), 4)
BACK = straight((0.9, 0.52), (0.1, 0.52), 4)
DIAGONAL = straight((0.2, 0.2), (0.8, 0.8), 4)
STANDING = straight((0.5, 0.3), (0.5, 0.3), 4)

SCENES = {
    "one": [ACROSS],
    "one standing": [STANDING],
    "two that cross": [ACROSS, straight((0.1, 0.8), (0.9, 0.15), 4)],
    "two that meet face to face": [ACROSS, BACK],
    "two side by side": [ACROSS, straight((0.1, 0.62), (0.9, 0.62), 4)],
    "one hidden for half a second": [straight((0.1, 0.5), (0.9, 0.5), 4, hidden=(1.8, 2.3))],
    "three and a standing one": [ACROSS, DIAGONAL, straight((0.9, 0.2), (0.1, 0.9), 4), STANDING],
}


@pytest.mark.parametrize("fps", [8, 10, 15, 25, 30])
@pytest.mark.parametrize("scene", SCENES)
def test_each_object_keeps_its_number(scene: str, fps: float) -> None:
    numbers = follow(Tracker(), watch(SCENES[scene], fps))
    owned = [numbers_of(path, numbers) for path in range(len(SCENES[scene]))]
    assert [len(own) for own in owned] == [1] * len(owned)
    assert len(set.union(*owned)) == len(owned)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scene", SCENES)
def test_after_losing_half_of_the_frames_numbers_stay(scene: str, seed: int) -> None:
    numbers = follow(Tracker(), watch(SCENES[scene], 25, drop=0.5, noise=0.005, seed=seed))
    for path in range(len(SCENES[scene])):
        own = [frame[path] for frame in numbers if frame.get(path)]
        assert own[0] == own[-1]
        # Where two boxes are one on top of the other, which is which cannot be known.
        assert sum(number != own[0] for number in own) <= 2
    assert len({number for frame in numbers for number in frame.values() if number}) == len(SCENES[scene])


@pytest.mark.parametrize(("away_s", "same"), [(0.5, True), (0.9, True), (1.3, False), (3.0, False)])
def test_who_comes_back_within_a_second_is_known(away_s: float, same: bool) -> None:
    path = straight((0.5, 0.5), (0.5, 0.5), 6, hidden=(1, 1 + away_s))
    assert len(numbers_of(0, follow(Tracker(), watch([path], seconds=6)))) == (1 if same else 2)


def test_one_that_is_seen_once_gets_no_number() -> None:
    flash = straight((0.5, 0.5), (0.5, 0.5), 6, hidden=(0.05, 9))
    numbers = follow(Tracker(), watch([straight((0.1, 0.1), (0.1, 0.1), 6), lambda t: flash(t - 1)], seconds=2))
    assert numbers_of(0, numbers) == {1}
    assert follow(Tracker(), watch([lambda t: (0.5, 0.5) if t == 1 else None]))[30] == {0: 0}


def test_low_scores_carry_a_track_on_but_begin_none() -> None:
    frames = watch([ACROSS])
    for number, seen in enumerate(frames):
        seen.scores[:] = 0.9 if number < 20 else 0.3
    assert numbers_of(0, follow(Tracker(), frames)) == {1}
    for seen in frames:
        seen.scores[:] = 0.3
    assert numbers_of(0, follow(Tracker(), frames)) == set()


def test_objects_of_two_classes_share_no_track() -> None:
    tracker = Tracker()
    box, score = np.array([[0.4, 0.4, 0.6, 0.6]]), np.array([0.9])
    for number in range(10):
        ids, _ = tracker.update(box, score, np.array([number // 5]), number / 30)
        assert ids[0] == {5: 0}.get(number, 1 if number < 5 else 2)


def test_velocities_are_per_second_at_any_frame_rate() -> None:
    for fps in (5, 10, 30):
        tracker = Tracker()
        for seen in watch([ACROSS], fps, 3):
            _, velocity = tracker.update(seen.boxes, seen.scores, np.zeros(1, np.int64), seen.seconds)
        assert velocity[0] == pytest.approx([0.2, 0.0], abs=0.01)


def test_a_clock_that_jumps_back_costs_no_track() -> None:
    tracker = Tracker()
    first = follow(tracker, watch([STANDING], seconds=1))
    again = follow(tracker, watch([STANDING], seconds=1))
    assert numbers_of(0, [*first, *again]) == {1}


def test_a_track_does_not_age_while_nothing_moves() -> None:
    tracker = Tracker()
    follow(tracker, watch([STANDING], seconds=1))
    tracker.hold(60)
    frames = watch([lambda t: STANDING(1)], seconds=1)
    later = [scenes.Seen(seen.seconds + 61.03, seen.boxes, seen.scores, seen.paths) for seen in frames]
    assert numbers_of(0, follow(tracker, later)) == {1}


def test_tracks_that_are_not_seen_are_where_they_are_expected() -> None:
    tracker = Tracker()
    follow(tracker, watch([ACROSS], seconds=1))
    none = np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64)
    tracker.update(*none, 1.5)
    unseen = tracker.unseen()
    assert unseen.ids.tolist() == [1]
    assert unseen.for_s[0] == pytest.approx(0.5)
    assert unseen.boxes[0] == pytest.approx([0.35, 0.35, 0.45, 0.65], abs=0.01)
    tracker.update(*none, 9.0)
    tracker.update(*none, 9.1)
    assert len(tracker.unseen().ids) == len(tracker) == 0


boxes = st.lists(st.tuples(*[st.floats(0, 0.8)] * 2, *[st.floats(0.01, 0.2)] * 2, st.floats(0, 1)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(boxes, max_size=12), st.randoms(use_true_random=False))
def test_order_changes_nothing_and_numbers_are_unique(frames: list, dice: object) -> None:
    tracker, shuffled = Tracker(), Tracker()
    ever: set[int] = set()
    for number, rows in enumerate(frames):
        rows = list(dict.fromkeys(rows))
        table = np.array(rows).reshape(-1, 5)
        corners = np.concatenate((table[:, :2], table[:, :2] + table[:, 2:4]), axis=1)
        kinds = (table[:, 0] > 0.4).astype(np.int64)
        order = list(range(len(rows)))
        dice.shuffle(order)  # type: ignore[attr-defined]
        ids, _ = tracker.update(corners, table[:, 4], kinds, number / 10)
        others, _ = shuffled.update(corners[order], table[order, 4], kinds[order], number / 10)
        given_ids = ids[ids > 0].tolist()
        assert len(set(given_ids)) == len(given_ids)
        new = set(given_ids) - ever
        assert all(one > max(ever, default=0) for one in new)
        ever |= new
        assert ids[order].tolist() == others.tolist()


@pytest.mark.parametrize("values", [{"high": 1.1}, {"new": -0.1}, {"low": float("nan")}, {"lost_s": -1}])
def test_settings_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        TrackerSettings(**values)


def test_the_tracks_are_those_of_botsort() -> None:
    """The numbers of `trackers` 2.6.1, BoTSORTTracker(enable_cmc=False), on the same noisy boxes, a sixth missed."""
    oracle = json.loads(ORACLE.read_text())
    tracker = Tracker()
    pairs = []
    for number, frame in enumerate(oracle["frames"]):
        table = np.array(frame, np.float64).reshape(-1, 6)
        ids, _ = tracker.update(table[:, :4], table[:, 4], np.zeros(len(table), np.int64), number / 30)
        pairs += [(mine, int(theirs)) for mine, theirs in zip(ids.tolist(), table[:, 5], strict=True)]
    # The same boxes have numbers, and each number of ours stands for one of theirs.
    assert [mine > 0 for mine, _ in pairs] == [theirs > 0 for _, theirs in pairs]
    assert len(set(pairs)) == len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs})
    assert len({mine for mine, _ in pairs}) > 6

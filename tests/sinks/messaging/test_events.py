"""EventTracker: what becomes an event, an update, an end; compared with a slow and simple model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.sinks.messaging.events import Change, EventTracker, Observation

BOX = (0, 0, 10, 10)


def seen(**counts: int) -> list[Observation]:
    return [Observation(label, 0.8, BOX) for label, count in counts.items() for _ in range(count)]


def steps(changes: list[Change]) -> list[tuple[str, str, int]]:
    return [(change.kind, change.after.label, change.after.count) for change in changes]


# Frames as (second, observations, expected steps), with a hold of 3 s.
STORIES = {
    "one passes": [
        (0, seen(), []),
        (1, seen(person=1), [("new", "person", 1)]),
        (2, seen(person=1), []),
        (5, seen(), []),
        (5.1, seen(), [("end", "person", 0)]),
        (6, seen(), []),
    ],
    "missed on a few frames": [
        (0, seen(person=1), [("new", "person", 1)]),
        (1, seen(), []),
        (2.9, seen(person=1), []),
        (5.8, seen(), []),
        (6, seen(), [("end", "person", 0)]),
    ],
    "one more at once, one less after the hold": [
        (0, seen(car=1), [("new", "car", 1)]),
        (1, seen(car=3), [("update", "car", 3)]),
        (2, seen(car=2), []),
        (3, seen(car=1), []),
        (4.5, seen(car=1), [("update", "car", 2)]),
        (5.5, seen(car=1), [("update", "car", 1)]),
    ],
    "two labels": [
        (0, seen(cat=1, dog=2), [("new", "cat", 1), ("new", "dog", 2)]),
        (2, seen(dog=2), []),
        (4, seen(dog=2), [("end", "cat", 0)]),
    ],
    "a long silence ends it, and a new one begins": [
        (0, seen(cat=1), [("new", "cat", 1)]),
        (100, seen(), [("end", "cat", 0)]),
        (101, seen(cat=1), [("new", "cat", 1)]),
    ],
    "seen after a long silence, it never went": [
        (0, seen(cat=2), [("new", "cat", 2)]),
        (100, seen(cat=1), [("update", "cat", 1)]),
    ],
    "a clock that began again": [
        (1000, seen(cat=2), [("new", "cat", 2)]),
        (0, seen(cat=1), [("update", "cat", 1)]),
        (4, seen(), [("end", "cat", 0)]),
    ],
}


@pytest.mark.parametrize("story", STORIES)
def test_observations_become_the_expected_events(story: str) -> None:
    tracker = EventTracker(3)
    for second, observations, expected in STORIES[story]:
        assert steps(tracker.update("door", second, second, observations)) == expected


def test_only_a_clearly_better_score_is_an_update() -> None:
    tracker = EventTracker()
    scores = [0.5, 0.52, 0.54, 0.56, 0.4, 0.6, 0.62]
    kinds = []
    for second, score in enumerate(scores):
        changes = tracker.update("door", second / 10, 7.0 + second, [Observation("cat", score, (second, 0, 9, 9))])
        kinds.append([(c.kind, c.after.top_score, c.after.score, c.after.box[0]) for c in changes])
    assert kinds == [[("new", 0.5, 0.5, 0)], [], [], [("update", 0.56, 0.56, 3)], [], [], [("update", 0.62, 0.62, 6)]]


def test_the_best_object_gives_score_and_box() -> None:
    (change,) = EventTracker().update(
        "door", 0, 5.0, [Observation("cat", 0.6, BOX), Observation("cat", 0.9, (5, 5, 6, 6))]
    )
    assert (change.after.score, change.after.box, change.after.count) == (0.9, (5, 5, 6, 6), 2)


def test_an_event_has_frigates_json_form() -> None:
    tracker = EventTracker(chance=lambda: 0.999)
    (new,) = tracker.update("door", 0, 1607123955.475377, [Observation("cat", 0.6, BOX)])
    (end,) = tracker.end("door")
    message = end.as_json()
    assert message["type"] == "end"
    assert message["before"] == new.as_json()["after"]
    assert message["after"] == {
        "camera": "door",
        "id": "1607123955.475377-999999",
        "stream": "door",
        "label": "cat",
        "start_time": 1607123955.475377,
        "end_time": 1607123955.475377,
        "score": 0.6,
        "top_score": 0.6,
        "box": BOX,
        "count": 0,
    }


def test_streams_are_separate_and_end_separately() -> None:
    tracker = EventTracker()
    for stream in ("a", "b"):
        tracker.update(stream, 0, 0, seen(cat=1, dog=1))
    assert steps(tracker.end("a")) == [("end", "cat", 0), ("end", "dog", 0)]
    assert tracker.end("a") == []
    assert tracker.update("b", 1, 1, seen(cat=1, dog=1)) == []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), st.integers(0, 40), st.dictionaries(st.sampled_from("xyz"), st.integers(1, 4))
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 30))
@settings(max_examples=150)
def test_counts_and_events_match_a_simple_model(steps: list[tuple[str, int, dict[str, int]]], hold: int) -> None:
    tracker = EventTracker(hold)
    history: dict[tuple[str, str], list[tuple[int, int]]] = {}
    open_events: dict[tuple[str, str], Change] = {}
    ids = set()
    clock = {"a": 0, "b": 0}
    for stream, step, counts in steps:
        clock[stream] += step
        now = clock[stream]
        for label in "xyz":
            history.setdefault((stream, label), []).append((now, counts.get(label, 0)))
        for change in tracker.update(stream, now, now, seen(**counts)):
            key = (change.after.stream, change.after.label)
            if change.kind == "new":
                assert key not in open_events
                assert change.after.id not in ids
                ids.add(change.after.id)
            else:
                assert change.before == open_events[key].after
                assert change.after.id == change.before.id
            assert (change.after.end_time is None) == (change.kind != "end")
            assert (change.after.count == 0) == (change.kind == "end")
            open_events[key] = change
            if change.kind == "end":
                shown = [at for at, count in history[key] if count]
                assert (change.after.end_time, change.before.start_time) <= (shown[-1], shown[-1])
                assert change.after.end_time == shown[-1]
                del open_events[key]
        for label in "xyz":
            most = max(count for at, count in history[stream, label] if now - at <= hold)
            event = open_events.get((stream, label))
            assert (event.after.count if event else 0) == most
    for stream in ("a", "b"):
        assert {c.after.label for c in tracker.end(stream)} == {name for at, name in open_events if at == stream}
    assert tracker._streams == {}

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.pipeline.workers.desired.state import Config, DesiredState, Difference

DOOR = {"source": "rtsp://192.0.2.7/live", "detect": ["person"], "rules": ["visitor=person for 2s"]}


def test_a_stream_is_added_changed_and_removed() -> None:
    empty = DesiredState()
    one = empty.with_stream("door", DOOR)
    other = one.with_stream("door", {**DOOR, "detect": ["cat"]})
    assert (one.revision, other.revision) == (1, 2)
    assert one.streams["door"]["detect"] == ["person"]
    assert other.without_stream("door").streams == {}
    assert empty.streams == {}


@pytest.mark.parametrize("change", ["stream", "removal", "setting"])
def test_what_changes_nothing_makes_no_revision(change: str) -> None:
    state = DesiredState().with_stream("door", DOOR).with_setting("token", "x")
    same = {
        "stream": state.with_stream("door", {**DOOR, "name": "door"}),
        "removal": state.without_stream("yard"),
        "setting": state.with_setting("token", "x"),
    }
    assert same[change] is state


def test_a_setting_is_removed_by_none() -> None:
    state = DesiredState().with_setting("token", "x").with_setting("model", "nano").with_setting("token", None)
    assert state.settings == {"model": "nano"}


def test_a_state_cannot_be_changed_in_place() -> None:
    with pytest.raises(TypeError):
        DesiredState().with_stream("door", DOOR).streams["yard"] = DOOR  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "config"), [("a b", {}), ("", {}), ("a", {"x": object()}), ("a", {"x": float("nan")})]
)
def test_what_cannot_be_kept_is_refused(name: str, config: Config) -> None:
    with pytest.raises(ValueError, match=r"."):
        DesiredState().with_stream(name, config)


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ({}, Difference(open=("a", "b"))),
        ({"a": {"name": "a"}, "b": {"name": "b"}}, Difference()),
        ({"a": {"name": "a", "conf": 0.4}, "c": {}}, Difference(("b",), ("a",), ("c",))),
    ],
)
def test_the_difference_says_what_is_to_be_done(running: Mapping[str, Config], expected: Difference) -> None:
    state = DesiredState().with_stream("a", {}).with_stream("b", {})
    assert state.difference(running) == expected
    assert bool(expected) == (running.keys() != state.streams.keys())


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2)),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2)),
)
def test_doing_the_difference_makes_the_states_equal(first: dict[str, int], second: dict[str, int]) -> None:
    def made(values: dict[str, int]) -> DesiredState:
        state = DesiredState()
        for name, value in values.items():
            state = state.with_stream(name, {"conf": value})
        return state

    running = dict(made(first).streams)
    wanted = made(second)
    difference = wanted.difference(running)
    for name in difference.close:
        del running[name]
    for name in (*difference.open, *difference.change):
        running[name] = wanted.streams[name]
    assert not wanted.difference(running)

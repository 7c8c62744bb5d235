"""From one configuration to another: each change in a table, and sequences of edits against a fresh start."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.control.plan import Close, Open, Reopen, Update, change_of, differences, later, merge, plan

DOOR = {"name": "door", "source": "rtsp://c/door", "detect": ["person"]}
YARD = {"name": "yard", "source": "rtsp://c/yard", "detect": ["car"]}
ZONES = {"desk": ".1,.1,.9,.1,.9,.9"}


def run_of(*streams: dict[str, Any], **values: Any) -> RunConfig:
    return load(None, {"http": "127.0.0.1:0", "streams": list(streams), **values}).resolved()


def shown(old: RunConfig, new: RunConfig) -> list[tuple[str, str, list[str]]]:
    return [(type(change).__name__, change.name, sorted(getattr(change, "keys", ()))) for change in plan(old, new)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"detect": ["cat"]}, [("Update", "door", ["detect"])]),
        ({"conf": 0.3, "weight": 4}, [("Update", "door", ["conf", "weight"])]),
        ({"zones": ZONES, "rules": ["a=person in desk"]}, [("Update", "door", ["rules", "zones"])]),
        ({"track": True, "tiles": 2, "motion_area": 0.1}, [("Update", "door", ["motion_area", "tiles", "track"])]),
        ({"source": "rtsp://c/other"}, [("Reopen", "door", ["source"])]),
        ({"detect": ["cat"], "in_flight": 3}, [("Reopen", "door", ["detect", "in_flight"])]),
        ({"sinks": ["a.jsonl"]}, [("Reopen", "door", ["sinks"])]),
        ({"gates": ["motion"]}, [("Reopen", "door", ["gates"])]),
        ({"loop": True}, [("Reopen", "door", ["loop"])]),
        ({"name": "gate"}, [("Close", "door", []), ("Open", "gate", [])]),
    ],
)
def test_a_change_of_one_stream(changes: dict[str, Any], expected: list[tuple[str, str, list[str]]]) -> None:
    assert shown(run_of(DOOR, YARD), run_of({**DOOR, **changes}, YARD)) == expected


def test_streams_end_before_others_begin() -> None:
    old, new = run_of(DOOR, YARD), run_of({**YARD, "conf": 0.4}, {**DOOR, "name": "gate"})
    assert shown(old, new) == [("Close", "door", []), ("Update", "yard", ["conf"]), ("Open", "gate", [])]


def test_settings_for_all_streams_are_those_of_each() -> None:
    common = {"detect": ["person"], "streams": [{"source": "rtsp://c/a"}, {"source": "rtsp://c/a", "conf": 0.3}]}
    old, new = load(None, common), load(None, {**common, "conf": 0.6})
    assert [change.name for change in plan(old, new)] == ["c-a"]
    assert plan(old.resolved(), old) == plan(old, old.resolved()) == []
    assert list(old.named()) == ["c-a", "c-a-2"]
    assert old.resolved().resolved() == old.resolved()


def test_what_holds_only_after_a_restart_is_named() -> None:
    assert later(run_of(DOOR), run_of(DOOR, model="tiny", store="kept")) == ["model", "store"]
    assert later(run_of(DOOR), run_of(YARD)) == []


STREAM = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["rtsp://c/1", "rtsp://c/2"]),
        "detect": st.lists(st.sampled_from(["person", "car", "dog"]), min_size=1, max_size=2, unique=True),
        "conf": st.sampled_from([0.2, 0.5]),
        "weight": st.sampled_from([1.0, 4.0]),
        "zones": st.sampled_from([{}, ZONES]),
        "in_flight": st.sampled_from([1, 2]),
    }
)
STREAMS = st.dictionaries(st.sampled_from("abcd"), STREAM, max_size=4)


def configured(streams: dict[str, dict[str, Any]]) -> RunConfig:
    return run_of(*({**values, "name": name} for name, values in streams.items()))


def as_state(config: RunConfig) -> dict[str, ListedStream]:
    return config.named()


class World:
    """What runs, as far as a plan knows: changes are made as `Local` makes them."""

    def __init__(self) -> None:
        self.running: dict[str, ListedStream] = {}
        self.begun: dict[str, ListedStream] = {}  # the configuration that each was opened from

    def act(self, old: RunConfig, new: RunConfig) -> None:
        for change in plan(old, new):
            if isinstance(change, Close):
                del self.running[change.name], self.begun[change.name]
            elif isinstance(change, Update):
                assert not differences(self.running[change.name], change.stream) - change.keys
                self.running[change.name] = change.stream
            else:
                assert isinstance(change, Open) == (change.name not in self.running)
                self.running[change.name] = self.begun[change.name] = change.stream


@given(st.lists(STREAMS, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_edits_end_where_a_fresh_start_with_the_last_configuration_does(edits: list[dict[str, Any]]) -> None:
    world, fresh, empty = World(), World(), configured({})
    config = empty
    for streams in edits:
        wanted = configured(streams)
        world.act(config, wanted)
        config = wanted
        assert world.running == as_state(config)
    fresh.act(empty, config)
    assert world.running == fresh.running
    for name, stream in world.running.items():  # what needs another source or queue was opened with it
        assert not isinstance(change_of(name, world.begun[name], stream), Reopen)


@given(STREAMS, STREAMS, STREAMS)
@settings(max_examples=150, deadline=None)
def test_a_files_changes_and_others_come_together(
    base: dict[str, Any], edited: dict[str, Any], desired: dict[str, Any]
) -> None:
    old, file, wanted = configured(base), configured(edited), configured(desired)
    assert as_state(merge(old, file, old)) == as_state(file)  # nobody else has changed anything
    assert as_state(merge(old, old, wanted)) == as_state(wanted)  # the file is as it was
    merged = as_state(merge(old, file, wanted))
    assert as_state(merge(old, file, merged_config := file.with_streams(merged.values()))) == merged, merged_config
    for name, stream in merged.items():
        in_base, in_file, in_wanted = old.named().get(name), file.named().get(name), wanted.named().get(name)
        for key in ("source", "detect", "conf", "weight", "zones", "in_flight"):
            given_by = [getattr(one, key) for one in (in_file, in_wanted) if one is not None]
            assert getattr(stream, key) in given_by
            if in_file is not None and in_base is not None and getattr(in_file, key) != getattr(in_base, key):
                assert getattr(stream, key) == getattr(in_file, key)
    assert not {name for name in old.named() if name not in file.named()} & merged.keys()

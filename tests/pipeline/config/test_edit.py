from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config import ListedStream
from saccade.pipeline.config.edit import edited, save_streams
from saccade.pipeline.config.edit_rules import text_of_rules
from saccade.pipeline.config.file import load, load_text, read_rules
from saccade.pipeline.errors import ConfigError, TextError
from saccade.pipeline.events.settings import EventSettings, RuleSettings, check_places

FILE = """\
# The cameras of the shop.
streams:
  - name: hall   # over the entrance
    source: "rtsp://192.0.2.7/a"
    zones:
      # where people wait
      queue: .1,.2,.5,.2,.5,.9
      desk: {polygon: '.6,.2,.9,.2,.9,.9', loitering: 10}   # the desk
  - name: yard
    source: rtsp://192.0.2.8/a
detect: [person] # of all
"""


def save(path: Path, changes: dict[int, dict[str, Any]], check: Callable[[Path], object] = lambda path: None) -> None:
    """Write other values of streams, by their number, into a file."""
    given = load(path, {})
    streams = list(given.named().values())
    for number, values in changes.items():
        streams[number] = streams[number].model_copy(update=values)
    save_streams(path, given, given.resolved().with_streams(streams), check)


def test_only_what_is_other_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    hall, _ = load(path, {}).each()
    save(path, {0: {"zones": hall.zones, "lines": hall.lines}, 1: {"zones": {}}})
    assert path.read_text() == FILE
    changed = Regions.model_validate({"zones": {"desk": hall.zones["desk"]}, "lines": {"gate": "0,0.5,1,0.5"}})
    other = Regions.model_validate({"zones": {"yard": ".1,.1,.9,.1,.9,.9"}})
    save(path, {0: {"zones": changed.zones, "lines": changed.lines}, 1: {"zones": other.zones}})
    text = path.read_text()
    assert [comment in text for comment in ("# The cameras", "# over the entrance", "# the desk", "# of all")] == [
        True
    ] * 4
    assert "queue" not in text
    hall, yard = load(path, {}).each()
    assert (hall.zones, hall.lines) == (changed.zones, changed.lines)
    assert yard.zones["yard"].polygon == [(0.1, 0.1), (0.9, 0.1), (0.9, 0.9)]


def test_one_source_has_them_at_the_top(tmp_path: Path) -> None:
    path = tmp_path / "camera.yaml"
    path.write_text("source: '0' # the webcam\ndetect: person\nzones: ['door=.1,.1,.9,.1,.9,.9']\n")
    wanted = Regions.model_validate({"zones": {"door": {"polygon": ".2,.1,.9,.1,.9,.9", "classes": ["person"]}}})
    save(path, {0: {"zones": wanted.zones}})
    assert load(path, {}).zones == wanted.zones
    assert "# the webcam" in path.read_text()
    save(path, {0: {"zones": {}}})
    assert "zones" not in path.read_text()


RULES = """\
# top
source: a.mp4
rules: # all of them
  # who stands there
  - name: a   # first
    when: person   # cond
    # inside a
    cooldown: 5s
  # the second
  - {name: b, when: dog} # flow

  # third
  - name: c
    when: 'cat'
# end
detect: [person]
"""


def rules_of(*values: object) -> list[RuleSettings]:
    return EventSettings.model_validate({"rules": list(values)}).rules


OLD = rules_of({"name": "a", "when": "person", "cooldown": 5}, "b=dog", "c=cat")
NEW = {"name": "d", "when": "car", "attributes": {"bag": {"question": "A bag?", "choices": ["yes", "no"]}, "on": "no"}}


@pytest.mark.parametrize(
    ("rules", "gone", "come"),
    [
        (OLD, "", ""),
        (OLD[::2], "  # the second\n  - {name: b, when: dog} # flow\n", ""),
        (OLD[:2], "\n  # third\n  - name: c\n    when: 'cat'\n", ""),
        (
            [*rules_of({"name": "a", "when": "person for 2s", "ask": "A hat?", "expect": "no"}), *OLD[1:]],
            "person   # cond\n    # inside a\n    cooldown: 5s\n",
            "person for 2s   # cond\n    # inside a\n    ask: A hat?\n    expect: 'no'\n",
        ),
        (
            [*OLD, *rules_of(NEW)],
            "",
            "  - name: d\n    when: car\n"
            "    attributes: {bag: {question: 'A bag?', choices: ['yes', 'no']}, 'on': 'no'}\n",
        ),
        ([], RULES[RULES.index("  - name: a") : RULES.index("# end")], "  []\n"),
    ],
)
def test_rules_are_written_where_they_changed(rules: list[RuleSettings], gone: str, come: str, tmp_path: Path) -> None:
    path = tmp_path / "camera.yaml"
    path.write_text(RULES)
    save(path, {0: {"rules": rules}})
    text, at = path.read_text(), RULES.index(gone) if gone else RULES.index("# end")
    assert text == RULES[:at] + come + RULES[at + len(gone) :]
    assert load(path, {}).rules == rules


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "streams: [{source: a, detect: cat}]\n",
            "streams: [{source: a, detect: cat, rules: [{name: b, when: dog}]}]\n",
        ),
        (
            "detect: x\nstreams:\n- source: a",
            "detect: x\nstreams:\n- source: a\n  rules:\n    - name: b\n      when: dog\n",
        ),
        (
            "streams:\n- source: a\n  rules: [c=cat] # hm\n",
            "streams:\n- source: a\n  rules: [{name: b, when: dog}] # hm\n",
        ),
        (
            "streams:\n- source: a\n  rules:\n  - b=dog # x\n  - c=cat\n",
            "streams:\n- source: a\n  rules:\n  - b=dog # x\n",
        ),
    ],
)
def test_rules_come_into_files_of_every_shape(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(before)
    save(path, {0: {"rules": rules_of("b=dog")}})
    assert path.read_text() == after


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "camera.yaml"
    path.write_text(RULES)
    with pytest.raises(ConfigError, match=r"not saved: camera.yaml:6:21: .*no zone 'door'"):
        save(path, {0: {"rules": rules_of("a=person in door")}}, lambda new: load(new, {}))
    assert path.read_text() == RULES
    assert [one.name for one in tmp_path.iterdir()] == ["camera.yaml"]


def test_rules_as_text_are_read_back_as_they_were() -> None:
    rules = rules_of(
        {"name": "a", "when": 'any in "front yard" for 2s', "cooldown": 120, "keep": "7d"},
        {"name": "b", "when": "dog", "ask": "Is it, # really?", "expect": "no", "threshold": {"on": 0.7, "off": 0.2}},
        NEW,
    )
    text = text_of_rules(rules)
    assert text.startswith('- name: a\n  when: any in "front yard" for 2s\n  cooldown: 2m\n  keep: 7d\n- name: b\n')
    assert read_rules(text, lambda rules: None) == rules
    assert (text_of_rules([]), read_rules("", lambda rules: None)) == ("", [])


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("- name: a\n  when: person in door fro 2s\n", 2, 24, "expected 'between', 'for' or the end, got 'fro'"),
        ("- name: a\n  when: 'person in dor'\n", 2, 20, "there is no zone 'dor'; zones: door"),
        ("- name: a\n  whn: person\n", 2, 3, "unknown key 'whn'; did you mean 'when'?"),
        ("- name: a\n", 1, 3, "when is missing"),
        ("- name: a\n  when: dog\n  cooldwn: 1s\n", 3, 3, "did you mean 'cooldown'?"),
        ("- name: a\n   when: u", 2, 8, "invalid YAML"),
        ("- name: a\n  when: u\n  when: v", 3, 3, "defined twice, first in line 2"),
        ("a: 3", 1, 1, "expected a list of rules, such as [{name: visitor, "),
    ],
)
def test_a_mistake_in_rules_has_its_place(text: str, line: int, column: int, words: str) -> None:
    regions = Regions.model_validate({"zones": {"door": ".1,.1,.9,.1,.9,.9"}})
    with pytest.raises(TextError) as raised:
        read_rules(text, lambda rules: check_places(rules, regions))
    assert (raised.value.line, raised.value.column, words in str(raised.value)) == (line, column, True)


@pytest.mark.parametrize("text", ["streams: 3\n", "a: [\n", "streams:\n- a\n"])
def test_a_file_of_another_shape_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    before = load(path, {})
    path.write_text(text)
    changed = [stream.model_copy(update={"rules": OLD, "conf": 0.1}) for stream in before.named().values()]
    with pytest.raises(ConfigError, match="another program changed the file"):
        save_streams(path, before, before.resolved().with_streams(changed))
    assert path.read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == ["cameras.yaml"]


ADDED = {"name": "new", "source": "a.mp4", "detect": ["cat"], "zones": {"z": ".1,.1,.9,.1,.9,.9"}, "rules": ["r=cat"]}
WRITTEN = """\
  - name: new
    source: a.mp4
    detect: [cat]
    rules:
      - name: r
        when: cat
    zones:
      z: 0.1,0.1,0.9,0.1,0.9,0.9
"""
COMMENTED = """\
detect: person
streams:
  # a
  - source: a  # first
    conf: .3 # low
  # b
  - name: b
    source: c
# end
"""
LISTS = """\
source: a
detect:
  - cat
  - dog # d
weight: 3 # w
query: |
  why?
  really?
model: tiny
"""


@pytest.mark.parametrize(
    ("before", "changes", "added", "after"),
    [
        (  # a key of one stream, and one stream less with the comments above it
            COMMENTED,
            {"a": {"conf": 0.4, "weight": 2.0}, "b": None},
            [],
            COMMENTED[: COMMENTED.index("  # b")].replace(".3", "0.4") + "    weight: 2.0\n# end\n",
        ),
        (
            "streams:\n  - source: a\n    detect: cat",
            {},
            [ADDED],
            "streams:\n  - source: a\n    detect: cat\n" + WRITTEN,
        ),
        ("http: '1'\n", {}, [ADDED], "http: '1'\nstreams:\n" + WRITTEN),
        ("http: '1'\nstreams: []\n", {}, [ADDED], "http: '1'\nstreams:\n" + WRITTEN),
        (  # settings for all streams are no settings of the new one
            "detect: [cat]\nconf: .3\nstreams: [{source: a}]\n",
            {},
            [{"name": "n", "source": "b", "detect": ["cat"]}],
            "detect: [cat]\nconf: .3\nstreams: [{source: a}, {name: n, source: b, conf: 0.5}]\n",
        ),
        ("http: '1'\nstreams: [{source: a, detect: cat}]\n", {"a": None}, [], "http: '1'\nstreams: []\n"),
        (
            "streams: [{source: a, detect: cat}, {source: b, detect: cat}]\n",
            {"a": None},
            [],
            "streams: [{source: b, detect: cat}]\n",
        ),
        (  # one source becomes the first of several
            "# my camera\nname: hall\nsource: a # here\ndetect: person\n",
            {"hall": {"detect": ["dog"]}},
            [{"name": "n", "source": "b", "detect": ["person"]}],
            "# my camera\nstreams:\n  - name: hall\n    source: a # here\n    detect: [dog]\n"
            "  - name: n\n    source: b\ndetect: person\n",
        ),
        ("http: '1'\nsource: a # here\ndetect: person\n", {"a": None}, [], "http: '1'\ndetect: person\n"),
        (  # lists in lines, texts of several lines, and a value that is by default again
            LISTS,
            {"a": {"detect": ["cow"], "weight": 1.0, "query": ["who?"], "max_fps": 2.0}},
            [],
            "source: a\ndetect: [cow] # d\nquery: ['who?']\nmodel: tiny\nmax_fps: 2.0\n",
        ),
        (  # behind the dash, and as a setting for all says
            "conf: .3\nstreams:\n- detect: cat\n  source: a\n- source: b\n  detect: cow\n  conf: 0.4\n",
            {"a": {"detect": [], "point": ["cat"]}, "b": {"conf": 0.3}},
            [],
            "conf: .3\nstreams:\n- source: a\n  point: [cat]\n- source: b\n  detect: cow\n",
        ),
    ],
)
def test_streams_and_all_of_their_settings_are_written(
    before: str, changes: dict[str, dict[str, Any] | None], added: list[dict[str, Any]], after: str, tmp_path: Path
) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(before)
    old = load(path, {})
    streams = dict(old.named())
    for name, values in changes.items():
        stream = streams.pop(name)
        if values is not None:
            streams[name] = stream.model_copy(update=values)
    wanted = old.resolved().with_streams([*streams.values(), *map(ListedStream.model_validate, added)])

    def check(new: Path) -> None:
        assert load(new, {}).named() == wanted.named()

    save_streams(path, old, wanted, check)
    assert path.read_text() == after
    save_streams(path, load(path, {}), wanted, check)
    assert path.read_text() == after


NAMES = st.lists(st.sampled_from(["person", "no", "- x", "#1", "it's"]), min_size=1, max_size=3, unique=True)
VALUES = st.fixed_dictionaries(
    {"source": st.sampled_from(["a", "rtsp://c/b", "it's: odd #1"])},
    optional={
        "detect": NAMES,
        "query": st.lists(st.sampled_from(["Is it [yes|no]?", "a: b", "two\nlines"]), max_size=2),
        "conf": st.sampled_from([0.1, 0.5]),
        "max_fps": st.sampled_from([None, 2.5]),
        "queue": st.sampled_from([None, "keep 3"]),
        "zones": st.sampled_from(
            [{}, {"a b": ".1,.1,.9,.1,.9,.9"}, {"yes": {"polygon": "0,0,1,0,1,1", "loitering": 3}}]
        ),
        "rules": st.sampled_from([[], ["r=person"], [{"name": "q", "when": "dog", "ask": "Is it: so?", "keep": "2d"}]]),
        "gates": st.sampled_from([[], ["motion"]]),
        "sinks": st.lists(st.sampled_from(["a-{stream}.jsonl", "ws://127.0.0.1:1?x=#"]), max_size=2, unique=True),
    },
)
FILES = st.fixed_dictionaries(
    {"streams": st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)},
    optional={"detect": st.just(["person"]), "conf": st.just(0.3), "gates": st.just(["motion"])},
)


class Plain(yaml.SafeDumper):
    """Writes no aliases: what one stands for cannot be changed for one stream alone."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def as_file(values: dict[str, Any]) -> dict[str, Any]:
    streams = [{"name": name, "point": ["x"], **stream} for name, stream in values["streams"].items()]
    return {"http": "127.0.0.1:0", **values, "streams": streams}


@given(FILES, FILES, st.booleans(), st.integers(2, 4))
@settings(max_examples=200, deadline=None)
def test_any_configuration_can_be_written_over_any_other(
    old: dict[str, Any], new: dict[str, Any], flow: bool, indent: int
) -> None:
    text = yaml.dump(as_file(old), Dumper=Plain, default_flow_style=flow, indent=indent, sort_keys=False)
    text = text if flow else f"# first\n{text}# last\n"
    wanted = load_text(yaml.safe_dump(as_file(new))).resolved()
    written = edited(text, load_text(text), wanted)
    assert load_text(written).named() == wanted.named()
    assert edited(written, load_text(written), wanted) == written
    assert flow or ("# first\n" in written and "# last" in written)

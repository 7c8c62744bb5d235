from __future__ import annotations

from pathlib import Path

import pytest

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config.edit import save_settings
from saccade.pipeline.config.edit_rules import text_of_rules
from saccade.pipeline.config.file import load, read_rules
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


def test_only_what_is_other_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    hall, _ = load(path, {}).each()
    same = Regions(zones=hall.zones, lines=hall.lines)
    save_settings(path, {0: same, 1: Regions()}, {})
    assert path.read_text() == FILE
    changed = Regions.model_validate({"zones": {"desk": hall.zones["desk"]}, "lines": {"gate": "0,0.5,1,0.5"}})
    save_settings(path, {0: changed, 1: Regions.model_validate({"zones": {"yard": ".1,.1,.9,.1,.9,.9"}})}, {})
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
    save_settings(path, {None: wanted}, {})
    assert load(path, {}).zones == wanted.zones
    assert "# the webcam" in path.read_text()
    save_settings(path, {None: Regions()}, {})
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
    save_settings(path, {}, {None: rules})
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
        ("streams:\n- source: a", "streams:\n- source: a\n  rules:\n    - name: b\n      when: dog\n"),
        (
            "streams:\n- source: a\n  rules: [c=cat] # hm\n",
            "streams:\n- source: a\n  rules: [{name: b, when: dog}] # hm\n",
        ),
        ("streams:\n- rules:\n  source: a\n", "streams:\n- rules: [{name: b, when: dog}]\n  source: a\n"),
        (
            "streams:\n- source: a\n  rules:\n  - b=dog # x\n  - c=cat\n",
            "streams:\n- source: a\n  rules:\n  - b=dog # x\n",
        ),
    ],
)
def test_rules_come_into_files_of_every_shape(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(before)
    save_settings(path, {}, {0: rules_of("b=dog")})
    assert path.read_text() == after


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "camera.yaml"
    path.write_text(RULES)
    with pytest.raises(ConfigError, match=r"nothing is saved: camera.yaml:6:21: .*no zone 'door'"):
        save_settings(path, {}, {None: rules_of("a=person in door")}, lambda new: load(new, {}))
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
        ("- name: a\n   when: u", 2, 8, "broken YAML"),
        ("- name: a\n  when: u\n  when: v", 3, 3, "given twice, first in line 2"),
        ("a: 3", 1, 1, "should be a list, such as [{name: visitor, "),
    ],
)
def test_a_mistake_in_rules_has_its_place(text: str, line: int, column: int, words: str) -> None:
    regions = Regions.model_validate({"zones": {"door": ".1,.1,.9,.1,.9,.9"}})
    with pytest.raises(TextError) as raised:
        read_rules(text, lambda rules: check_places(rules, regions))
    assert (raised.value.line, raised.value.column, words in str(raised.value)) == (line, column, True)


@pytest.mark.parametrize("text", ["", "streams: []\n", "streams: 3\n", "a: [\n"])
def test_a_file_of_another_shape_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="changed meanwhile"):
        save_settings(path, {0: Regions.model_validate({"zones": {"door": ".1,.1,.9,.1,.9,.9"}})}, {})
    with pytest.raises(ConfigError, match="changed meanwhile"):
        save_settings(path, {}, {0: OLD})
    assert path.read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == ["cameras.yaml"]

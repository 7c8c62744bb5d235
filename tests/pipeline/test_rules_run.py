"""Rules from a configuration through a whole run of nano on the demo clip, over HTTP, and on the command line.

One person stands at the table until 4 s and leaves to the right.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.run import opened_run
from tests.support.clips import MakeClip
from tests.support.command import Command
from tests.support.sinks.rule_events import BEGIN

LONG_S = 90  # far beyond what any of these needs; only so that a hang fails
RULES = """\
zones: {table: ".4,.5,.75,.5,.75,1,.4,1"}
lines: {right: ".78,1,.78,0"}
rules:
  - {name: at-table, when: people in table for 2s}
  - {name: leaves, when: person crosses right forward}
  - {name: empty, when: absent from table for 2s}
vid_stride: 2
end: 6.5
"""
FOUND = [("at-table", 2.0, 3.8), ("leaves", 4.0, 4.0), ("empty", 5.8, 6.4)]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def check(events: list[dict[str, Any]]) -> None:
    ended = [event for event in events if event["type"] == "end"]
    times = [(event["rule"], event["start_time"], event["end_time"]) for event in ended]
    assert times == [(rule, pytest.approx(begin, abs=0.31), pytest.approx(end, abs=0.31)) for rule, begin, end in FOUND]


def test_outputs_hear_of_the_end_of_what_a_kill_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(EventStore(tmp_path / "kept")) as store:
        store.write(BEGIN)
    config = {"detect": ["person"], "end": 0.2, "name": "yard", "store": "kept", "sinks": ["out.jsonl?send=events"]}
    with opened_run(load(None, {**config, "source": str(DEMO_CLIP)})) as opened:
        assert all(run.join(LONG_S) for run in opened.controller.start())
    heard = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert heard == [{**BEGIN, "type": "end", "end_time": BEGIN["frame_time"], "count": 0}]


def test_a_run_writes_events_and_a_backtest_finds_the_same(rules: Path, tmp_path: Path, saccade: Command) -> None:
    done = saccade("run", DEMO_CLIP, "--config", rules, "--sink", "events.jsonl?send=events", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    check(events)
    assert [event["tracks"] for event in events if event["rule"] == "leaves"] == [[1], [1]]
    tested = saccade("backtest", rules, DEMO_CLIP, "--json", "--forecast", cwd=tmp_path)
    found = json.loads(tested.stdout)
    check(found["events"])
    leaves = next(one for one in found["forecast"] if one["rule"] == "leaves")
    assert (leaves["events"], leaves["per_day"]) == (1, pytest.approx(86400 / found["video_s"], rel=0.01))
    assert leaves["low"] == pytest.approx(0.02532 * 86400 / found["video_s"], rel=0.01)
    assert leaves["high"] == pytest.approx(5.5716 * 86400 / found["video_s"], rel=0.01)
    assert found["video_s"] == pytest.approx(6.5, abs=0.2)


def test_a_backtest_writes_nothing_to_the_event_store(rules: Path, tmp_path: Path, saccade: Command) -> None:
    rules.write_text(RULES.replace("end: 6.5", "end: 2.6\nstore: kept"))
    with closing(EventStore(tmp_path / "kept")):  # open and locked, as by a running Saccade
        before = sorted(tmp_path.rglob("*"))
        done = saccade("backtest", rules, DEMO_CLIP, "--forecast", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "at-table" in done.stdout
        assert sorted(tmp_path.rglob("*")) == before


def test_a_backtest_looks_at_no_more_frames_than_it_needs(make_clip: MakeClip, rules: Path, saccade: Command) -> None:
    clip = make_clip(frames=30, rate=30)
    rules.write_text(RULES.replace("vid_stride: 2\n", ""))
    tested = json.loads(saccade("backtest", rules, clip, "--json", cwd=rules.parent).stdout)
    assert (tested["vid_stride"], tested["video_s"]) == (2, 1.0)
    tested = json.loads(
        saccade("backtest", rules, clip, "--json", "--vid-stride", 5, "--gate", "motion", cwd=rules.parent).stdout
    )
    assert (tested["vid_stride"], tested["video_s"]) == (5, 1.0)


PLACES = """\
zones: {all: "0,0,1,0,1,1,0,1"}
rules:
  - {name: confirmed, when: person, confirm: 20 of 20}
  - {name: moving, when: person moving in all}
  - {name: still, when: person stationary in all for 2s}
  - {name: new, when: person appeared}
"""
MASKED = PLACES.replace("}", ', never: {polygon: "0,0,1,0,1,1,0,1", classes: [person], exclude: true}}', 1) + "end: 4\n"


def test_rules_of_the_demo_clip_tell_moving_from_standing_people(tmp_path: Path, saccade: Command) -> None:
    """One person sits from the beginning and goes at 4 s; another one comes at 8 s and stays."""
    path = tmp_path / "places.yaml"
    path.write_text(PLACES)
    found = json.loads(saccade("backtest", path, DEMO_CLIP, "--json", cwd=tmp_path).stdout)["events"]
    begins = [(event["rule"], event["start_time"]) for event in found]
    expected = {"confirmed": [1.9, 9.9], "moving": [4.1], "still": [2.0, 10.0], "new": [8.0]}
    for rule, times in expected.items():
        assert [time for name, time in begins if name == rule] == pytest.approx(times, abs=0.5), rule
    path.write_text(MASKED)
    assert json.loads(saccade("backtest", path, DEMO_CLIP, "--json", cwd=tmp_path).stdout)["events"] == []


def test_a_drafted_rule_is_valid_in_its_file(rules: Path, tmp_path: Path, saccade: Command) -> None:
    done = saccade("rules", "draft", "tell me when someone stands at the table for 2 s", rules, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:3] == ["rules:", "  - name: person-table", "    when: person in table for 2s"]
    done = saccade("rules", "draft", "tell me when a gryphon is at the table", rules, cwd=tmp_path)
    assert (done.returncode, "gryphon" in done.stderr) == (2, True)


def test_rules_are_checked_without_a_model(rules: Path, tmp_path: Path, saccade: Command) -> None:
    done = saccade("rules", "check", rules, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "at-table: people in table for 2s",
        "leaves: person crosses right forward",
        "empty: absent from table for 2s",
        "3 rules are valid",
    ]
    rules.write_text(RULES.replace("for 2s}", "fro 2s}", 1))
    done = saccade("rules", "check", rules, cwd=tmp_path)
    message = (
        "rules.yaml:4:44: rules[0].when: expected 'between', 'for' or the end, got 'fro' (a name of several words goes "
        "in quotes)"
    )
    assert (done.returncode, done.stderr.strip()) == (2, f"saccade: {tmp_path}/{message}")
    rules.write_text(RULES.replace("person crosses", "persn crosses", 1))
    done = saccade("rules", "check", rules, cwd=tmp_path)
    assert (done.returncode, "did you mean 'person'?" in done.stderr) == (2, True)
    done = saccade("backtest", "rules.yaml", "none.mp4", cwd=tmp_path)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules:\n  - name: a\n    when: 'person in hal'\n", ":3:22: rule 'a': there is no zone 'hal'; zones: hall"),
        ('rules: [{name: a, when: "any crosses hall"}]\n', ":1:38: rule 'a': there is no line 'hall'; lines: none"),
        (
            "rules: [{name: a, when: person}, {name: a, when: dog}]\n",
            ":1:1: rules: two rules have the name 'a'; use a different name for each",
        ),
        ("rules: [{name: a b, when: person}]\n", ":1:10: rules[0].name: a rule name should be up to 64 letters"),
        ("rules: [{name: a}]\n", ":1:9: when is missing"),
        ("rules: [{name: a, when: person, wen: 1}]\n", ":1:33: unknown key 'wen'"),
        ("rules: [{name: a, when: person, cooldown: long}]\n", ":1:33: rules[0].cooldown: should be a valid number"),
        (
            "rules: [{name: a, when: dog, expect: no}]\n",
            ":1:30: rules[0].expect: this key needs a question: add the key ask to the rule",
        ),
        (
            "rules: [{name: a, when: dog, scope: frame}]\n",
            ":1:30: rules[0].scope: this key needs a question: add the key ask to the rule",
        ),
        (
            "rules: [{name: a, when: absent, attributes: {hat: Is there a hat}}]\n",
            ":1:33: rules[0].attributes: questions cannot be used with the condition 'absent'",
        ),
        (
            "rules: [{name: a, when: dog, attributes: {big: {question: Is it big, choices: 'yes'}}}]\n",
            ":1:70: rules[0].attributes.big.choices: list two or more choices, or remove `choices` to allow any answer",
        ),
        ("streams:\n  - source: a\n    rules: [{name: a, when: any in x}]\n", ":3:36: rule 'a': there is no zone 'x'"),
    ],
)
def test_a_mistake_in_a_rule_has_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text + "zones: {hall: '.1,.1,.5,.1,.5,.5'}\ndetect: cat\n")
    with pytest.raises(ConfigError) as raised:
        load(path, {}, source="a.mp4")
    assert str(raised.value).startswith(f"{path}{message}")


def test_what_rules_name_is_detected_by_itself() -> None:
    config = load(None, {"source": "a", "rules": ["a=person or car", "b=dog absent for 1s"], "detect": "car"})
    assert config.asked == [("detect", "car"), ("detect", "person"), ("detect", "dog")]


def test_a_run_stores_events_and_serves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"source": str(DEMO_CLIP), "start": 8, "end": 10.5, "rules": ["visitor=person for 0.5s"], "vid_stride": 2}
    with opened_run(load(None, {**keys, "http": "127.0.0.1:0", "store": "kept"})) as opened:
        assert opened.server is not None
        assert all(run.join(LONG_S) for run in opened.controller.start())
        assert opened.controller.local.store is not None
        opened.controller.local.store.flush()
        status, page = request("GET", f"{opened.url}/events?q=pers&rule=visitor")
        assert (status, [one["label"] for one in page["events"]]) == (200, ["person"])
        _, event = request("GET", f"{opened.url}/events/{page['events'][0]['id']}")
        assert event["end_time"] is not None
        assert [path["track_id"] for path in event["paths"]] == event["tracks"]
        assert len(event["paths"][0]["path"]) > 2
        again = opened_run(load(None, {**keys, "store": "kept"}))
        with pytest.raises(ConfigError, match="--store: kept: another process is using this event store"), again:
            pass


def request(method: str, url: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
    data = None if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=LONG_S) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_rules_are_set_over_http_while_a_stream_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened_run(load(None, {"http": "127.0.0.1:0", "sinks": ["e.jsonl?send=events"]})) as opened:
        assert opened.server is not None
        base = f"{opened.url}/streams"
        body = {"source": str(DEMO_CLIP), "name": "room", "detect": ["dog"], "in_flight": 1}
        assert request("POST", base, body)[0] == 201
        rules = [{"name": "visitor", "when": "person", "cooldown": 5}]
        assert request("PUT", f"{base}/room/rules", {"rules": rules}) == (200, {"rules": rules})
        assert request("GET", f"{base}/room/rules") == (200, {"rules": rules})
        assert request("PUT", f"{base}/room/rules", {"rules": [{"name": "x", "when": "any in hall"}]}) == (
            422,
            {"error": "rule 'x': there is no zone 'hall'; zones: none"},
        )
        status, changed = request("PATCH", f"{base}/room", {"detect": ["cat"]})
        assert (status, changed["detect"]) == (200, ["cat", "person"])  # what the rule names is still found
        status, wrong = request("PUT", f"{base}/room/rules", {"rules": [{"name": "x", "when": "unicorn"}]})
        assert (status, "unicorn" in wrong["error"]) == (422, True)
        text, yaml = "- name: x\n  when: cat or unicorn\n", "application/yaml"
        status, wrong = request("POST", f"{base}/room/rules/check", text, yaml)
        assert (status, wrong["line"], wrong["column"], "unicorn" in wrong["error"]) == (422, 2, 16, True)
        status, wrong = request("PUT", f"{base}/room/rules", "- name: x\n  when: dog\n  ask: Is it wet?\n", yaml)
        assert (status, wrong["line"], "cannot answer" in wrong["error"]) == (422, 3, True)
        text = "- name: y\n  when: dog\n"
        assert request("POST", f"{base}/room/rules/check", text, yaml)[1] == {"rules": [{"name": "y", "when": "dog"}]}
        assert request("GET", f"{base}/room/rules") == (200, {"rules": rules})  # which changed nothing
        as_text = urllib.request.Request(f"{base}/room/rules", headers={"Accept": yaml})
        with urllib.request.urlopen(as_text) as answer:
            assert answer.read().decode() == "- name: visitor\n  when: person\n  cooldown: 5s\n"
        status, state = request("GET", f"{base}/room/rules/state")
        assert (status, [(one["name"], one["problem"]) for one in state["rules"]]) == (200, [("visitor", None)])
        deadline = time.monotonic() + LONG_S
        while not (path := tmp_path / "e.jsonl").stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert request("DELETE", f"{base}/room/rules")[0] == 204
        assert request("DELETE", f"{base}/room")[0] == 204
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(event["type"], event["rule"], event["label"]) for event in events[:1]] == [("begin", "visitor", "person")]
    assert events[-1]["type"] == "end"

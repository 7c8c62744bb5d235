from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from saccade.pipeline.cli.manual import manual
from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.sources import redact
from tests.support import REPO


def test_a_file_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("source: door.mp4\ndetect: [person, car]\nconf: 0.3\nstart: 0:01:30\nqueue: keep 8\n")
    config = load(path, {"conf": 0.7, "point": "cat, dog"})
    assert config == RunConfig(
        source="door.mp4", detect=["person", "car"], point=["cat", "dog"], conf=0.7, start=90, queue="keep 8"
    )


def test_the_command_line_alone_is_enough() -> None:
    assert load(None, {"source": "a.mp4", "end": "1:30", "query": "why?"}).end == 90


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("source: [\n", ":2:1: invalid YAML: while parsing a flow node, expected the node content"),
        ("source: a\n  b: c: d\n", ":2:4: invalid YAML: mapping values are not allowed here"),
        ("source: a\n\tmodel: b\n", ":2:1: invalid YAML"),
        ("source: a\x07\n", ": invalid YAML: unacceptable character"),
        ("- a\n", ":1:1: expected a mapping of keys to values, got a list"),
        ("source: a\n\n  \ndetct: [person]\n", ":4:1: unknown key 'detct'; did you mean 'detect'?"),
        ("source: a\nvid-stride: 2\n", ":2:1: unknown key 'vid-stride'; did you mean 'vid_stride'?"),
        ("source: a\nxyzzy: 2\n", ":2:1: unknown key 'xyzzy'; known keys: detect, point, "),
        ("source: a\nconf: 1.5\n", ":2:1: conf: should be less than or equal to 1, got 1.5"),
        ("source: a\nconf: high\n", ":2:1: conf: should be a valid number"),
        ("source: a\ndetect:\n  - person\n  - 7\n", ":4:5: detect[1]: should be a valid string, got 7"),
        ("source: true\n", ":1:1: source: should be a valid string"),
        ("source: a\nzones: [{name: a}]\n", ":2:1: zones: expected a mapping of names to coordinates, such as {door: "),
        ("source: a\nrules: {a: person}\n", ":2:1: rules: expected a list of rules, such as [{name: visitor, "),
        ("source: a\ndtype: int4\n", ":2:1: dtype: should be 'float32', 'bfloat16', 'float16' or 'fp8', got 'int4'"),
        ("source: a\ndisplay: perhaps\n", ":2:1: display: should be a valid boolean"),
        ("source: a\nqueue: keep none\n", ":2:1: queue: unknown queue policy 'keep none'"),
        ("source: a\nstart: 9\nend: 3\n", ":3:1: end: the end time should be later than the start time, which is 9 s"),
        ("source: a\nstart: .inf\n", ":2:1: start: should be a finite number"),
        ("source: a\nsource: b\n", ":2:1: the key 'source' is defined twice, first in line 1"),
        ("model: nano\n", ":1:1: source is missing; give a file"),
        ("", ":1:1: source is missing"),
        ("source: a\n", ":1:1: no prompts: set detect, point or query"),
        ("source: &a [*a]\n", ": the YAML is nested more than 8 levels deep"),
        ("1: a\n", ":1:1: "),
        ("source: a\nhttp: me:secret@a\n", ":2:1: http: expected an address HOST:PORT, such as 127.0.0.1:8080"),
        ("source: a\nhttp_token: 4711\n", ":2:1: http_token: should be a valid string"),
        ("streams: [{source: a}]\n", ":1:1: streams[0]: no prompts"),
        ("source: a\nstreams: [{source: b}]\ndetect: cat\n", ":1:1: source and streams are both set"),
        ("streams: [{name: a}]\ndetect: cat\n", ":1:11: source is missing; add it: a video file"),
        ("streams:\n  - source: a\n    cnof: 1\n", ":3:5: unknown key 'cnof'; did you mean 'conf'?"),
        ("streams:\n  - source: a\n    conf: 3\n", ":3:5: streams[0].conf: should be less than or equal to 1, got 3"),
        ("streams:\n  - source: a\n    model: big\n", ":3:5: unknown key 'model'; "),
        ("streams:\n  - source: a\n    dtype: fp8\n", ":3:5: unknown key 'dtype'; "),
        ("streams: [{source: a, name: x/y}]\n", ":1:23: streams[0].name: invalid stream name 'x/y'"),
        (
            "detect: cat\nstreams: [{source: a, name: x}, {source: b, name: x}]\n",
            ":1:1: two streams have the name 'x'; use a different name for each",
        ),
    ],
)
def test_what_is_wrong_is_stated_in_one_line_with_its_place(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, {})
    assert str(error.value).startswith(f"{path}{line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"source": "a", "conf": 2.0}, "--conf: should be less than or equal to 1, got 2.0"),
        ({"source": "a", "vid_stride": 0}, "--vid-stride: should be greater than or equal to 1, got 0"),
        ({"source": "a", "dtype": "FP8"}, "--dtype: should be 'float32', 'bfloat16', 'float16' or 'fp8', got 'FP8'"),
        ({"source": "a", "start": "soon"}, "--start: should be a valid number"),
        ({"source": ""}, "SOURCE: String should have at least 1 character"),
        ({}, "source is missing"),
        ({"source": "a"}, "no prompts"),
    ],
)
def test_an_invalid_flag_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, overrides)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("streams:\n  - {name: a, sorce: a.mp4}\n", ":2:15: unknown key 'sorce'; did you mean 'source'?"),
        (
            "streams:\n  - rtsp://bob:KEY@192.0.2.7/live\n",
            ":2:5: streams[0]: should be a mapping of keys to values, got 'rtsp://192.0.2.7/live'",
        ),
        ("streams:\n  -\n", ":2:4: streams[0]: should be a mapping of keys to values"),
        (f"detect: {'[' * 3000}{']' * 3000}\n", ": the YAML is nested more than 8 levels deep"),
    ],
)
def test_a_mistake_of_a_beginner_is_put_in_words(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, {})
    assert redact(str(error.value)) == f"{path}{line}"


def test_a_flag_over_a_wrong_value_in_the_file_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("source: a\nconf: 7\ndetect: cat\n")
    assert load(path, {"conf": 0.4}).conf == 0.4


def test_a_webcam_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "webcams.yaml"
    path.write_text("detect: person\nstreams:\n  - source: 0\n  - {source: 1}\n")
    assert [stream.source for stream in load(path, {}).each()] == ["0", "1"]


@pytest.mark.parametrize("name", ["none.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"No such file|Is a directory"):
        load(tmp_path / name, {})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("source: a\nsinks: https://example.org/hooks/KEY\n", ":2:1: sinks: should be a valid list"),
        ("source: a\nsinks:\n  - url: https://example.org/hooks/KEY\n", ":3:5: sinks[0]: should be a valid string"),
        ("streams:\n  - source: a\n    sinks: ws://h?token=KEY\n", ":3:5: streams[0].sinks: should be a valid list"),
        ("streams:\n  a: {source: a, sinks: [https://h/KEY]}\n", ":1:1: streams: should be a valid list"),
        ("source: a\nhttp_token: [KEY]\n", ":2:1: http_token: should be a valid string"),
    ],
)
def test_what_may_hold_a_secret_is_not_repeated(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, {})
    assert str(error.value) == f"{path}{line}"


@pytest.mark.parametrize("key", ["source", "model", "out", "jsonl"])
def test_no_path_holds_a_character_that_would_end_it(key: str) -> None:
    with pytest.raises(ConfigError, match="NUL"):
        load(None, {"source": "a", "detect": "person", key: "a\0b"})


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00source")
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        load(path, {})


def test_a_stream_takes_common_settings_it_does_not_override(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text(
        "detect: [person]\nconf: 0.3\nsinks: [ws://127.0.0.1:1]\nqueue: keep 4\nstreams:\n"
        "  - {source: a.mp4, name: door, sinks: [door.mp4]}\n"
        "  - {source: b.mp4, detect: cat, conf: 0.5, queue: null}\n"
    )
    door, other = load(path, {"vid_stride": 3}).each()
    assert (door.name, door.detect, door.conf, door.queue, door.vid_stride) == ("door", ["person"], 0.3, "keep 4", 3)
    assert door.sinks == ["door.mp4"]
    assert (other.name, other.detect, other.conf, other.queue, other.sinks) == (None, ["cat"], 0.5, None, [])


def test_sources_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("detect: cat\nstreams: [{source: a}, {source: b}]\n")
    assert [one.source for one in load(path, {"source": "c"}).each()] == ["c"]
    path.write_text("detect: cat\nsource: a\n")
    assert [one.source for one in load(path, {"streams": [{"source": "b"}, {"source": "c"}]}).each()] == ["b", "c"]


def test_a_server_alone_needs_no_source() -> None:
    assert load(None, {"http": "127.0.0.1:8080"}).each() == []
    assert "sesame" not in repr(load(None, {"http": "127.0.0.1:8080", "http_token": "sesame"}))


def test_every_field_is_described() -> None:
    assert all(field.description for field in RunConfig.model_fields.values())


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_that_ship_are_valid(path: Path) -> None:
    load(path, {})


def test_one_of_them_is_the_manual_of_every_key() -> None:
    text = (REPO / "configs" / "manual.yaml").read_text()
    assert text == manual(), "run `saccade configs manual` and save it, with the clip's path as in a checkout"
    values = yaml.safe_load(text)
    assert [key for key in RunConfig.model_fields if key not in values] == []
    fields = RunConfig.model_fields.items()
    assert {key: values[key] for key, _ in fields if key not in ("source", "detect")} == {
        key: field.default for key, field in fields if key not in ("source", "detect")
    }
    words = " ".join(text.replace("\n# ", " ").split())
    assert [key for key, field in fields if str(field.description) not in words] == []


def test_other_tasks_are_given_by_their_skill() -> None:
    prompts = load(None, {"source": "a.mp4", "detect": "person", "task": ["caption = short", "count=cars"]})
    assert prompts.asked == [("detect", "person"), ("caption", "short"), ("count", "cars")]
    assert prompts.nothing is None


@pytest.mark.parametrize("task", ["caption", "=short", "caption=", "Caption=short"])
def test_a_task_without_skill_and_text_is_refused(task: str) -> None:
    with pytest.raises(ConfigError, match="task"):
        load(None, {"source": "a.mp4", "task": [task]})

"""A configuration file that changes while its streams run, by hand and from here."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.engine.tasks import Detect
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.analytics.stages import find_stage
from saccade.pipeline.config import StreamConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.run import opened_run
from tests.support.cameras import free_port
from tests.support.command import run_saccade, start_saccade
from tests.support.webrtc import until

NOWHERE = "rtsp://127.0.0.1:1"
FILE = f"""\
# Two cameras that are not there.
streams:
  - name: hall
    source: {NOWHERE}/hall
  - source: {NOWHERE}/yard
    conf: 0.6
detect: [person]
"""


class Config:
    """A file and the controller that was made from it."""

    def __init__(self, path: Path, controller: Controller) -> None:
        self.path, self.controller = path, controller

    def change(self, old: str, new: str) -> list[str]:
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new))
        return self.controller.reload_lines()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    path = tmp_path_factory.mktemp("reload") / "cameras.yaml"
    path.write_text(FILE)
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        yield Config(path, opened.controller)


def test_only_what_has_changed_is_touched(config: Config) -> None:
    streams = config.controller.streams
    hall, yard = (streams.get(name) for name in streams.names)
    assert config.controller.reload() == [f"{config.path}: nothing has changed"]
    assert config.change("conf: 0.6", "conf: 0.7") == [f"{yard.name}: changed conf"]
    assert yard.tasks == (Detect("person", 50, 0.7),)
    assert config.change("/hall\n", "/hall\n    zones: {door: '.1,.1,.9,.1,.9,.9'}\n") == ["hall: changed zones"]
    stage = find_stage(hall.stages, AnalyzeStage)
    assert stage is not None
    assert list(stage.totals().zones) == ["door"]
    assert config.change("/hall\n", "/lobby\n") == ["hall: restarted, changed source"]
    assert streams.get("hall") is not hall
    assert streams.get(yard.name) is yard
    assert config.change("detect:", f"  - {{name: gate, source: '{NOWHERE}/gate', detect: [car]}}\ndetect:") == [
        "gate: added"
    ]
    assert sorted(streams.names) == sorted(["hall", yard.name, "gate"])
    assert config.change("  - {name: gate", "#  - {name: gate") == ["gate: removed"]
    assert sorted(streams.names) == sorted(["hall", yard.name])
    (line,) = config.change("detect: [person]", "detect: [person]\nmodel: other")
    assert line == "model: changed in the file; restart saccade to apply"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("streams:", "streams: [", "invalid YAML"),
        ("conf:", "confidence:", "unknown key 'confidence'"),
        ("detect: [person]", "detect: [zebra]", "'zebra' is not a class"),
        ("name: hall", "source: nothing.mp4\n  - name: hall", "nothing.mp4"),
    ],
)
def test_a_broken_file_changes_nothing(config: Config, old: str, new: str, words: str) -> None:
    before, runs = (
        config.path.read_text(),
        [config.controller.streams.get(name) for name in config.controller.streams.names],
    )
    (line,) = config.change(old, new)
    assert words in line
    assert line.endswith("; nothing was changed")
    assert [config.controller.streams.get(run.name) for run in runs] == runs
    config.path.write_text(before)
    assert config.controller.reload() == [f"{config.path}: nothing has changed"]


def test_what_was_changed_over_http_is_written_back_and_reloaded(config: Config) -> None:
    controller = config.controller
    zones = Regions.model_validate({"zones": {"desk": ".2,.2,.9,.2,.9,.9"}}).zones
    rules = EventSettings.model_validate({"rules": ["waits=person in desk for 9s"]}).rules
    controller.update("hall", {"zones": zones, "detect": ["person", "dog"], "weight": 2.0})
    controller.update("hall", {"rules": rules})
    gate = StreamConfig(name="gate", source=f"{NOWHERE}/gate", detect=["car"], conf=0.7)
    controller.add(gate)
    assert controller.save() == "cameras.yaml"
    assert controller.file is not None
    assert not controller.file.changed
    assert "# Two cameras that are not there." in config.path.read_text()
    saved, other, added = load(config.path, {}).streams
    assert (saved.zones, saved.rules, saved.detect, saved.weight) == (zones, rules, ["person", "dog"], 2.0)
    assert other.model_fields_set == {"source", "conf"}
    assert added.model_dump(exclude_unset=True) == {
        "name": "gate",
        "source": gate.source,
        "detect": ["car"],
        "conf": 0.7,
    }
    assert controller.reload() == [f"{config.path}: nothing has changed"]
    run = controller.streams.get("hall")
    assert config.change("for 9s", "for 3s") == ["hall: changed rules"]
    assert controller.streams.get("hall") is run
    assert run.config is not None
    assert [rule.when for rule in run.config.rules] == ["person in desk for 3s"]
    (line,) = config.change("in desk for 3s", "in dask for 3s")
    assert "no zone 'dask'" in line
    config.change("in dask", "in desk")
    controller.update("hall", {"zones": {}})
    with pytest.raises(ConfigError, match=r"not saved: .*no zone 'desk'"):
        controller.save()
    controller.update("hall", {"zones": zones})
    controller.remove("gate")
    assert controller.save() == "cameras.yaml"
    assert [stream.name for stream in load(config.path, {}).streams] == ["hall", None]


def test_what_the_file_leaves_alone_stays_as_others_changed_it(config: Config) -> None:
    (yard,) = (name for name in config.controller.streams.names if name != "hall")
    config.controller.update("hall", {"detect": ["bus"]})
    (line,) = config.change("conf: 0.7", "conf: 0.4")
    assert line == f"{yard}: changed conf"
    assert config.controller.stream("hall").detect == ["bus"]


def test_a_run_reloads_by_signal_by_change_and_over_http(tmp_path: Path) -> None:
    path, port = tmp_path / "cameras.yaml", free_port()
    path.write_text(f"http: '{port}'\ndetect: [person]\nstreams:\n  - {{name: a, source: '{NOWHERE}/a'}}\n")
    url = f"http://127.0.0.1:{port}"

    def names() -> list[str]:
        try:
            with urllib.request.urlopen(f"{url}/streams", timeout=5) as response:
                return [stream["name"] for stream in json.load(response)["streams"]]
        except OSError:
            return []

    def post(what: str) -> object:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/config/{what}", b""), timeout=30) as response:
            return json.load(response)

    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with start_saccade("run", "--config", path, **quiet) as process:
        try:
            until(lambda: names() == ["a"], seconds=60)
            path.write_text(path.read_text() + f"  - {{name: b, source: '{NOWHERE}/b'}}\n")
            process.send_signal(signal.SIGHUP)
            until(lambda: names() == ["a", "b"], seconds=20)
            path.write_text(path.read_text().replace("name: b", "name: c"))
            until(lambda: names() == ["a", "c"], seconds=20)  # by itself
            assert post("reload") == {"changes": [f"{path}: nothing has changed"]}
            assert post("save") == {"file": "cameras.yaml"}
            other = tmp_path / "other.yaml"
            other.write_text(path.read_text().replace("name: a,", "name: a, conf: 0.3,").replace("name: c", "name: d"))
            asked = run_saccade("config", "check", other, "--diff", url)
            assert asked.stdout.splitlines()[-3:] == ["c: removed", "a: changed conf", "d: added"]
            asked = run_saccade("config", "check", other, "--diff", f"http://127.0.0.1:{free_port()}")
            assert (asked.returncode, "--diff: Saccade does not respond" in asked.stderr) == (2, True)
        finally:
            process.terminate()
            assert process.wait(30) is not None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (FILE, 0, "ok: 2 streams on nano"),
        ("sorce: 0\n", 2, "did you mean 'source'?"),
        ("source: srt://camera:99999\ndetect: person\n", 2, "the port must be a number from 1 to 65535"),
        ("source: 0\ndetect: persn\n", 2, "did you mean 'person'?"),
        ("source: 0\ndetect: person\nrules: [{name: a, when: trukc}]\n", 2, "did you mean 'truck'?"),
    ],
)
def test_a_file_is_checked_without_opening_anything(text: str, code: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(text)
    done = run_saccade("config", "check", path)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True)

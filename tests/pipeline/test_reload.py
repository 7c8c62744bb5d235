"""A configuration file that changes while its session runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.engine.tasks import Detect
from saccade.pipeline.analytics.analyze import analyze_stage
from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.events.stage import event_stage
from saccade.pipeline.reload import ConfigReloader
from saccade.pipeline.session import Session, opened_session
from tests.support import REPO
from tests.support.cameras import free_port
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
    """A file and the session that was opened from it."""

    def __init__(self, path: Path, session: Session, reloader: ConfigReloader) -> None:
        self.path, self.session, self.reloader = path, session, reloader

    def change(self, old: str, new: str) -> list[str]:
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new))
        return self.reloader.reload_lines()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    path = tmp_path_factory.mktemp("reload") / "cameras.yaml"
    path.write_text(FILE)
    settings = load(path, {})
    with opened_session(settings) as session:
        session.start()
        yield Config(path, session, ConfigReloader(path, {}, settings, session))


def test_only_what_has_changed_is_touched(config: Config) -> None:
    streams = config.session.streams
    hall, yard = (streams.get(name) for name in streams.names)
    assert config.reloader.reload() == [f"{config.path}: nothing has changed"]
    assert config.change("conf: 0.6", "conf: 0.7") == [f"{yard.name}: other conf"]
    assert yard.tasks == (Detect("person", 50, 0.7),)
    assert config.change("/hall\n", "/hall\n    zones: {door: '.1,.1,.9,.1,.9,.9'}\n") == ["hall: other zones"]
    stage = analyze_stage(hall.stages)
    assert stage is not None
    assert list(stage.regions.zones) == ["door"]
    assert config.change("/hall\n", "/lobby\n") == ["hall: started anew, with other source"]
    assert streams.get("hall") is not hall
    assert streams.get(yard.name) is yard
    assert config.change("detect:", f"  - {{name: gate, source: '{NOWHERE}/gate', detect: [car]}}\ndetect:") == [
        "gate: added"
    ]
    assert sorted(streams.names) == sorted(["hall", yard.name, "gate"])
    assert config.change("  - {name: gate", "#  - {name: gate") == ["gate: removed"]
    assert sorted(streams.names) == sorted(["hall", yard.name])
    (line,) = config.change("detect: [person]", "detect: [person]\nmodel: other")
    assert line == "model: changed in the file, and taken when saccade is started again"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("streams:", "streams: [", "broken YAML"),
        ("conf:", "confidence:", "unknown key 'confidence'"),
        ("detect: [person]", "detect: [zebra]", "'zebra' is not a class"),
        ("name: hall", "source: nothing.mp4\n  - name: hall", "nothing.mp4"),
    ],
)
def test_a_broken_file_changes_nothing(config: Config, old: str, new: str, words: str) -> None:
    before, runs = config.path.read_text(), [config.session.streams.get(name) for name in config.session.streams.names]
    (line,) = config.change(old, new)
    assert words in line
    assert line.endswith("; everything goes on as it was")
    assert [config.session.streams.get(run.name) for run in runs] == runs
    config.path.write_text(before)
    assert config.reloader.reload() == [f"{config.path}: nothing has changed"]


def test_zones_and_rules_are_written_back_and_reloaded(config: Config) -> None:
    stage = analyze_stage(config.session.streams.get("hall").stages)
    assert stage is not None
    stage.regions = Regions.model_validate({"zones": {"desk": ".2,.2,.9,.2,.9,.9"}})
    watching = event_stage(config.session.streams.get("hall").stages)
    assert watching is not None
    watching.rules = EventSettings.model_validate({"rules": ["waits=person in desk for 9s"]}).rules
    assert config.reloader.save() == "cameras.yaml"
    assert not config.reloader.changed
    assert "# Two cameras that are not there." in config.path.read_text()
    saved, other = load(config.path, {}).streams[:2]
    assert (saved.zones, saved.rules) == (stage.regions.zones, list(watching.rules))
    assert other.model_fields_set == {"source", "conf"}
    assert config.reloader.reload() == [f"{config.path}: nothing has changed"]
    run = config.session.streams.get("hall")
    assert config.change("for 9s", "for 3s") == ["hall: other rules"]
    assert config.session.streams.get("hall") is run
    assert [rule.when for rule in watching.rules] == ["person in desk for 3s"]
    (line,) = config.change("in desk for 3s", "in dask for 3s")
    assert "no zone 'dask'" in line
    config.change("in dask", "in desk")
    stage.regions = Regions()
    with pytest.raises(ConfigError, match=r"nothing is saved: .*no zone 'desk'"):
        config.reloader.save()


def test_a_run_reloads_by_signal_by_change_and_over_http(tmp_path: Path) -> None:
    path, port = tmp_path / "cameras.yaml", free_port()
    path.write_text(f"http: '{port}'\ndetect: [person]\nstreams:\n  - {{name: a, source: '{NOWHERE}/a'}}\n")
    command = [sys.executable, "-m", "saccade", "run", "--config", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
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

    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as process:
        try:
            until(lambda: names() == ["a"], seconds=60)
            path.write_text(path.read_text() + f"  - {{name: b, source: '{NOWHERE}/b'}}\n")
            process.send_signal(signal.SIGHUP)
            until(lambda: names() == ["a", "b"], seconds=20)
            path.write_text(path.read_text().replace("name: b", "name: c"))
            until(lambda: names() == ["a", "c"], seconds=20)  # by itself
            assert post("reload") == {"changes": [f"{path}: nothing has changed"]}
            assert post("save") == {"file": "cameras.yaml"}
        finally:
            process.terminate()
            assert process.wait(30) is not None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (FILE, 0, "ok: 2 streams on nano"),
        ("sorce: 0\n", 2, "did you mean 'source'?"),
        ("source: srt://camera:99999\ndetect: person\n", 2, "a port is a number from 1 to 65535"),
        ("source: 0\ndetect: persn\n", 2, "did you mean 'person'?"),
        ("source: 0\ndetect: person\nrules: [{name: a, when: trukc}]\n", 2, "did you mean 'truck'?"),
    ],
)
def test_a_file_is_checked_without_opening_anything(text: str, code: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "saccade", "config", "check", str(path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True)

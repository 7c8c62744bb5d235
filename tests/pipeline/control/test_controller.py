"""What the controller stores before it acts, and what runs then: nano on the demo clip, played as a camera."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from saccade.engine import Engine, EngineError
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.controller import Applied, Controller
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.source_policy import NotAllowedError, SourcePolicy
from saccade.pipeline.control.state import StateFile
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.run import opened_run
from saccade.pipeline.runtime.streams import Streams
from saccade.sources import SourceError
from tests.support.webrtc import until

CAMERA = {"name": "door", "source": str(DEMO_CLIP), "loop": True, "detect": ["person"]}
NOWHERE = {"name": "yard", "source": "rtsp://127.0.0.1:1/yard", "detect": ["car"]}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.fixture
def local(engine: Engine) -> Iterator[Local]:
    with Local(Streams(engine)) as one:
        yield one


def config_of(*streams: dict[str, Any]) -> RunConfig:
    return load(None, {"http": "127.0.0.1:0", "streams": list(streams)})


def names(applied: Applied) -> list[tuple[str, str]]:
    return [(type(change).__name__, change.name) for change in applied.changes]


class Recorded(StateFile):
    """A state file that notes what runs when it is written, and may fail."""

    def __init__(self, path: Path, streams: Streams) -> None:
        super().__init__(path)
        self.running: list[dict[str, Any]] = []
        self.fails = False
        self._streams = streams

    def save(self, base: RunConfig, desired: RunConfig) -> None:
        if self.fails:
            raise ConfigError("the disk is full")
        self.running.append({status.name: status.config for status in self._streams.snapshot()})
        super().save(base, desired)


def test_a_change_is_stored_and_then_made(local: Local, tmp_path: Path) -> None:
    with closing(Recorded(tmp_path / "a.state", local.streams)) as state:
        controller = Controller(local, config_of(CAMERA), state=state)
        controller.start()
        run = controller.streams.get("door")
        assert controller.update("door", {"detect": ["cat"]}).detect == ["cat"]
        assert [wanted["door"].detect for wanted in state.running] == [["person"]]  # as it was when that was stored
        assert [task.asked for task in run.tasks] == ["cat"]
        assert names(controller.apply(config_of(CAMERA, NOWHERE))) == [("Update", "door"), ("Open", "yard")]
        assert names(controller.apply(config_of(NOWHERE))) == [("Close", "door")]
        assert len(state.running) == 3
        assert names(controller.apply(config_of(NOWHERE))) == []
        assert len(state.running) == 3
        state.fails = True
        with pytest.raises(ConfigError, match="the disk is full"):
            controller.update("yard", {"detect": ["dog"]})
        with pytest.raises(ConfigError, match="the disk is full"):
            controller.add(StreamConfig.model_validate(CAMERA))
        assert [task.asked for task in controller.streams.get("yard").tasks] == ["car"]
        assert controller.streams.names == ["yard"]
        assert list(controller.config.named()) == ["yard"]


@pytest.mark.parametrize(
    ("stream", "error", "words"),
    [
        ({"detect": ["unicorn"]}, EngineError, "'unicorn' is not a class"),
        ({"name": "other", "source": "none.mp4"}, SourceError, "no such file"),
        ({"query": ["why?"]}, ConfigError, "does not support query"),
        ({"rules": [{"name": "r", "when": "person", "ask": "Is it?"}]}, ConfigError, "cannot answer"),
    ],
)
def test_what_cannot_be_made_is_not_stored(
    local: Local, tmp_path: Path, stream: dict[str, Any], error: type[Exception], words: str
) -> None:
    with closing(Recorded(tmp_path / "a.state", local.streams)) as state:
        controller = Controller(local, config_of(CAMERA), state=state)
        controller.start()
        run = controller.streams.get("door")
        for applied in (config_of({**CAMERA, **stream}), config_of(NOWHERE, {**CAMERA, **stream})):
            with pytest.raises(error, match=words):
                controller.apply(applied)
        assert (state.running, controller.streams.names) == ([], ["door"])
        assert controller.streams.get("door") is run
        assert run.error is None


def test_nothing_of_a_removed_stream_stays(local: Local) -> None:
    controller = Controller(local, config_of(CAMERA, {**CAMERA, "name": "yard"}))
    controller.start()
    gone: list[Callable[[], object]] = []
    for name in ("a", "b", "yard"):
        if name != "yard":
            controller.add(StreamConfig.model_validate({**CAMERA, "name": name, "zones": {"z": "0,0,1,0,1,1"}}))
        run = controller.streams.get(name)
        until(lambda run=run: run.report().frames > 0)  # type: ignore[misc]
        gone += [weakref.ref(run), weakref.ref(run.source)]
        controller.remove(name)
        assert run.join(30)
        del run
    until(lambda: gc.collect() >= 0 and not any(one() for one in gone))
    assert set(controller._turns) <= {"door"}


def test_a_rules_labels_are_found_while_it_is_there(local: Local) -> None:
    controller = Controller(local, config_of({**CAMERA, "detect": ["person"]}))
    controller.start()
    run = controller.streams.get("door")
    rules = load(None, {"source": "a", "rules": ["cats=cat", "people=people for 2s"]}).rules
    controller.update("door", {"rules": rules})
    assert [task.asked for task in run.tasks] == ["person", "cat"]  # `people` is what the model calls person
    controller.update("door", {"conf": 0.3})
    assert [(task.asked, task.conf) for task in run.tasks] == [("person", 0.3), ("cat", 0.3)]  # type: ignore[attr-defined]
    controller.update("door", {"rules": []})
    assert [task.asked for task in run.tasks] == ["person"]
    with pytest.raises(ConfigError, match="no prompts"):
        controller.update("door", {"detect": []})


def test_prompts_of_removed_streams_are_forgotten(local: Local) -> None:
    controller = Controller(local, config_of({**CAMERA, "detect": ["people"]}))
    controller.start()
    (status,) = local.statuses()
    assert status.prompts is not None
    assert status.prompts.detect == ["person"]
    controller.remove("door")
    assert local.statuses() == []
    assert not local._prompts


def test_changes_made_at_once_are_all_there(local: Local, tmp_path: Path) -> None:
    with closing(StateFile(tmp_path / "a.state")) as state:
        controller = Controller(local, config_of(CAMERA, NOWHERE), state=state)
        controller.start()
        values = {"conf": 0.3, "max_objects": 7, "weight": 3.0, "max_fps": 2.0, "detect": ["dog"], "tiles": 1}
        changes = [
            threading.Thread(target=controller.update, args=(name, {key: value}))
            for name in ("door", "yard")
            for key, value in values.items()
        ]
        changes += [
            threading.Thread(target=controller.add, args=(StreamConfig.model_validate({**NOWHERE, "name": None}),))
            for _ in range(4)
        ]
        for thread in changes:
            thread.start()
        for thread in changes:
            thread.join()
        for name in ("door", "yard"):
            assert {key: getattr(controller.stream(name), key) for key in values} == values
            assert controller.streams.get(name).config == controller.stream(name)
        assert len(controller.streams.names) == len(set(controller.streams.names)) == 6
        loaded = state.load(controller.config)
        assert loaded is not None
        assert loaded[1].named() == controller.config.named()


def test_names_are_taken_while_a_stream_runs_and_free_when_it_has_ended(local: Local) -> None:
    controller = Controller(local, config_of(CAMERA))
    controller.start()
    with pytest.raises(StreamError, match="'door' already"):
        controller.add(StreamConfig.model_validate(CAMERA))
    short = StreamConfig(name="clip", source=str(DEMO_CLIP), detect=["person"], end=0.2)
    for _ in range(2):
        controller.add(short)
        until(lambda: "clip" not in controller.config.named())  # it has ended by itself
    with pytest.raises(StreamError, match="stream 'clip' does not exist"):
        controller.update("clip", {"conf": 0.2})
    controller.remove("door")
    with pytest.raises(StreamError, match="stream 'door' does not exist"):
        controller.remove("door")


def test_a_restart_with_the_state_takes_up_what_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(
        f"http: 127.0.0.1:0\nstreams:\n- {{name: door, source: '{DEMO_CLIP}', loop: true, detect: person}}\n"
    )
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        opened.controller.update("door", {"detect": ["cat"]})
        opened.controller.add(StreamConfig.model_validate(NOWHERE))
        shutil.copy(DEMO_CLIP, tmp_path / "a.mp4")
        opened.controller.add(StreamConfig(name="gone", source=str(tmp_path / "a.mp4"), detect=["cat"], loop=True))
    (tmp_path / "a.mp4").unlink()
    path.write_text(path.read_text().replace("loop: true", "loop: true, conf: 0.3"))
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        (run,) = opened.controller.start()
        assert ([task.asked for task in run.tasks], run.config and run.config.conf) == (["cat"], 0.3)
        assert opened.controller.streams.names == ["door", "yard"]
        failed = {status.name: status.reason for status in opened.controller.streams.snapshot() if not status.ok}
        assert failed["gone"] == f"no such file: {tmp_path / 'a.mp4'}"
        with pytest.raises(SourceError):
            opened.controller.restart("gone")
        opened.controller.remove("gone")
        path.write_text(path.read_text().replace("detect: person", "detect: dog"))
        assert opened.controller.reload() == ["door: changed detect"]
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        assert opened.controller.stream("door").detect == ["dog"]


def test_a_run_whose_streams_were_all_removed_waits_for_others(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text("http: 127.0.0.1:0\nsource: rtsp://127.0.0.1:1/door\nname: door\ndetect: person\n")
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        assert not opened.controller.endless
        opened.controller.remove("door")
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        assert (opened.controller.start(), opened.controller.endless) == ([], True)
        opened.controller.add(StreamConfig.model_validate({**NOWHERE, "name": "door"}))
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        assert opened.controller.stream("door").source == NOWHERE["source"]


def test_changes_may_be_kept_in_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "camera.yaml"
    path.write_text(
        f"http: 127.0.0.1:0\nstate: config\n# the clip\nsource: '{DEMO_CLIP}'\nloop: true\ndetect: person\n"
    )
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        opened.controller.update("demo", {"detect": ["cat"]})
        assert load(path, {}).detect == ["cat"]
        opened.controller.add(StreamConfig.model_validate(NOWHERE))
        assert [stream.name for stream in load(path, {}).streams] == [None, "yard"]
        assert opened.controller.reload() == [f"{path}: nothing has changed"]
        opened.controller.remove("yard")
    assert "# the clip" in path.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["camera.yaml"]
    assert list(load(path, {}).named()) == ["demo"]


def test_the_policy_is_for_clients_alone(local: Local, engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(f"http: 127.0.0.1:0\nstreams:\n- {NOWHERE}\n")
    guarded = Local(local.streams, policy=SourcePolicy([], open_by_default=False))
    controller = Controller(guarded, load(path, {}), file=ConfigFile(path))
    controller.start()
    with pytest.raises(NotAllowedError):
        controller.add(StreamConfig.model_validate(CAMERA))
    controller.restart("yard")
    path.write_text(path.read_text() + f"- {CAMERA}\n")
    assert controller.reload() == ["door: added"]
    controller.restart("door")
    assert names(controller.apply(config_of({**CAMERA, "name": "gate"}))) == [
        ("Close", "yard"), ("Close", "door"), ("Open", "gate"),
    ]  # fmt: skip


def test_the_policy_covers_the_record_source(local: Local) -> None:
    guarded = Local(local.streams, policy=SourcePolicy(["rtsp://127.0.0.1:1/*"], open_by_default=False))
    controller = Controller(guarded, config_of())
    controller.start()
    both = {"source": "rtsp://127.0.0.1:1/sub", "record_source": "rtsp://127.0.0.2:1/main", "detect": "person"}
    with pytest.raises(NotAllowedError):
        controller.add(StreamConfig.model_validate(both))
    assert controller.add(StreamConfig.model_validate({**both, "record_source": "rtsp://127.0.0.1:1/main"}))


def test_an_attached_stream_is_never_stored(local: Local, tmp_path: Path) -> None:
    from saccade.sources import open_source

    with closing(Recorded(tmp_path / "a.state", local.streams)) as state:
        controller = Controller(local, config_of(), state=state)
        config = ListedStream(name="page", source="webrtc:page", detect=["person"])
        run = controller.attach(local.open(config, source=open_source(DEMO_CLIP)))
        controller.update("page", {"detect": ["cat"]})
        assert [task.asked for task in run.tasks] == ["cat"]
        with pytest.raises(StreamError, match="'page' already"):
            controller.attach(local.open(config, source=open_source(DEMO_CLIP)))
        assert state.running == []
        run.stop()
        until(lambda: not controller.config.streams)


def test_a_change_opens_a_failed_stream_again(local: Local, tmp_path: Path) -> None:
    clip = tmp_path / "late.mp4"
    late = {**CAMERA, "name": "late", "source": str(clip)}
    controller = Controller(local, config_of(), desired=config_of(late))
    controller.start()
    assert local.status("late").state == "failed"
    with pytest.raises(SourceError, match="no such file"):
        controller.update("late", {"conf": 0.3})
    assert controller.stream("late").conf == 0.5
    shutil.copy(DEMO_CLIP, clip)
    assert controller.update("late", {"conf": 0.3}).conf == 0.3
    run = controller.streams.get("late")
    until(lambda: run.report().frames > 0)
    assert [task.conf for task in run.tasks] == [0.3]  # type: ignore[attr-defined]


def test_a_restart_ends_a_stream_and_opens_it_again(local: Local) -> None:
    controller = Controller(local, config_of(CAMERA))
    controller.start()
    before = controller.streams.get("door")
    assert controller.restart("door").state == "running"
    assert before.join(30)
    assert controller.streams.get("door") is not before
    assert controller.finished["door"].stopped
    with pytest.raises(StreamError, match="does not exist"):
        controller.restart("none")


def test_what_a_local_has_made_ends_with_it(engine: Engine) -> None:
    with Local(Streams(engine)) as one:
        controller = Controller(one, config_of({**CAMERA, "rules": ["people=person for 1s"]}))
        controller.start()
        until(lambda: any(thread.name == "saccade events" for thread in threading.enumerate()))
        assert not one.idle
    assert one.idle
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("saccade events")]

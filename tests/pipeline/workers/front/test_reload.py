from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from saccade.pipeline.config import ListedStream
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.workers.front.front import opened_front
from saccade.pipeline.workers.front.reload import Changer, FrontReloader
from tests.support.worker_here import WorkerHere

HALL = {"name": "hall", "source": "rtsp://192.0.2.7/a"}
YARD = {"name": "yard", "source": "rtsp://192.0.2.7/b"}


def test_only_what_is_other_is_closed_opened_or_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"

    def write(*streams: dict[str, Any], **others: Any) -> None:
        path.write_text(json.dumps({"workers": 2, "detect": ["person"], "streams": streams, **others}))

    write(HALL, YARD)
    config = load(path, {})
    with opened_front(config, WorkerHere) as front:  # whose workers are not started
        for name, stream in front._first.items():
            front.supervisor.open(stream.model_dump(mode="json", exclude_unset=True), name, or_similar=False)
        reloader = FrontReloader(path, {}, front, Changer(front, config))
        assert not reloader.changed
        assert reloader.reload() == [f"{path}: nothing has changed"]
        write(HALL, {**YARD, "conf": 0.7}, {**YARD, "name": "door"}, store="kept")
        assert reloader.changed
        assert reloader.reload() == [
            "yard: started anew, with other conf",
            "door: added",
            "store: changed in the file, and taken when saccade is started again",
        ]
        streams = front.supervisor.streams()
        assert (list(streams), streams["yard"].config["conf"]) == (["hall", "yard", "door"], 0.7)
        path.write_text("streams: [{")
        with pytest.raises(ConfigError, match="everything goes on as it was"):
            reloader.reload()
        write(YARD)
        assert set(reloader.reload()) >= {"hall: removed", "door: removed"}
        assert list(front.supervisor.streams()) == ["yard"]
        write(YARD, model="other")
        (line,) = reloader.reload()
        assert line.startswith("model: changed; workers are replaced one after another")


def test_what_was_drawn_is_written_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    yard = {**YARD, "detect": ["person"]}
    path.write_text("# two cameras\n" + yaml.safe_dump({"workers": 2, "streams": [HALL | {"point": ["face"]}, yard]}))
    config = load(path, {})
    with opened_front(config, WorkerHere) as front:
        for name, stream in front._first.items():
            front.supervisor.open(stream.model_dump(mode="json", exclude_unset=True), name, or_similar=False)
        reloader = FrontReloader(path, {}, front, Changer(front, config))
        drawn = {"zones": {"desk": {"polygon": ".1,.1,.9,.1,.9,.9"}}, "rules": ["visitor=person in desk"]}
        stream = ListedStream.model_validate({**yard, **drawn})
        front.supervisor.streams()["yard"].config = stream.model_dump(mode="json", exclude_unset=True)
        assert reloader.save() == path.name
        assert not reloader.changed
        assert path.read_text().startswith("# two cameras")
        read = load(path, {}).streams[1]
        assert (read.zones, read.rules) == (stream.zones, stream.rules)
        assert reloader.reload() == [f"{path}: nothing has changed"]
    reloader = FrontReloader(path, {"streams": []}, front, Changer(front, config))
    with pytest.raises(ConfigError, match="on the command line"):
        reloader.save()

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.core.config.file import load
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.workers.front.front import opened_front
from saccade.pipeline.workers.front.reload import FrontReloader

HALL = {"name": "hall", "source": "rtsp://192.0.2.7/a"}
YARD = {"name": "yard", "source": "rtsp://192.0.2.7/b"}


def test_only_what_is_other_is_closed_opened_or_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"

    def write(*streams: dict[str, Any], **others: Any) -> None:
        path.write_text(json.dumps({"workers": 2, "detect": ["person"], "streams": streams, **others}))

    write(HALL, YARD)
    config = load(path, {})
    with opened_front(config) as front:  # whose workers are not started: what is to run is known all the same
        for name, stream in front._first.items():
            front.supervisor.open(stream.model_dump(mode="json", exclude_unset=True), name, or_similar=False)
        reloader = FrontReloader(path, {}, config, front)
        assert not reloader.changed
        assert reloader.reload() == [f"{path}: nothing has changed"]
        write(HALL, {**YARD, "conf": 0.7}, {**YARD, "name": "door"}, device="cpu")
        assert reloader.changed
        assert reloader.reload() == [
            "yard: started anew, with other conf",
            "door: added",
            "device: changed in the file, and taken when saccade is started again",
        ]
        streams = front.supervisor.streams()
        assert (list(streams), streams["yard"].config["conf"]) == (["hall", "yard", "door"], 0.7)
        path.write_text("streams: [{")
        (line,) = reloader.reload()
        assert line.endswith("everything goes on as it was")
        write(YARD)
        assert set(reloader.reload()) >= {"hall: removed", "door: removed"}
        assert list(front.supervisor.streams()) == ["yard"]
        with pytest.raises(ConfigError, match="not written"):
            reloader.save()

"""What the configuration file's routes answer, of a file that was read, and of one with a mistake."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import httpx

from saccade.pipeline.api.http_server import serve
from saccade.pipeline.config.file import load
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.run import opened_run

FILE = "streams:\n  - {name: yard, source: 'rtsp://127.0.0.1:1/yard', detect: [person]}\n"


def _posted(controller: Controller, what: str = "reload", body: str = "") -> tuple[int, str]:
    with closing(serve(controller, port=0)) as server:
        answer = httpx.post(f"{server.url}/config/{what}", content=body, timeout=60)
    return answer.status_code, answer.json().get("error") or answer.text


def test_a_file_with_a_mistake_is_answered_with_it(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    with opened_run(load(path, {})) as without:
        assert _posted(without.controller) == (
            409,
            "Saccade has no configuration file: start it with --config FILE",
        )
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        assert _posted(opened.controller) == (
            200,
            json.dumps({"changes": [f"{path}: nothing has changed"]}),
        )
        path.write_text(FILE.replace("detect", "detekt"))
        status, body = _posted(opened.controller)
    assert status == 422
    assert "unknown key 'detekt'" in body
    assert body.endswith("; nothing was changed")


def test_a_file_is_compared_with_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    with opened_run(load(path, {}), ConfigFile(path)) as opened:
        opened.controller.start()
        other = FILE.replace("person", "car") + "model: tiny\n"
        changes = ["yard: changed detect", "model: changed in the file; restart saccade to apply"]
        assert _posted(opened.controller, "diff", other) == (200, json.dumps({"changes": changes}))
        assert opened.controller.stream("yard").detect == ["person"]
        status, body = _posted(opened.controller, "diff", "sources: 1\n")
    assert (status, body.startswith("configuration:1:1: unknown key 'sources'")) == (422, True)

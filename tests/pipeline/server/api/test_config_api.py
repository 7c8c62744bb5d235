"""What the configuration file's routes answer, of a file that was read, and of one with a mistake."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from saccade.pipeline.config.file import load
from saccade.pipeline.reload import ConfigReloader
from saccade.pipeline.server.api.config_api import ConfigApi
from saccade.pipeline.session import opened_session

FILE = "streams:\n  - {name: yard, source: 'rtsp://127.0.0.1:1/yard', detect: [person]}\n"


async def _posted(api: ConfigApi) -> tuple[int, str]:
    app = web.Application()
    app.add_routes(api.routes())
    async with TestClient(TestServer(app)) as client:
        response = await client.post("/config/reload")
        return response.status, (await response.text()).strip()


def test_a_file_with_a_mistake_is_answered_with_it(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    settings = load(path, {})
    api = ConfigApi()
    assert asyncio.run(_posted(api)) == (409, "there is no configuration file: start with --config FILE")
    with opened_session(settings) as session:
        api.actions = ConfigReloader(path, {}, settings, session)
        assert asyncio.run(_posted(api)) == (200, json.dumps({"changes": [f"{path}: nothing has changed"]}))
        path.write_text(FILE.replace("detect", "detekt"))
        status, body = asyncio.run(_posted(api))
    assert status == 422
    assert "unknown key 'detekt'" in body
    assert body.endswith("; everything goes on as it was")

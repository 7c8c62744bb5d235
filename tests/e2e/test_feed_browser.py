"""The documented JavaScript client in a real browser: what is found in a clip arrives in a page as it is found."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from saccade.engine import Detect, Engine
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.sinks.websocket.server import WebSocketSink
from saccade.sources import open_source
from tests.support import REPO
from tests.support.browser import browsing, needs_chromium
from tests.support.documents import blocks_of

pytestmark = [pytest.mark.e2e, needs_chromium]

(CLIENT,) = (block for block in blocks_of(REPO / "docs" / "guides" / "feed.md") if block.language == "js")
"""A function, and a call of it, of which the address and what is done with a record are changed here."""

CALL = re.compile(
    r'^watch\("ws://127\.0\.0\.1:8765[^"]*", \(record\) => console\.log\(record\.objects\)\)$', re.MULTILINE
)

PAGE = """<!doctype html><script>
const report = (what) => fetch("/reports", {method: "POST", body: JSON.stringify(what)})
CLIENT
feed.onopen = () => report("open")
feed.addEventListener("close", ({code}) => report(`closed ${code}`))
</script>"""


def page_of(address: str) -> str:
    call = f'const feed = watch("{address}", (record) => report({{frame: record.frame, objects: record.objects}}))'
    client, found = CALL.subn(lambda _: call, CLIENT.text)
    assert found == 1
    return PAGE.replace("CLIENT", client)


class Site:
    """The page, and what it reports. Runs its own event loop in a thread."""

    def __init__(self, page: str) -> None:
        self.reports: list[Any] = []
        self._page = page
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)

    async def _open(self) -> str:
        application = web.Application()
        application.add_routes([web.get("/", self._show), web.post("/reports", self._hear)])
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/"

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _hear(self, request: web.Request) -> web.Response:
        self.reports.append(json.loads(await request.text()))
        return web.Response()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_page_receives_every_record_of_a_clip(tmp_path: Path) -> None:
    sink = WebSocketSink("ws://127.0.0.1:0?token=sesame")
    site = Site(page_of(f"{sink.url}?token=sesame"))
    try:
        with Engine.load("nano") as engine, browsing(site.url, tmp_path):
            until(lambda: "open" in site.reports)
            source = open_source(str(REPO / "pipeline/assets/demo.mp4"), vid_stride=10)
            run = Run(source, engine, [Detect("person")], [Output(sink)])
            run.start()
            assert run.join(120)
            assert run.error is None
            frames = run.report().frames
            sink.close()
            until(lambda: "closed 1001" in site.reports)
    finally:
        sink.close()
        site.close()
    records = [report for report in site.reports if isinstance(report, dict)]
    assert frames > 5
    assert sorted(record["frame"] for record in records) == list(range(0, 10 * frames, 10))
    assert {found["label"] for record in records for found in record["objects"]} == {"person"}

"""The README's JavaScript client in a real browser: the records of a real clip arrive in a page as they are made."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from saccade.engine import Detect, Engine
from saccade.pipeline.core.stream_run import Output, Run
from saccade.sinks.websocket.server import WebSocketSink
from saccade.sources import open_source
from tests.support import REPO
from tests.support.browser import browsing, needs_chromium

pytestmark = [pytest.mark.e2e, needs_chromium]

PAGE = """<!doctype html><script>
const report = (what) => fetch("/reports", {method: "POST", body: JSON.stringify(what)})
function watch(address, onRecord) {
  const feed = new WebSocket(address)
  feed.onmessage = ({data}) => {
    const message = JSON.parse(data)
    if ("frame" in message) onRecord(message)
    else if (message.dropped) console.warn(`${message.dropped} records of ${message.stream} were lost`)
    else if (message.error) console.error(message.error)
  }
  feed.onclose = () => setTimeout(watch, 1000, address, onRecord)
  return feed
}
const feed = watch("ADDRESS", (record) => report({frame: record.frame, objects: record.objects}))
feed.onopen = () => report("open")
feed.addEventListener("close", ({code}) => report(`closed ${code}`))
</script>"""


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
    site = Site(PAGE.replace("ADDRESS", f"{sink.url}?token=sesame"))
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

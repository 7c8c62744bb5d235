"""The documented JavaScript client in a real browser: what is found in a clip arrives in a page as it is found."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from saccade.engine import Detect, Engine
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.sinks.websocket.server import WebSocketSink
from saccade.sources import open_source
from saccade.web.server import AppServer
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
    """The page, and what it reports."""

    def __init__(self, page: str) -> None:
        self.reports: list[Any] = []
        self._page = page
        routes = [Route("/", self._show), Route("/reports", self._hear, methods=["POST"])]
        self._web = AppServer(Starlette(routes=routes), "127.0.0.1", 0, "site")
        self.url = f"{self._web.url}/"

    async def _show(self, _: Request) -> Response:
        return HTMLResponse(self._page)

    async def _hear(self, request: Request) -> Response:
        self.reports.append(await request.json())
        return Response()

    def close(self) -> None:
        self._web.close()


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

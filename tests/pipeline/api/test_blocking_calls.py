"""What blocks for ever while a stream is opened over HTTP blocks neither health nor the end of the process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from saccade.pipeline.api import streams as streams_api
from saccade.pipeline.api.blocking_calls import BlockingCalls
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import StreamConfig
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.runtime.streams import Streams, StreamStatus
from saccade.web.errors import HttpError
from tests.pipeline.api.test_http_server import ask, error_of, wait_for
from tests.support.control import controller_of

CLIP = {"source": str(DEMO_CLIP), "name": "clip", "detect": "person"}


@pytest.mark.parametrize("suffix", ["", ".mp4", ".jpg"])
def test_only_regular_files_are_opened(streams: Streams, tmp_path: Path, suffix: str) -> None:
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    server = serve(controller_of(streams), port=0)
    try:
        for source in (str(pipe), "/dev/ptmx", "/dev/zero"):
            answer = ask(server, "POST", "/streams", {**CLIP, "source": source})
            assert answer.status == 422
            assert error_of(answer) == f"{source} is not a regular file"
    finally:
        server.close()


def test_a_folder_skips_what_is_no_regular_file(streams: Streams, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    server = serve(controller_of(streams), port=0)
    try:
        answer = ask(server, "POST", "/streams", {**CLIP, "source": str(tmp_path)})
        assert (answer.status, "contains no images" in error_of(answer)) == (422, True)
    finally:
        server.close()


class HangingAdd:
    """Opens streams, but hangs before until released, as a file on a dead network disk would."""

    def __init__(self, controller: Controller) -> None:
        self.add = controller.add
        self.release = threading.Event()
        self.added: list[StreamStatus] = []

    def __call__(self, config: StreamConfig) -> StreamStatus:
        self.release.wait()
        self.added.append(self.add(config))
        return self.added[-1]


def test_health_answers_while_every_opening_hangs(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_api, "OPEN_S", 3.0)
    controller = controller_of(streams)
    add = HangingAdd(controller)
    monkeypatch.setattr(controller, "add", add)
    server = serve(controller, port=0)
    try:
        with ThreadPoolExecutor(9) as clients:
            posts = [clients.submit(ask, server, "POST", "/streams", {**CLIP, "name": f"clip{n}"}) for n in range(9)]
            wait_for(lambda: any(post.done() for post in posts))
            for path in ("/livez", "/readyz", "/healthz", "/streams"):
                assert ask(server, "GET", path).status == 200
            answers = sorted((post.result() for post in posts), key=lambda answer: answer.status)
        assert [answer.status for answer in answers] == [503] + [504] * 8
        assert error_of(answers[0]) == "too many streams are being opened; try again"
        assert error_of(answers[-1]) == "the stream did not open within 3 s"
        add.release.set()
        wait_for(lambda: len(add.added) == 8 and not streams.names)  # which no client waits for any more
        assert controller.runner.statuses() == []  # none has failed
    finally:
        add.release.set()
        server.close()


def test_a_server_closes_while_an_opening_hangs(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = controller_of(streams)
    add = HangingAdd(controller)
    monkeypatch.setattr(controller, "add", add)
    server = serve(controller, port=0)

    def post() -> None:
        with suppress(OSError):  # hung up on
            ask(server, "POST", "/streams", CLIP)

    client = threading.Thread(target=post)
    client.start()
    try:
        time.sleep(0.2)
    finally:
        server.close()
        client.join(20)
        add.release.set()
    assert not client.is_alive()


def test_calls_are_given_up_and_undo_what_comes_late() -> None:
    undone: list[str] = []
    release = threading.Event()

    def hang() -> str:
        release.wait()
        return "late"

    async def check() -> None:
        calls = BlockingCalls(1, 0.1, "one call is running", (504, "it takes too long"))
        with pytest.raises(HttpError) as late:
            await calls.ask(hang, undo=undone.append)
        with pytest.raises(HttpError) as busy:
            await calls.ask(lambda: "never")
        assert [(one.value.status_code, one.value.detail) for one in (late, busy)] == [
            (504, "it takes too long"),
            (503, "one call is running; try again"),
        ]
        release.set()
        while not undone:
            await asyncio.sleep(0.01)
        assert await calls.ask(lambda: "in time", undo=undone.append) == "in time"
        with pytest.raises(ZeroDivisionError):
            await calls.ask(lambda: 1 / 0)

    asyncio.run(asyncio.wait_for(check(), 30))
    assert undone == ["late"]

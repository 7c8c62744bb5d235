"""WebhookSink against a real server that fails, is busy, refuses, hangs and restarts."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from saccade.engine.results import Detections, Points, Result, Spot, Text
from saccade.sinks import SinkError, SupportsStreamEnd, WebhookSink, make_record, open_sink
from saccade.sinks import backoff as backoff_module
from saccade.sinks.messaging import events as events_module
from saccade.sinks.messaging import webhook as webhook_module
from saccade.sinks.messaging.webhook_request import WebhookRequest
from tests.support.broker import wait_for
from tests.support.results import LATENCY, live_frame, showing

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """A web server in a thread that keeps what is posted; `answers` are given first, then 200; on one port for ever."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str], Any]] = []
        self.answers: list[Answer | int] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.on()

    def on(self) -> None:
        asyncio.run_coroutine_threadsafe(self._on(), self._loop).result(10)

    def off(self) -> None:
        asyncio.run_coroutine_threadsafe(self._off(), self._loop).result(10)

    def close(self) -> None:
        self.off()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def url(self, rest: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{rest}"

    @property
    def bodies(self) -> list[Any]:
        return [body for _, _, body in list(self.posts)]

    async def _on(self) -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{tail:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _off(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _take(self, request: web.Request) -> web.StreamResponse:
        answer = self.answers.pop(0) if self.answers else 200
        if not isinstance(answer, int):
            return await answer(request)
        if answer == 200:
            self.posts.append((str(request.rel_url), dict(request.headers), await request.json()))
        return web.Response(status=answer, text="x" * 1000)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff_module, "FIRST_S", 0.05)
    monkeypatch.setattr(backoff_module, "LAST_S", 0.2)


NOTHING = showing()
POINT = Result(Detections((), 1, 1), Points((Spot("cup", 0.5, 0.5, 0.5),), 1, 1))
ANSWER = Result(Detections((), 1, 1), Points((), 1, 1), (Text("what", "that"),))


def test_records_with_objects_are_posted_in_order(receiver: Receiver) -> None:
    sink = open_sink(receiver.url("/a/b?key=1%202"))
    assert isinstance(sink, WebhookSink)
    assert sink.shared
    assert isinstance(sink, SupportsStreamEnd)
    results = [NOTHING, showing("cat"), POINT, NOTHING, ANSWER]
    for second, result in enumerate(results):
        sink.write(live_frame(second), result, LATENCY)
    sink.close()
    sink.close()
    assert receiver.bodies == [make_record(live_frame(n), results[n], LATENCY) for n in (1, 2, 4)]
    url, headers, _ = receiver.posts[0]
    assert url == "/a/b?key=1%202"
    assert headers["Content-Type"] == "application/json"
    assert sink.dropped == 0


def test_send_all_posts_every_record_of_every_thread(receiver: Receiver) -> None:
    sink = WebhookSink(receiver.url("#send=all"))

    def run(stream: str) -> None:
        for n in range(20):
            sink.write(live_frame(n, stream), NOTHING, LATENCY)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    for stream in "abc":
        assert [body["frame"] for body in receiver.bodies if body["stream"] == stream] == [10 * n for n in range(20)]


def test_send_events_posts_events(receiver: Receiver) -> None:
    sink = WebhookSink(receiver.url("/?x=1#send=events&hold=2"))
    for second, result in enumerate([NOTHING, showing("cat"), NOTHING, NOTHING, NOTHING, showing("dog")]):
        sink.write(live_frame(second), result, LATENCY)
    sink.write(live_frame(0, "hall"), showing("cat"), LATENCY)
    sink.end("door")
    sink.close()
    steps = [(body["type"], body["after"]["stream"], body["after"]["label"]) for body in receiver.bodies]
    assert steps == [
        ("new", "door", "cat"),
        ("end", "door", "cat"),
        ("new", "door", "dog"),
        ("new", "hall", "cat"),
        ("end", "door", "dog"),
        ("end", "hall", "cat"),
    ]


async def busy(request: web.Request) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "1"})


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(1)
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("trouble", [500, 503, 408, busy, hang, cut])
def test_a_failed_post_is_retried_and_nothing_is_lost(receiver: Receiver, trouble: Answer | int) -> None:
    receiver.answers = [200, trouble, trouble]
    sink = WebhookSink(receiver.url("/#timeout=0.3"))
    for second in range(4):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    wait_for(lambda: len(receiver.posts) == 4)
    sink.close()
    assert [body["frame"] for body in receiver.bodies] == [0, 10, 20, 30]
    assert sink.dropped == 0


@pytest.mark.parametrize("trouble", [400, 401, 404, 302])
def test_a_refused_post_is_counted_as_lost(receiver: Receiver, trouble: int, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answers = [200, trouble, trouble]
    sink = WebhookSink(receiver.url())
    for second in range(4):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    sink.close()
    assert [body["frame"] for body in receiver.bodies] == [0, 30]
    assert sink.dropped == 2
    assert caplog.text.count(f"answers {trouble} ") == 1  # not once a message
    assert "messages lost: 2" in caplog.text


def test_a_server_that_restarts_gets_every_message(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saccade.sinks")
    sink = WebhookSink(receiver.url())
    sink.write(live_frame(0), showing("cat"), LATENCY)
    wait_for(lambda: len(receiver.posts) == 1)
    receiver.off()
    for second in range(1, 50):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    wait_for(lambda: "trying again" in caplog.text)
    time.sleep(0.3)  # some attempts, for the count of lines below
    receiver.on()
    wait_for(lambda: len(receiver.posts) == 50)
    sink.close()
    assert [body["frame"] for body in receiver.bodies] == [10 * n for n in range(50)]
    assert 1 <= caplog.text.count("trying again") <= 2
    assert "works" in caplog.text


def test_a_full_backlog_drops_the_oldest(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_module, "MAX_WAITING", 10)
    receiver.off()
    sink = WebhookSink(receiver.url())
    for second in range(500):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    receiver.on()
    wait_for(lambda: len(receiver.posts) >= 10)
    sink.close()
    frames = [body["frame"] // 10 for body in receiver.bodies]
    assert frames[-10:] == list(range(490, 500))
    assert len(frames) <= 11  # and the one that was under way
    assert sink.dropped == 500 - len(frames)


async def slow(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(0.2)
    return web.Response()


class Clock:
    """A receiver that takes 0.2 s a request, and how old each record was when it arrived."""

    def __init__(self, receiver: Receiver) -> None:
        self.ages: list[float] = []
        receiver.answers = [self._answer] * 1000

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.ages.append(time.time() - (await request.json())["captured_at"])
        return await slow(request)


def post_for(sink: WebhookSink, seconds: float, rate: float = 20) -> None:
    """Write that many records a second, each captured now."""
    for n in range(round(seconds * rate)):
        sink.write(replace(live_frame(n), captured_at=time.time()), showing("cat"), LATENCY)
        time.sleep(1 / rate)


@pytest.mark.parametrize(
    ("options", "most_s"), [("max_age=1s", 1.3), ("keep=newest", 0.6), ("concurrency=8", 0.6), ("max_age=100", None)]
)
def test_a_slow_server_lags_no_longer_than_allowed(receiver: Receiver, options: str, most_s: float | None) -> None:
    clock = Clock(receiver)
    sink = WebhookSink(receiver.url(f"/#{options}"))
    post_for(sink, 3)
    stats = sink.stats()
    assert stats.backlog is not None
    assert stats.backlog_age_s is not None
    if most_s is None:  # what it was before: 15 in 3 s, and the lag grows by 0.75 s a second
        assert clock.ages[-1] > 1.6
        assert stats.backlog > 30
        assert stats.backlog_age_s > 1.6
    else:
        assert max(clock.ages) < most_s
        assert stats.backlog_age_s < most_s
        assert (stats.dropped or 0) == (
            0 if "concurrency" in options else pytest.approx(60 - 15 - stats.backlog, abs=4)
        )
    sink.close()
    assert sink.stats().backlog == 0 or most_s is None


def test_several_requests_run_at_a_time_and_lose_nothing(receiver: Receiver) -> None:
    running = most = 0

    async def count(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        receiver.posts.append((str(request.rel_url), dict(request.headers), await request.json()))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return web.Response()

    receiver.answers = [count] * 50
    sink = WebhookSink(receiver.url("/#concurrency=4"))
    for second in range(50):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    sink.close()
    assert sorted(body["frame"] for body in receiver.bodies) == [10 * n for n in range(50)]
    assert most == 4
    assert (sink.stats().sent, sink.dropped) == (50, 0)


def test_requests_are_signed_as_standard_webhooks_are(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n")
    bodies: list[bytes] = []
    seen: list[dict[str, str]] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.read())
        seen.append(dict(request.headers))
        return web.Response(status=500 if len(seen) == 1 else 200)

    receiver.answers = [keep] * 3
    sink = WebhookSink(receiver.url(f"/#secret_file={tmp_path}/secret&header=X-Key:a%3Ab&header=X-Site:%20yard 4"))
    for second in range(2):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    wait_for(lambda: len(seen) == 3)
    sink.close()
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    for headers, body in zip(seen, bodies, strict=True):
        content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(key, content, "sha256").digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 10
        assert (headers["X-Key"], headers["X-Site"]) == ("a:b", "yard 4")
        assert headers["Idempotency-Key"] == headers["webhook-id"]
    ids = [headers["webhook-id"] for headers in seen]
    assert ids[0] == ids[1] != ids[2]  # the same at every attempt, and another for another message


def test_the_known_answer_of_the_standard_is_reproduced() -> None:
    request = WebhookRequest("http://host/", {}, base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"))
    headers = request.signed("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_events_of_a_silent_camera_end(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "SILENT_S", 0.5)
    monkeypatch.setattr(webhook_module, "_WAIT_S", 0.1)
    sink = WebhookSink(receiver.url("#send=events"))
    sink.write(live_frame(0), showing("cat"), LATENCY)
    wait_for(lambda: len(receiver.posts) == 2)
    assert [body["type"] for body in receiver.bodies] == ["new", "end"]
    assert receiver.bodies[1]["after"]["end_time"] == 1.7e9
    sink.close()


def test_close_is_quick_and_logs_what_is_lost(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook_module, "CLOSE_S", 0.5)
    receiver.answers = [hang] * 100
    sink = WebhookSink(receiver.url("/#timeout=60"))
    for second in range(5):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    begun = time.monotonic()
    sink.close()
    sink.write(live_frame(9), showing("cat"), LATENCY)
    assert time.monotonic() - begun < 5
    assert "messages lost: 5" in caplog.text
    assert not [thread for thread in threading.enumerate() if str(receiver.port) in thread.name]


def test_passwords_and_paths_are_never_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.answers = [500, cut, 404]
    target = receiver.url("/services/secret1?token=secret2").replace("://", "://me:secret%2F3@")
    sink = WebhookSink(target)
    for second in range(2):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    sink.close()
    headers = receiver.posts[-1][1]
    assert headers["Authorization"] == "Basic bWU6c2VjcmV0LzM="  # me:secret/3
    assert f"127.0.0.1:{receiver.port}" in caplog.text
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("saccade.sinks")]
    assert "secret" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://", "is not a valid address: use https://user:password@host/path"),
        ("https://me:sec/ret@host", "special characters of a password as %XX"),
        ("https://me:sec#ret@host", "is not a valid address"),
        ("http://host:x/", "is not a valid address"),
        ("http://host/#send=some", "http://host: send should be objects or all or events, not 'some'"),
        ("http://host/?a=1#sent=all", "http://host: unknown option 'sent'; did you mean 'send'?"),
        ("http://host/#timeout=0", "timeout should be a time"),
        ("http://host/#concurrency=65", "concurrency should be a whole number from 1 to 64"),
        ("http://host/#keep=5", "keep should be all or newest"),
        ("http://host/#header=a%20b:x", "header should be NAME:VALUE"),
        ("http://host/#header=Host:x", "header should be NAME:VALUE, and 'Host' cannot be one"),
        ("http://host/#header=X-A:b%0D%0AX-B:c", "header should be NAME:VALUE"),
        ("http://host/#secret=whsec_!", "what follows whsec_ in the secret is not base64"),
        ("http://host/#secret_file=/no/such", "cannot read secret_file /no/such: No such file or directory"),
    ],
)
def test_an_invalid_target_is_refused_in_one_line(target: str, expected: str) -> None:
    with pytest.raises(SinkError) as caught:
        open_sink(target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "ret@" not in str(caught.value)


def test_bodies_are_json_in_utf8(receiver: Receiver) -> None:
    sink = WebhookSink(receiver.url())
    sink.write(live_frame(0), Result(Detections((), 1, 1), Points((), 1, 1), (Text("wer", "ein Fuß"),)), LATENCY)
    sink.close()
    assert json.loads(json.dumps(receiver.bodies[0]))["answers"] == [{"prompt": "wer", "text": "ein Fuß"}]

"""WebhookSink against a server that fails, is busy, refuses, hangs, restarts or is slow."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from saccade.sinks import WebhookSink
from saccade.sinks import backoff as backoff_module
from saccade.sinks.messaging import webhook as webhook_module
from saccade.sinks.messaging.webhook_request import WebhookRequest
from tests.support.sinks.broker import wait_for
from tests.support.sinks.receiver import Answer, Receiver, busy, cut, hang
from tests.support.sinks.results import LATENCY, live_frame, showing


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff_module, "FIRST_S", 0.05)
    monkeypatch.setattr(backoff_module, "LAST_S", 0.2)


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
    assert "undelivered messages: 2" in caplog.text


def test_a_server_that_restarts_gets_every_message(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saccade.sinks")
    sink = WebhookSink(receiver.url())
    sink.write(live_frame(0), showing("cat"), LATENCY)
    wait_for(lambda: len(receiver.posts) == 1)
    receiver.off()
    for second in range(1, 50):
        sink.write(live_frame(second), showing("cat"), LATENCY)
    wait_for(lambda: "retrying" in caplog.text)
    time.sleep(0.3)  # some attempts, for the count of lines below
    receiver.on()
    wait_for(lambda: len(receiver.posts) == 50)
    sink.close()
    assert [body["frame"] for body in receiver.bodies] == [10 * n for n in range(50)]
    assert 1 <= caplog.text.count("retrying") <= 2
    assert ": Connection refused; retrying" in caplog.text
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


async def slow(request: Request) -> Response:
    await asyncio.sleep(0.2)
    return Response()


class Clock:
    """A receiver that takes 0.2 s a request, and how old each record was when it arrived."""

    def __init__(self, receiver: Receiver) -> None:
        self.ages: list[float] = []
        receiver.answers = [self._answer] * 1000

    async def _answer(self, request: Request) -> Response:
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

    async def count(request: Request) -> Response:
        nonlocal running, most
        await receiver.keep(request)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Response()

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
    seen: list[Headers] = []

    async def keep(request: Request) -> Response:
        bodies.append(await request.body())
        seen.append(request.headers)
        return Response(status_code=500 if len(seen) == 1 else 200)

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
    assert "undelivered messages: 5" in caplog.text
    assert not [thread for thread in threading.enumerate() if str(receiver.port) in thread.name]

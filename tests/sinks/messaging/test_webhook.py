"""WebhookSink and what it posts to a real server; what is refused, and what is never logged."""

from __future__ import annotations

import json
import logging
import threading

import pytest

from saccade.engine.results import Detections, Points, Result, Spot, Text
from saccade.sinks import SinkError, SupportsStreamEnd, WebhookSink, make_record, open_sink
from saccade.sinks import backoff as backoff_module
from saccade.sinks.messaging import events as events_module
from saccade.sinks.messaging import webhook as webhook_module
from tests.support.sinks.broker import wait_for
from tests.support.sinks.receiver import Receiver, cut
from tests.support.sinks.results import LATENCY, live_frame, showing


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


def test_the_events_of_a_silent_camera_end(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "SILENT_S", 0.5)
    monkeypatch.setattr(webhook_module, "_WAIT_S", 0.1)
    sink = WebhookSink(receiver.url("#send=events"))
    sink.write(live_frame(0), showing("cat"), LATENCY)
    wait_for(lambda: len(receiver.posts) == 2)
    assert [body["type"] for body in receiver.bodies] == ["new", "end"]
    assert receiver.bodies[1]["after"]["end_time"] == 1.7e9
    sink.close()


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
        ("http://host/#send=some", "http://host: send should be objects or all or events or rules, not 'some'"),
        ("http://host/?a=1#sent=all", "http://host: unknown option 'sent'; did you mean 'send'?"),
        ("http://host/#timeout=0", "timeout should be a time"),
        ("http://host/#concurrency=65", "concurrency should be a whole number from 1 to 64"),
        ("http://host/#keep=5", "keep should be all or newest"),
        ("http://host/#header=a%20b:x", "header must be NAME:VALUE"),
        ("http://host/#header=Host:x", "a header must be NAME:VALUE; 'Host' is not a valid header"),
        ("http://host/#header=X-A:b%0D%0AX-B:c", "header must be NAME:VALUE"),
        ("http://host/#secret=whsec_!", "the secret after whsec_ must be base64"),
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

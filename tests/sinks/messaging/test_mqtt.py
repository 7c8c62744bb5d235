"""MqttSink against a real mosquitto: topics, restarts, the last will; and what is refused without any broker."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.engine.results import Points, Result, Spot
from saccade.sinks import MqttSink, SinkError, SupportsStreamEnd, make_record, open_sink
from saccade.sinks import backoff as backoff_module
from saccade.sinks.messaging import events as events_module
from saccade.sinks.messaging import mqtt as mqtt_module
from saccade.sinks.messaging.mqtt_topics import Topics
from saccade.sinks.outbox import MAX_RECORDS
from tests.support import REPO
from tests.support.broker import LONG_S, Broker, Listener, needs_mosquitto, wait_for
from tests.support.results import LATENCY, live_frame, showing


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as one:
        yield one


@pytest.fixture
def listener(broker: Broker) -> Iterator[Listener]:
    with Listener(broker) as one:
        yield one


def url(broker: Broker, rest: str = "") -> str:
    return f"mqtt://127.0.0.1:{broker.port}{rest}"


@needs_mosquitto
def test_a_visit_is_published_in_frigates_topics(broker: Broker, listener: Listener) -> None:
    sink = open_sink(url(broker))
    assert isinstance(sink, MqttSink)
    assert sink.shared
    assert isinstance(sink, SupportsStreamEnd)
    frames = [[], ["person"], ["person"], ["person", "person", "cat"], ["person"], [], [], [], [], []]
    for second, labels in enumerate(frames):
        sink.write(live_frame(second), showing(*labels), LATENCY)
    wait_for(lambda: len(listener.events()) == 6)
    sink.close()
    sink.close()
    wait_for(lambda: listener.last("saccade/available") == "offline")

    assert listener.of("saccade/available") == ["online", "offline"]
    assert listener.of("saccade/door/available") == ["online", "offline"]
    steps = [(e["type"], e["after"]["label"], e["after"]["count"]) for e in listener.events()]
    assert steps == [
        ("new", "person", 1),
        ("update", "person", 2),
        ("new", "cat", 1),
        ("update", "person", 1),
        ("end", "cat", 0),
        ("end", "person", 0),
    ]
    first, *_, last = listener.events()
    assert first["before"] == first["after"]
    assert first["after"] | {"id": ""} == {
        "camera": "door",
        "id": "",
        "stream": "door",
        "label": "person",
        "start_time": 1.7e9 + 1,
        "end_time": None,
        "score": 0.9,
        "top_score": 0.9,
        "box": [20, 10, 100, 50],
        "count": 1,
    }
    assert last["after"]["id"] == first["after"]["id"]
    assert last["after"]["end_time"] == 1.7e9 + 4
    assert last["before"]["end_time"] is None
    assert listener.last("saccade/door/person") == "0"
    assert not [topic for topic, _, _ in listener.heard if topic.endswith("record")]
    with Listener(broker) as late:
        retained = {topic: payload for topic, payload, kept in late.heard if kept}
        wait_for(lambda: len([1 for _, _, kept in late.heard if kept]) == 4)
        retained = {topic: payload for topic, payload, kept in late.heard if kept}
    assert retained == {
        "saccade/available": "offline",
        "saccade/door/available": "offline",
        "saccade/door/person": "0",
        "saccade/door/cat": "0",
    }


@needs_mosquitto
def test_records_of_several_streams_from_several_threads(broker: Broker, listener: Listener) -> None:
    sink = MqttSink(url(broker, "/home/eyes?records=1"))
    wait_for(lambda: listener.last("home/eyes/available") == "online")

    def run(stream: str) -> None:
        for n in range(20):
            sink.write(live_frame(n / 10, stream), showing("cup"), LATENCY)
            time.sleep(0.005)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in ("door", "hall/2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: len(listener.of("home/eyes/door/record")) == len(listener.of("home/eyes/hall-2/record")) == 20)
    sink.close()
    assert json.loads(listener.of("home/eyes/door/record")[3]) == make_record(live_frame(0.3), showing("cup"), LATENCY)
    frames = [json.loads(text)["frame"] for text in listener.of("home/eyes/hall-2/record")]
    assert frames == list(range(20))
    assert sink.dropped == 0


@needs_mosquitto
def test_points_are_counted_like_boxes(broker: Broker, listener: Listener) -> None:
    sink = MqttSink(url(broker))
    spots = (Spot("cup", 0.8, 0.5, 0.5), Spot("cup", 0.7, 0.1, 0.1), Spot("person", 0.6, 0.1, 0.1))
    sink.write(live_frame(0), Result(showing("person").detections, Points(spots, 200, 100)), LATENCY)
    wait_for(lambda: listener.last("saccade/door/person") == "1")
    wait_for(lambda: listener.last("saccade/door/cup") == "2")
    wait_for(lambda: len(listener.events()) == 2)
    sink.close()
    assert [e["after"]["box"] for e in listener.events()[:2]] == [[20, 10, 100, 50], [100, 50, 100, 50]]


def heard_frame(listener: Listener) -> int | None:
    """The number of the last frame whose record was heard."""
    record = listener.last("saccade/door/record")
    return json.loads(record)["frame"] if record else None


@needs_mosquitto
def test_a_broker_restart_loses_only_records_of_the_gap(
    broker: Broker, listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff_module, "FIRST_S", 2.0)  # the listener shall be back before the sink is
    caplog.set_level(logging.INFO, "saccade.sinks")
    sink = MqttSink(url(broker, "/?records=1"))
    seconds = iter(range(10_000))

    def feed(*labels: str) -> int:
        sink.write(live_frame(second := next(seconds)), showing(*labels), LATENCY)
        return second

    feed("person")
    before = feed("person")
    wait_for(lambda: len(listener.of("saccade/door/record")) == 2)
    broker.off()
    listener.heard.clear()
    for _ in range(400):  # more than the outbox holds
        feed()
    gap = [feed("dog"), feed("dog", "dog")]
    wait_for(lambda: not listener.subscribed.is_set())
    broker.on()
    wait_for(listener.subscribed.is_set)
    wait_for(lambda: listener.last("saccade/door/dog") == "2")  # the state, though it changed while the broker was away
    assert listener.last("saccade/available") == listener.last("saccade/door/available") == "online"
    wait_for(lambda: len(listener.events()) >= 3)  # what happened meanwhile
    steps = [(e["type"], e["after"]["label"]) for e in listener.events()]
    assert [one for one in steps if one[0] != "update"] == [("end", "person"), ("new", "dog")]
    wait_for(lambda: heard_frame(listener) == 10 * gap[-1])
    after = [feed("dog", "dog") for _ in range(20)]
    wait_for(lambda: heard_frame(listener) == 10 * after[-1])
    frames = [json.loads(text)["frame"] // 10 for text in listener.of("saccade/door/record")]
    assert frames == sorted(frames)
    assert set(after) <= set(frames)
    assert set(gap) <= set(frames)  # the newest of the gap
    assert before < frames[0]
    # But for one that is under way, and one that went into a connection which was not yet known to be broken.
    assert 400 - MAX_RECORDS <= sink.dropped <= 402 - MAX_RECORDS
    sink.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(": ")[2] for line in lines] == ["connected", "connection lost; trying again", "connected"]


@needs_mosquitto
def test_a_busy_sink_notices_a_broker_restart_at_once(
    broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_module, "PUBLISH_S", 10.0 * LONG_S)  # an answer that will never come
    sink = MqttSink(url(broker, "/?hold=0.01"))
    stop = threading.Event()

    def run() -> None:
        second = 0
        while not stop.is_set():
            sink.write(live_frame(second), showing(*("cat",) * (1 + second % 3)), LATENCY)
            second += 1
            time.sleep(0.001)  # busy, but without keeping the interpreter from the sink's own thread

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: len(listener.events()) > 20)
        broker.off()
        listener.heard.clear()
        broker.on()
        wait_for(lambda: len(listener.events()) > 20)
    finally:
        stop.set()
        thread.join()
        sink.close()


@needs_mosquitto
def test_a_broker_that_starts_later_gets_all_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker(tmp_path)
    with caplog.at_level(logging.INFO):
        sink = MqttSink(url(broker))
        sink.write(live_frame(0), showing("person"), LATENCY)
        wait_for(lambda: "trying again" in caplog.text)
        with broker, Listener(broker) as listener:
            wait_for(lambda: listener.last("saccade/door/person") == "1")
            wait_for(lambda: len(listener.events()) == 1)
            sink.close()


WILL = """
import sys, os, time
sys.path.insert(0, sys.argv[1])
from saccade.sinks import MqttSink
from tests.support.results import LATENCY, live_frame, showing
sink = MqttSink(sys.argv[2])
sink.write(live_frame(0), showing("person", "person"), LATENCY)
print("written", flush=True)
time.sleep(60)
"""


@needs_mosquitto
def test_after_a_kill_the_will_is_sent_and_the_next_run_cleans(broker: Broker, listener: Listener) -> None:
    command = [sys.executable, "-c", WILL, str(REPO), url(broker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        wait_for(lambda: listener.last("saccade/door/person") == "2")
        assert listener.of("saccade/available") == ["online"]
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: listener.last("saccade/available") == "offline")
    assert listener.last("saccade/door/person") == "2"  # the process could not set it back

    listener.publish("saccade/hall/person", "7")  # another one's stream
    sink = MqttSink(url(broker))
    sink.write(live_frame(0), showing("cat"), LATENCY)
    wait_for(lambda: listener.last("saccade/door/person") == "0")
    wait_for(lambda: listener.last("saccade/door/cat") == "1")
    sink.close()
    assert listener.last("saccade/hall/person") == "7"


@needs_mosquitto
def test_after_a_kill_no_state_but_offline_stays_retained(broker: Broker) -> None:
    """One topic that all depend on turns offline at once by the will; the rest is forgotten by the broker."""
    code = "from saccade.sinks.messaging import mqtt\nmqtt.EXPIRY_S = 2\n" + WILL
    command = [sys.executable, "-c", code, str(REPO), url(broker)]
    with Listener(broker) as listener, subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO) as process:
        wait_for(lambda: listener.last("saccade/door/person") == "2")
        time.sleep(3)  # longer than the expiry: what goes on is repeated
        with Listener(broker) as late:
            wait_for(lambda: late.last("saccade/door/person") == "2")
            assert late.last("saccade/door/available") == "online"
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: listener.last("saccade/available") == "offline")
    time.sleep(3)
    with Listener(broker) as late:
        wait_for(lambda: late.last("saccade/available") == "offline")
        time.sleep(0.3)
        assert [(topic, payload) for topic, payload, _ in late.heard] == [("saccade/available", "offline")]


@needs_mosquitto
def test_a_broker_of_mqtt_3_is_served_too(broker: Broker, listener: Listener) -> None:
    sink = MqttSink(url(broker, "?protocol=3"))
    sink.write(live_frame(0), showing("person"), LATENCY)
    wait_for(lambda: listener.last("saccade/door/person") == "1")
    wait_for(lambda: sink.stats().backlog == 0)
    assert sink.stats().connected
    sink.close()


@needs_mosquitto
def test_the_stats_tell_whether_the_broker_is_connected(broker: Broker) -> None:
    sink = MqttSink(url(broker))
    sink.write(live_frame(0), showing("person"), LATENCY)
    wait_for(lambda: sink.stats().connected is True and sink.stats().backlog == 0)
    broker.off()
    wait_for(lambda: sink.stats().connected is False)
    sink.write(live_frame(1), showing("person", "cat"), LATENCY)
    assert (sink.stats().backlog or 0) >= 1
    sink.close()


@needs_mosquitto
def test_a_stream_that_ends_is_offline_while_others_go_on(
    broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MqttSink(url(broker))
    for stream in ("door", "hall"):
        sink.write(live_frame(0, stream), showing("person"), LATENCY)
    wait_for(lambda: len(listener.events()) == 2)
    sink.end("door")
    sink.end("never heard of")
    wait_for(lambda: listener.last("saccade/door/available") == "offline")
    wait_for(lambda: listener.last("saccade/door/person") == "0")
    wait_for(lambda: [e["type"] for e in listener.events()] == ["new", "new", "end"])
    assert listener.last("saccade/hall/available") == "online"
    sink.write(live_frame(0, "door"), showing("person"), LATENCY)  # it is back, its clock from the beginning
    wait_for(lambda: listener.last("saccade/door/available") == "online")
    wait_for(lambda: listener.last("saccade/door/person") == "1")
    sink.close()


@needs_mosquitto
def test_a_silent_stream_is_offline(broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "SILENT_S", 0.5)
    monkeypatch.setattr(mqtt_module, "SILENT_S", 0.5)
    sink = MqttSink(url(broker))
    sink.write(live_frame(0), showing("person"), LATENCY)
    wait_for(lambda: listener.of("saccade/door/available") == ["online", "offline"])
    wait_for(lambda: listener.of("saccade/door/person") == ["1", "0"])
    sink.close()


@needs_mosquitto
def test_a_frozen_broker_does_not_delay_writers(
    broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_module, "PUBLISH_S", 1.0)
    sink = MqttSink(url(broker, "?records=1"))
    wait_for(lambda: listener.last("saccade/available") == "online")
    broker.freeze()
    try:
        begun = time.monotonic()
        for n in range(500):
            sink.write(live_frame(n), showing("person"), LATENCY)
        sink.write(live_frame(500), showing("person", "dog"), LATENCY)
        assert time.monotonic() - begun < 5
        time.sleep(1.5)
    finally:
        broker.thaw()
    wait_for(lambda: listener.last("saccade/door/dog") == "1")
    wait_for(lambda: listener.last("saccade/available") == "online")
    broker.freeze()
    try:
        begun = time.monotonic()
        sink.close()
        assert time.monotonic() - begun < 12
    finally:
        broker.thaw()


@needs_mosquitto
def test_passwords_are_used_and_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Broker(tmp_path, user="me", password="se/cr@t") as broker:
        wrong = MqttSink(f"mqtt://me:wrong-one@127.0.0.1:{broker.port}")
        wait_for(lambda: "trying again" in caplog.text)
        wrong.close()
        right = MqttSink(f"mqtt://me:se%2Fcr%40t@127.0.0.1:{broker.port}")
        with Listener(broker, user="me", password="se/cr@t") as listener:
            wait_for(lambda: listener.last("saccade/available") == "online")
        right.close()
    assert "uthori" in caplog.text  # (not) authorized, authorised
    for secret in ("wrong-one", "se/cr@t", "se%2F"):
        assert secret not in caplog.text
        assert secret not in repr(vars(right))


@needs_mosquitto
def test_tls_requires_a_trusted_certificate(
    tmp_path: Path, certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with Broker(tmp_path, certificate=certificate) as broker, Listener(broker) as listener:
        untrusting = MqttSink(f"mqtts://127.0.0.1:{broker.tls_port}")
        wait_for(lambda: "certificate verify failed" in caplog.text)
        untrusting.close()
        assert listener.heard == []
        sink = MqttSink(f"mqtts://127.0.0.1:{broker.tls_port}?ca={certificate[0]}")
        wait_for(lambda: listener.last("saccade/available") == "online")
        sink.close()


def test_close_without_a_broker_is_quick_and_logs_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    sink = MqttSink("mqtt://127.0.0.1:9")
    sink.write(live_frame(0), showing("person"), LATENCY)
    begun = time.monotonic()
    sink.close()
    sink.write(live_frame(1), showing("person"), LATENCY)
    assert time.monotonic() - begun < LONG_S / 2
    assert "undelivered" in caplog.text
    assert not [thread for thread in threading.enumerate() if "mqtt://127.0.0.1:9" in thread.name]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("mqtt://", "is not a valid address: use mqtt://user:password@host:1883/saccade"),
        ("mqtt://host:port", "is not a valid address"),
        ("mqtt://host:99999", "is not a valid address"),
        ("mqtt://me:secret@host:0/x", "is not a valid address"),
        ("mqtt://me:sec/ret@host", "special characters of a password as %XX"),
        ("mqtt://host/a/+/b", "cannot begin an MQTT topic"),
        ("mqtt://host/$SYS", "cannot begin an MQTT topic"),
        ("mqtt://host?record=1", "mqtt://host: unknown option 'record'; did you mean 'records'?"),
        ("mqtt://host?records=maybe", "mqtt://host: records should be 0 or 1, not 'maybe'"),
        ("mqtt://host?hold=0", "hold should be a time"),
        ("mqtt://host?ca=x.pem", "ca is for mqtts://"),
        ("mqtts://host?ca=/no/such.pem", "cannot read certificates from /no/such.pem: No such file or directory"),
    ],
)
def test_an_invalid_target_is_refused_in_one_line(target: str, expected: str) -> None:
    with pytest.raises(SinkError) as caught:
        open_sink(target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "sec" not in str(caught.value)


def test_a_missing_aiomqtt_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiomqtt", None)
    with pytest.raises(SinkError, match=r"pip install 'saccade\[mqtt\]'"):
        open_sink("mqtt://host")


@pytest.mark.parametrize(
    ("stream", "label", "topic"),
    [
        ("door", "person", "eyes/door/person"),
        ("door", "traffic light", "eyes/door/traffic light"),
        ("a/b#c+d", "cat/dog", "eyes/a-b-c-d/cat-dog"),
        ("door", "record", "eyes/door/record_"),
        ("door", "available", "eyes/door/available_"),
        ("", "\x00\ud800", "eyes/-/--"),
    ],
)
def test_any_name_makes_a_valid_topic(stream: str, label: str, topic: str) -> None:
    topics = Topics("eyes")
    assert topics.count(stream, label) == topic
    assert topics.is_count(topic)
    assert not topics.is_count(topics.record(stream))
    assert not topics.is_count(topics.stream_available(stream))


def test_events_of_a_file_have_the_times_of_its_frames() -> None:
    sink = MqttSink("mqtt://127.0.0.1:9")
    sink.write(replace(live_frame(2), captured_at=2.0, capture_clock="file"), showing("cup"), LATENCY)
    items = []
    while (item := sink._backlog.next()) is not None:
        items.append(item)
        sink._backlog.published(item)
    sink.close()
    (event,) = (json.loads(item.payload) for item in items if item.topic == "saccade/events")
    assert event["after"]["start_time"] == 2.0

"""MqttSink through all that a connection to a real mosquitto goes through: restarts, kills, freezes, logins, TLS."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from saccade.sinks import MqttSink
from saccade.sinks import backoff as backoff_module
from saccade.sinks.messaging import mqtt as mqtt_module
from saccade.sinks.outbox import MAX_RECORDS
from tests.support import REPO
from tests.support.sinks.broker import LONG_S, Broker, Listener, needs_mosquitto, wait_for
from tests.support.sinks.results import LATENCY, live_frame, showing


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
    sink = MqttSink(broker.url("/?records=1"))
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
    assert [line.rpartition(": ")[2] for line in lines] == [
        "connected to the MQTT broker",
        "connection lost; retrying",
        "connected to the MQTT broker",
    ]


@needs_mosquitto
def test_a_busy_sink_notices_a_broker_restart_at_once(
    broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_module, "PUBLISH_S", 10.0 * LONG_S)  # an answer that will never come
    sink = MqttSink(broker.url("/?hold=0.01"))
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
        sink = MqttSink(broker.url())
        sink.write(live_frame(0), showing("person"), LATENCY)
        wait_for(lambda: "retrying" in caplog.text)
        with broker, Listener(broker) as listener:
            wait_for(lambda: listener.last("saccade/door/person") == "1")
            wait_for(lambda: len(listener.events()) == 1)
            sink.close()


WILL = """
import sys, os, time
sys.path.insert(0, sys.argv[1])
from saccade.sinks import MqttSink
from tests.support.sinks.results import LATENCY, live_frame, showing
sink = MqttSink(sys.argv[2])
sink.write(live_frame(0), showing("person", "person"), LATENCY)
print("written", flush=True)
time.sleep(60)
"""


@needs_mosquitto
def test_after_a_kill_the_will_is_sent_and_the_next_run_cleans(broker: Broker, listener: Listener) -> None:
    command = [sys.executable, "-c", WILL, str(REPO), broker.url()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        wait_for(lambda: listener.last("saccade/door/person") == "2")
        assert listener.of("saccade/available") == ["online"]
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: listener.last("saccade/available") == "offline")
    assert listener.last("saccade/door/person") == "2"  # the process could not set it back

    listener.publish("saccade/hall/person", "7")  # another one's stream
    sink = MqttSink(broker.url())
    sink.write(live_frame(0), showing("cat"), LATENCY)
    wait_for(lambda: listener.last("saccade/door/person") == "0")
    wait_for(lambda: listener.last("saccade/door/cat") == "1")
    sink.close()
    assert listener.last("saccade/hall/person") == "7"


@needs_mosquitto
def test_after_a_kill_no_state_but_offline_stays_retained(broker: Broker) -> None:
    """One topic that all depend on turns offline at once by the will; the rest is forgotten by the broker."""
    code = "from saccade.sinks.messaging import mqtt\nmqtt.EXPIRY_S = 2\n" + WILL
    command = [sys.executable, "-c", code, str(REPO), broker.url()]
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
    sink = MqttSink(broker.url("?protocol=3"))
    sink.write(live_frame(0), showing("person"), LATENCY)
    wait_for(lambda: listener.last("saccade/door/person") == "1")
    wait_for(lambda: sink.stats().backlog == 0)
    assert sink.stats().connected
    sink.close()


@pytest.mark.parametrize("refusal", [b"\x20\x02\x00\x01", b"\x20\x03\x00\x84\x00"])
def test_a_broker_that_refuses_mqtt_5_is_served_in_mqtt_3(refusal: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "saccade.sinks")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LONG_S)
        sink = MqttSink(f"mqtt://127.0.0.1:{server.getsockname()[1]}")
        versions = []
        for answer in (refusal, b"\x20\x02\x00\x00"):
            connection, _ = server.accept()
            with connection:
                hello = connection.recv(4096)
                versions.append(hello[hello.index(b"MQTT") + 4])
                connection.sendall(answer)
                if answer is not refusal:
                    wait_for(lambda: sink.stats().connected is True)
                    sink.close()
        assert versions == [5, 4]  # 4 is how MQTT 3.1.1 calls itself
    assert "Unsupported protocol version; retrying" in caplog.text


@needs_mosquitto
def test_the_stats_tell_whether_the_broker_is_connected(broker: Broker) -> None:
    sink = MqttSink(broker.url())
    sink.write(live_frame(0), showing("person"), LATENCY)
    wait_for(lambda: sink.stats().connected is True and sink.stats().backlog == 0)
    broker.off()
    wait_for(lambda: sink.stats().connected is False)
    sink.write(live_frame(1), showing("person", "cat"), LATENCY)
    assert (sink.stats().backlog or 0) >= 1
    sink.close()


@needs_mosquitto
def test_a_frozen_broker_does_not_delay_writers(
    broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_module, "PUBLISH_S", 1.0)
    sink = MqttSink(broker.url("?records=1"))
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
        wait_for(lambda: "retrying" in caplog.text)
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

"""MqttSink and what it publishes to a real mosquitto, and what is refused without any broker."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace

import pytest

from saccade.engine.results import Points, Result, Spot
from saccade.sinks import MqttSink, SinkError, SupportsStreamEnd, make_record, open_sink
from saccade.sinks.messaging import events as events_module
from saccade.sinks.messaging import mqtt as mqtt_module
from saccade.sinks.messaging.mqtt_topics import Topics
from saccade.sinks.overlay.scene import Line, Zone
from tests.support.sinks.broker import Broker, Listener, needs_mosquitto, wait_for
from tests.support.sinks.results import LATENCY, live_frame, showing


@needs_mosquitto
def test_a_visit_is_published_in_frigates_topics(broker: Broker, listener: Listener) -> None:
    sink = open_sink(broker.url())
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
    sink = MqttSink(broker.url("/home/eyes?records=1"))
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
def test_zones_and_lines_have_topics(broker: Broker, listener: Listener) -> None:
    listener.publish("saccade/door/zones/stairs/person", "3")  # of an earlier run
    sink = MqttSink(broker.url())
    corners, ends = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)), ((0.0, 0.5), (1.0, 0.5))
    for second, (inside, forward) in enumerate([(0, 0), (1, 0), (2, 1), (2, 1)]):
        zone = Zone("the hall", corners, counts={"person": {"inside": inside, "entered": 2, "left": 0}})
        line = Line("gate", *ends, counts={"person": {"forward": forward, "backward": 0}})
        sink.write(live_frame(second), replace(showing("person"), extras={"zones": (zone,), "lines": (line,)}), LATENCY)
        wait_for(lambda: listener.last("saccade/door/zones/the hall/person") == str(inside))  # noqa: B023
    wait_for(lambda: listener.last("saccade/door/lines/gate/person/forward") == "1")
    wait_for(lambda: listener.last("saccade/door/zones/stairs/person") == "0")
    sink.close()
    wait_for(lambda: listener.last("saccade/available") == "offline")
    assert listener.of("saccade/door/zones/the hall/person") == ["0", "1", "2", "0"]
    assert listener.of("saccade/door/lines/gate/person/forward")[-2:] == ["1", "0"]
    assert listener.of("saccade/door/lines/gate/person/backward") == ["0"]  # once, not with each frame


@needs_mosquitto
def test_points_are_counted_like_boxes(broker: Broker, listener: Listener) -> None:
    sink = MqttSink(broker.url())
    spots = (Spot("cup", 0.8, 0.5, 0.5), Spot("cup", 0.7, 0.1, 0.1), Spot("person", 0.6, 0.1, 0.1))
    sink.write(live_frame(0), Result(showing("person").detections, Points(spots, 200, 100)), LATENCY)
    wait_for(lambda: listener.last("saccade/door/person") == "1")
    wait_for(lambda: listener.last("saccade/door/cup") == "2")
    wait_for(lambda: len(listener.events()) == 2)
    sink.close()
    assert [e["after"]["box"] for e in listener.events()[:2]] == [[20, 10, 100, 50], [100, 50, 100, 50]]


@needs_mosquitto
def test_a_stream_that_ends_is_offline_while_others_go_on(
    broker: Broker, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = MqttSink(broker.url())
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
    sink = MqttSink(broker.url())
    sink.write(live_frame(0), showing("person"), LATENCY)
    wait_for(lambda: listener.of("saccade/door/available") == ["online", "offline"])
    wait_for(lambda: listener.of("saccade/door/person") == ["1", "0"])
    sink.close()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("mqtt://", "is not a valid address: use mqtt://user:password@host:1883/saccade"),
        ("mqtt://host:port", "is not a valid address"),
        ("mqtt://host:99999", "is not a valid address"),
        ("mqtt://me:secret@host:0/x", "is not a valid address"),
        ("mqtt://me:sec/ret@host", "special characters of a password as %XX"),
        ("mqtt://host/a/+/b", "invalid MQTT topic prefix"),
        ("mqtt://host/$SYS", "invalid MQTT topic prefix"),
        ("mqtt://host?record=1", "mqtt://host: unknown option 'record'; did you mean 'records'?"),
        ("mqtt://host?records=maybe", "mqtt://host: records should be 0 or 1, not 'maybe'"),
        ("mqtt://host?hold=0", "hold should be a time"),
        ("mqtt://host?ca=x.pem", "the option ca needs an mqtts:// address"),
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
    with pytest.raises(SinkError, match=r"pip install 'saccade-live\[mqtt\]'"):
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

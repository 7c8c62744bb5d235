"""Events of rules on the wire: a real broker with Frigate's and Home Assistant's topics, and a real web server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from saccade.sinks import MqttSink, SupportsEvents, WebhookSink
from saccade.sinks.messaging.rule_events import discovery
from tests.support.sinks.broker import Broker, Listener, needs_mosquitto, wait_for
from tests.support.sinks.receiver import Receiver
from tests.support.sinks.results import LATENCY, live_frame, showing
from tests.support.sinks.rule_events import BEGIN, END, RULES

FRIGATE_READ = {
    "id",
    "camera",
    "frame_time",
    "snapshot_time",
    "label",
    "sub_label",
    "top_score",
    "false_positive",
    "start_time",
    "end_time",
    "score",
    "box",
    "area",
    "ratio",
    "region",
    "active",
    "stationary",
    "current_zones",
    "entered_zones",
    "has_clip",
    "has_snapshot",
}
"""The fields of Frigate's events that its own documentation names and consumers read."""

CONFIG = "homeassistant/binary_sensor/saccade_door/no_helmet/config"


@needs_mosquitto
def test_an_event_is_published_in_frigates_fields(broker: Broker, listener: Listener) -> None:
    sink = MqttSink(broker.url("?discovery=homeassistant"))
    assert isinstance(sink, SupportsEvents)
    sink.write(live_frame(0), showing(), LATENCY)
    sink.write_event(RULES)
    state = "saccade/door/rules/no helmet"
    wait_for(lambda: listener.last(state) == "OFF")
    sink.write_event(BEGIN)
    wait_for(lambda: listener.last(state) == "ON")
    sink.write_event(END)
    wait_for(lambda: len(listener.events()) == 2 and listener.last(state) == "OFF")
    sink.close()
    wait_for(lambda: listener.last("saccade/available") == "offline")
    first, last = listener.events()
    assert (first["type"], last["type"]) == ("new", "end")
    assert first["before"] == first["after"] == last["before"]
    assert set(first["after"]) >= FRIGATE_READ | {"rule", "tracks"}
    assert {name: first["after"][name] for name in ("camera", "rule", "box", "ratio", "region", "end_time")} == {
        "camera": "door",
        "rule": "no helmet",
        "box": [80, 20, 120, 80],
        "ratio": 0.67,
        "region": [0, 0, 200, 100],
        "end_time": None,
    }
    assert (last["after"]["end_time"], last["after"]["top_score"], last["after"]["id"]) == (1005.0, 0.97, BEGIN["id"])
    assert listener.of(state) == ["OFF", "ON", "OFF"]
    assert listener.of("saccade/door/rules/late") == ["OFF"]
    config = json.loads(listener.last(CONFIG) or "")
    assert config["state_topic"] == state
    assert [one["topic"] for one in config["availability"]] == ["saccade/available", "saccade/door/available"]
    with Listener(broker) as late:  # a Home Assistant that starts later
        wait_for(lambda: late.last(CONFIG) is not None and late.last(state) == "OFF")


@needs_mosquitto
def test_a_rule_stays_on_while_others_of_its_stream_change(broker: Broker, listener: Listener) -> None:
    sink = MqttSink(broker.url())
    for event in (RULES, BEGIN, {**RULES, "rules": ["no helmet", "new"]}):
        sink.write_event(event)
    wait_for(lambda: listener.last("saccade/door/rules/new") == "OFF")
    assert listener.last("saccade/door/rules/no helmet") == "ON"
    sink.write_event({**RULES, "rules": []})
    sink.write_event(END)
    wait_for(lambda: listener.last("saccade/door/rules/no helmet") == "OFF")
    sink.close()


@needs_mosquitto
def test_a_rule_that_was_on_when_killed_is_off_again(broker: Broker, listener: Listener) -> None:
    listener.publish("saccade/door/rules/gone", "ON")
    sink = MqttSink(broker.url())
    sink.write(live_frame(0), showing(), LATENCY)
    wait_for(lambda: listener.last("saccade/door/rules/gone") == "OFF")
    sink.close()


def test_home_assistant_is_given_valid_identifiers() -> None:
    topic, message = discovery("ha", "Hof 1/ä", "no helmet!", "s/x", ["s/available"])
    assert topic == "ha/binary_sensor/saccade_Hof_1__/no_helmet_/config"
    assert (message["unique_id"], message["name"]) == ("saccade_Hof_1___no_helmet_", "no helmet!")
    assert message["device"]["identifiers"] == ["saccade_Hof_1__"]


@pytest.mark.parametrize(("options", "posted"), [("#send=rules", 2), ("#send=events", 2), ("", 0), ("#send=all", 0)])
def test_a_webhook_gets_events_where_it_asks_for_them(receiver: Receiver, options: str, posted: int) -> None:
    sink = WebhookSink(receiver.url(f"/hook{options}"))
    assert isinstance(sink, SupportsEvents)
    for event in (RULES, BEGIN, END):
        sink.write_event(event)
    sink.close()
    assert receiver.bodies == [BEGIN, END][:posted]


def test_a_webhook_gets_snapshots_where_it_asks_for_them(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "e1.jpg").write_bytes(b"\xff\xd8jpeg")
    media = {
        "type": "media",
        "stream": "door",
        "event": BEGIN["id"],
        "kind": "snapshot",
        "path": str(tmp_path / "e1.jpg"),
    }
    sinks = WebhookSink(receiver.url("/a#send=rules&snapshot=1")), WebhookSink(receiver.url("/b#send=rules"))
    for sink in sinks:
        sink.write_event(BEGIN)
        sink.write_event(media)
        sink.write_event({**media, "kind": "clip"})
        sink.write_event({**media, "path": None})
        sink.write_event({**media, "path": str(tmp_path / "gone.jpg")})
        sink.close()
    shown = {"type": "snapshot", "id": BEGIN["id"], "stream": "door", "snapshot_jpeg": "/9hqcGVn"}
    assert [(url, body) for url, _, body in receiver.posts] == [("/a", BEGIN), ("/a", shown), ("/b", BEGIN)]

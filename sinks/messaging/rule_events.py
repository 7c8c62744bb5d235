"""MQTT messages for rules: events in Frigate's format, and discovery messages for Home Assistant."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ON, OFF = "ON", "OFF"

_TYPES = {"begin": "new", "update": "update", "end": "end"}


def frigate_message(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message about a rule event in Frigate's format.

    Args:
        before: the last published record of the event. For a new event, it equals `after`.
        after: the current record.
    """
    return {"type": _TYPES[after["type"]], "before": _frigate_fields(before), "after": _frigate_fields(after)}


def _frigate_fields(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an event with Frigate's field names."""
    box = event["box"] and [round(value) for value in event["box"]]
    width, height = (box[2] - box[0], box[3] - box[1]) if box else (0, 0)
    return {
        **event,
        "camera": event["stream"],
        "snapshot_time": event["frame_time"] if event["has_snapshot"] else 0.0,
        "false_positive": False,
        "active": event["end_time"] is None and not event["stationary"],
        "box": box,
        "region": [0, 0, event["width"], event["height"]],
        "ratio": round(width / height, 2) if height else 0.0,
    }


def discovery(
    prefix: str, stream: str, rule: str, state_topic: str, availability: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Return the MQTT topic and message that make a rule a binary sensor in Home Assistant.

    Args:
        prefix: Home Assistant's discovery prefix, `homeassistant` by default.
        stream: name of the stream, which Home Assistant shows as the device.
        rule: name of the rule.
        state_topic: MQTT topic of the rule's state, `ON` or `OFF`.
        availability: MQTT topics that must all be `online`; otherwise Home Assistant shows the sensor as unavailable.
    """
    device, entity = _identifier(f"saccade_{stream}"), _identifier(rule)
    message = {
        "name": rule,
        "unique_id": f"{device}_{entity}",
        "state_topic": state_topic,
        "payload_on": ON,
        "payload_off": OFF,
        "availability": [{"topic": topic} for topic in availability],
        "availability_mode": "all",
        "device": {"identifiers": [device], "name": stream, "manufacturer": "Saccade"},
        "origin": {"name": "saccade"},
    }
    return f"{prefix}/binary_sensor/{device}/{entity}/config", message


def to_text(message: Mapping[str, Any]) -> str:
    """Encode a message as JSON text."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def _identifier(name: str) -> str:
    """Replace characters that Home Assistant does not allow in an identifier."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:120]

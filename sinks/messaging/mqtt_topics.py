"""Names of MQTT topics. Special characters in stream names and labels are replaced."""

from __future__ import annotations

import re

from saccade.sinks.base import SinkError

_AVAILABLE, _RECORD = "available", "record"


class Topics:
    """The MQTT topics under one prefix.

    Args:
        prefix: topic prefix, such as `saccade` or `home/saccade`.

    Raises:
        SinkError: if the prefix is not a valid start of a topic.
    """

    def __init__(self, prefix: str) -> None:
        if not prefix or re.search(r"[+#\x00]", prefix) or prefix.startswith("$"):
            raise SinkError(f"invalid MQTT topic prefix '{prefix}': remove +, # and a leading $")
        self._prefix = prefix
        self.available = f"{prefix}/{_AVAILABLE}"
        self.events = f"{prefix}/events"

    def stream_available(self, stream: str) -> str:
        """Return the MQTT topic that states whether a stream is online."""
        return f"{self._prefix}/{_level(stream)}/{_AVAILABLE}"

    def record(self, stream: str) -> str:
        """Return the MQTT topic of a stream's records."""
        return f"{self._prefix}/{_level(stream)}/{_RECORD}"

    def count(self, stream: str, label: str) -> str:
        """Return the MQTT topic for the number of objects of one label in a stream."""
        level = _level(label)
        return f"{self._prefix}/{_level(stream)}/{level}{'_' if level in (_AVAILABLE, _RECORD) else ''}"

    def zone(self, stream: str, zone: str, label: str) -> str:
        """Return the MQTT topic for the number of objects of one label in a zone."""
        return f"{self._prefix}/{_level(stream)}/zones/{_level(zone)}/{_level(label)}"

    def line(self, stream: str, line: str, label: str, direction: str) -> str:
        """Return the MQTT topic for the number of crossings of a line, for one label and one direction."""
        return f"{self._prefix}/{_level(stream)}/lines/{_level(line)}/{_level(label)}/{direction}"

    def rule(self, stream: str, rule: str) -> str:
        """Return the MQTT topic for the state of a rule: ON while an event of the rule is open, else OFF."""
        return f"{self._prefix}/{_level(stream)}/rules/{_level(rule)}"

    def all_of(self, stream: str) -> str:
        """Return an MQTT topic filter that matches all topics of a stream."""
        return f"{self._prefix}/{_level(stream)}/#"

    def is_count(self, topic: str) -> bool:
        """Return whether the payload of an MQTT topic is a number of objects or of line crossings."""
        return topic.rpartition("/")[2] not in (_AVAILABLE, _RECORD) and not self.is_rule(topic)

    def is_rule(self, topic: str) -> bool:
        """Return whether an MQTT topic is for the state of a rule."""
        return topic.split("/")[-2:-1] == ["rules"]


def _level(name: str) -> str:
    """Replace each character that MQTT forbids in a topic level by a dash."""
    return re.sub(r"[/+#\x00-\x1f\x7f-\x9f\ud800-\udfff]", "-", name)[:200] or "-"

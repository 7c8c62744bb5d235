"""Parses the subscription of a WebSocket client: which streams, and all records or only the newest."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qs

Mode = Literal["all", "newest"]

_SHAPE = '{"subscribe": ["door", …] or "all", "mode": "all" or "newest"}'


@dataclass(slots=True, frozen=True)
class Subscription:
    """The subscription of a WebSocket client.

    Attributes:
        streams: names of the streams, which need not exist yet; None for all streams.
        mode: "all" sends every record, and drops the oldest if the client is slow; "newest" sends only the newest
            record of each stream.
    """

    streams: frozenset[str] | None = None
    mode: Mode = "all"

    def includes(self, stream: str) -> bool:
        """Return whether the client has subscribed to `stream`."""
        return self.streams is None or stream in self.streams

    def as_json(self) -> dict[str, Any]:
        """Return the subscription as JSON values, as in the message that a client sends to subscribe."""
        return {"subscribe": "all" if self.streams is None else sorted(self.streams), "mode": self.mode}

    @classmethod
    def from_query(cls, query: str) -> Subscription:
        """Parse a subscription from a URL query such as `stream=door&stream=yard&mode=newest`. `token` is ignored.

        Raises:
            ValueError: if the query is invalid. The message is one line for the client.
        """
        given = parse_qs(query, keep_blank_values=True)
        if unknown := sorted(given.keys() - {"stream", "mode", "token"}):
            raise ValueError(f"unknown query parameter {_short(unknown[0])}; use stream, mode or token")
        streams = frozenset(given["stream"]) if "stream" in given else None
        return cls(streams, _mode(given.get("mode", ["all"])[-1]))

    def updated_by(self, text: str | bytes) -> Subscription:
        """Return the subscription changed by a client's JSON message. Fields that are absent or null stay unchanged.

        Raises:
            ValueError: if the client's message is invalid. The error message is one line for the client.
        """
        try:
            received = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"the message is not JSON; send {_SHAPE}") from None
        if not isinstance(received, dict) or not received or received.keys() - {"subscribe", "mode"}:
            raise ValueError(f"the message is not a valid subscription; send {_SHAPE}")
        subscription = self
        if received.get("subscribe") is not None:
            subscription = replace(subscription, streams=_streams(received["subscribe"]))
        if received.get("mode") is not None:
            subscription = replace(subscription, mode=_mode(received["mode"]))
        return subscription


def _streams(received: object) -> frozenset[str] | None:
    if received == "all":
        return None
    if isinstance(received, list) and all(isinstance(name, str) for name in received):
        return frozenset(received)
    raise ValueError('subscribe must be "all" or a list of stream names')


def _mode(received: object) -> Mode:
    match received:
        case "all" | "newest":
            return received
    raise ValueError(f'mode must be "all" or "newest", not {_short(received)}')


def _short(received: object) -> str:
    text = json.dumps(received)
    return text if len(text) <= 40 else f"{text[:40]}…"

"""What a client of a feed wants: which streams, and every record or the newest only. Said in an address or in JSON.

Pure text. Knows nothing of sockets or records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import parse_qs

Mode = Literal["all", "newest"]

_SHAPE = '{"subscribe": ["door", …] or "all", "mode": "all" or "newest"}'


@dataclass(slots=True, frozen=True)
class Subscription:
    """What a client wants.

    Attributes:
        streams: names of the streams, which need not exist yet; None for every stream.
        mode: "all" records, as far as the client keeps up, or the "newest" of each stream.
    """

    streams: frozenset[str] | None = None
    mode: Mode = "all"

    def wants(self, stream: str) -> bool:
        """Whether records of `stream` are to be sent."""
        return self.streams is None or stream in self.streams

    def as_json(self) -> dict[str, Any]:
        """The same as a client would say it."""
        return {"subscribe": "all" if self.streams is None else sorted(self.streams), "mode": self.mode}

    @classmethod
    def of_query(cls, query: str) -> Subscription:
        """Read `stream=door&stream=yard&mode=newest`; every part may be left out, and `token` is somebody else's.

        Raises:
            ValueError: if it is not that, in one line for the client.
        """
        given = parse_qs(query, keep_blank_values=True)
        if unknown := sorted(given.keys() - {"stream", "mode", "token"}):
            raise ValueError(f"unknown setting {_short(unknown[0])}: there are stream, mode and token")
        streams = frozenset(given["stream"]) if "stream" in given else None
        return cls(streams, _mode(given.get("mode", ["all"])[-1]))

    def changed_by(self, text: str | bytes) -> Subscription:
        """What is wanted after the client's message; what it leaves out stays as it was.

        Raises:
            ValueError: if the message is none, in one line for the client.
        """
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"this is not JSON; send {_SHAPE}") from None
        if not isinstance(said, dict) or not said or said.keys() - {"subscribe", "mode"}:
            raise ValueError(f"not understood; send {_SHAPE}")
        wanted = self
        if "subscribe" in said:
            wanted = replace(wanted, streams=_streams(said["subscribe"]))
        if "mode" in said:
            wanted = replace(wanted, mode=_mode(said["mode"]))
        return wanted


def _streams(said: object) -> frozenset[str] | None:
    if said == "all":
        return None
    if isinstance(said, list) and all(isinstance(name, str) for name in said):
        return frozenset(said)
    raise ValueError('subscribe should be "all" or a list of names of streams')


def _mode(said: object) -> Mode:
    match said:
        case "all" | "newest":
            return said
    raise ValueError(f'mode should be "all" or "newest", not {_short(said)}')


def _short(said: object) -> str:
    text = json.dumps(said)
    return text if len(text) <= 40 else f"{text[:40]}…"

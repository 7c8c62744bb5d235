"""The bytes of an RTSP connection (RFC 2326) as replies, requests and interleaved packets.

Pure: bytes in, values out. Knows nothing of sockets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_MESSAGE = 1 << 20
_DOLLAR = 0x24


class ProtocolError(Exception):
    """What the other side sends is not RTSP."""


@dataclass(slots=True, frozen=True)
class Interleaved:
    """A packet between the messages."""

    channel: int
    data: bytes


@dataclass(slots=True, frozen=True)
class ServerRequest:
    """A request of the server, such as a keepalive or REDIRECT. Header names are in lower case."""

    method: str
    headers: dict[str, list[str]]


@dataclass(slots=True, frozen=True)
class Reply:
    """A reply. Header names are in lower case, each with all its values."""

    status: int
    phrase: str
    headers: dict[str, list[str]]
    body: str

    def header(self, name: str) -> str:
        """The first value of a header; "" if absent."""
        return self.headers.get(name, [""])[0]


class MessageParser:
    """Splits a byte stream into its items. What lies between them is skipped, once the other side has proved RTSP.

    Attributes:
        channels: of the packets that are expected; where the stream has lost its order, only these are believed.
    """

    def __init__(self) -> None:
        self.channels: frozenset[int] = frozenset({0, 1})
        self._buffer = bytearray()
        self._proved = False

    def feed(self, data: bytes) -> None:
        """Append what was received."""
        self._buffer += data

    def next_item(self) -> Interleaved | Reply | ServerRequest | None:
        """The next item; None while it is incomplete.

        Raises:
            ProtocolError: if it is not RTSP.
        """
        buffer = self._buffer
        while buffer:
            if buffer[0] == _DOLLAR:
                end = 4 + int.from_bytes(buffer[2:4], "big")
                if len(buffer) < 4 or (end > 4 and len(buffer) == 4):
                    return None
                if end > 4 and not _is_rtp(buffer[4]):
                    self._resynchronize()
                    continue
                if len(buffer) < end:
                    return None
                item = Interleaved(buffer[1], bytes(buffer[4:end]))
                del buffer[:end]
                return item
            if buffer[0] in b"\r\n":
                del buffer[:1]
                continue
            if not _may_begin_message(buffer):
                self._resynchronize()
                continue
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > MAX_MESSAGE:
                    raise ProtocolError
                return None
            return self._message(end)
        return None

    def _message(self, end: int) -> Reply | ServerRequest | None:
        buffer = self._buffer
        first, *lines = buffer[:end].decode("utf-8", "replace").split("\r\n")
        headers: dict[str, list[str]] = {}
        for line in lines:
            key, _, value = line.partition(":")
            headers.setdefault(key.strip().lower(), []).append(value.strip())
        length = headers.get("content-length", ["0"])[0]
        stop = end + 4 + (int(length) if re.fullmatch(r"[0-9]{1,9}", length) else 0)
        if stop > MAX_MESSAGE:
            raise ProtocolError
        if len(buffer) < stop:
            return None
        body = buffer[end + 4 : stop].decode("utf-8", "replace")
        del buffer[:stop]
        if match := re.match(r"RTSP/\d\.\d (\d{3}) ?(.*)", first):
            self._proved = True
            return Reply(int(match[1]), match[2][:80], headers, body)
        if first.startswith("HTTP/") or " RTSP/" not in first:
            raise ProtocolError
        return ServerRequest(first.split(" ", 1)[0], headers)

    def _resynchronize(self) -> None:
        """Skip to what may be the next item: some servers lose count of their own bytes."""
        if not self._proved:
            raise ProtocolError
        buffer = self._buffer
        packet = buffer.find(b"$", 1)
        while 0 < packet < len(buffer) - 4:
            if buffer[packet + 1] in self.channels and _is_rtp(buffer[packet + 4]):
                break
            packet = buffer.find(b"$", packet + 1)
        found = [at for at in (packet, buffer.find(b"RTSP/", 1)) if at > 0]
        del buffer[: min(found, default=len(buffer))]


def _is_rtp(first: int) -> bool:
    """Whether a packet with this first byte is RTP or RTCP: both are version 2."""
    return first >> 6 == 2


def _may_begin_message(buffer: bytearray) -> bool:
    """Whether the buffer may begin with a status line or a request line."""
    line = bytes(buffer[:16])
    return line.startswith((b"RTSP/"[: len(line)], b"HTTP/")) or re.match(rb"[A-Z_]+( |$)", line) is not None

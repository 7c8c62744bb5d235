"""Parser for the bytes of an RTSP connection (RFC 2326): replies, requests and interleaved packets."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_MESSAGE = 1 << 20
_DOLLAR = 0x24


class ProtocolError(Exception):
    """Raised if the received data is not RTSP."""


@dataclass(slots=True, frozen=True)
class Interleaved:
    """One RTP or RTCP packet that was interleaved into the RTSP connection, with its channel number."""

    channel: int
    data: bytes


@dataclass(slots=True, frozen=True)
class ServerRequest:
    """An RTSP request from the server, such as OPTIONS or REDIRECT. Header names are in lower case."""

    method: str
    headers: dict[str, list[str]]


@dataclass(slots=True, frozen=True)
class Reply:
    """An RTSP reply from the server. `headers` maps each header name, in lower case, to the list of its values."""

    status: int
    phrase: str
    headers: dict[str, list[str]]
    body: str

    def header(self, name: str) -> str:
        """Return the first value of the header `name` (in lower case), or "" if the reply does not have it."""
        return self.headers.get(name, [""])[0]


class MessageParser:
    """Splits a byte stream into RTP packets, RTSP replies and RTSP requests.

    After the first valid reply, invalid bytes are skipped; before that, they raise `ProtocolError`.

    Attributes:
        channels: numbers of the interleaved channels in use. Packets that follow invalid bytes must have one of them.
    """

    def __init__(self) -> None:
        self.channels: frozenset[int] = frozenset({0, 1})
        self._buffer = bytearray()
        self._proved = False

    def feed(self, data: bytes) -> None:
        """Append received bytes to the parser's buffer."""
        self._buffer += data

    def next_item(self) -> Interleaved | Reply | ServerRequest | None:
        """Return the next packet, reply or request; None if none is complete yet.

        Raises:
            ProtocolError: if the data is not RTSP.
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
        """Skip invalid bytes up to the next packet or reply."""
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
    """Return whether a packet with this first byte has version 2, as RTP and RTCP packets do."""
    return first >> 6 == 2


def _may_begin_message(buffer: bytearray) -> bool:
    """Return whether the received bytes could be the beginning of an RTSP message or an HTTP status line."""
    line = bytes(buffer[:16])
    return line.startswith((b"RTSP/"[: len(line)], b"HTTP/")) or re.match(rb"[A-Z_]+( |$)", line) is not None

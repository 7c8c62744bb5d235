"""One client of a WebSocket feed: what it wants, what waits for it, and the connection that takes it there.

Knows nothing of frames, of who may come in, or of other clients.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from saccade.sinks.messaging.outbox import MAX_BYTES, Message, Outbox
from saccade.sinks.record import SCHEMA, to_json
from saccade.sinks.websocket.subscription import Subscription

log = logging.getLogger(__name__)

WRITE_LIMIT = 16 * 1024  # bytes; what waits in a connection should wait in the outbox, where the old makes way
_MAX_REQUEST_BYTES = 16 * 1024


@dataclass(slots=True)
class Tally:
    """What happened to the records of all clients, those that have gone among them."""

    sent: int = 0
    dropped: int = 0


class Client:
    """One who is connected, what it wants and what waits for it. Everything that is sent to it, its own task sends."""

    def __init__(self, connection: ServerConnection, wanted: Subscription, tally: Tally) -> None:
        self.wanted = wanted
        self._connection = connection
        self._tally = tally
        self._outbox = Outbox(newest=wanted.mode == "newest")
        self._waiting = asyncio.Event()
        self._leaving = False

    def want(self, wanted: Subscription) -> None:
        """Subscribe to something else from now on; what waits already is still sent."""
        self.wanted = wanted
        self._outbox.newest = wanted.mode == "newest"

    def offer(self, message: Message, lost_before: int = 0) -> None:
        """Put a message into the outbox if it is wanted."""
        if message.stream and not self.wanted.wants(message.stream):
            return
        dropped = self._outbox.dropped
        self._outbox.put(message, lost_before)
        self._tally.dropped += self._outbox.dropped - dropped
        self._waiting.set()

    def leave(self) -> None:
        """Send what waits, then close the connection."""
        self._leaving = True
        self._waiting.set()

    async def write(self, timeout_s: float) -> None:
        """Send what is in the outbox until the connection ends; end it if nothing goes out for `timeout_s` seconds."""
        try:
            while not (self._leaving and not len(self._outbox)):
                await self._waiting.wait()
                self._waiting.clear()
                while taken := self._outbox.take():
                    message, lost_before = taken
                    async with asyncio.timeout(timeout_s):
                        if lost_before:
                            await self._connection.send(notice(message.stream, dropped=lost_before).text, text=True)
                        await self._connection.send(message.text, text=True)
                    self._tally.sent += message.record
                if self._outbox.newest:  # else old ones would pile up in the buffers of TCP, megabytes on some ways
                    async with asyncio.timeout(timeout_s):
                        await (await self._connection.ping())
            await self._connection.close(1001, "the feed ends")
        except TimeoutError:
            log.warning("a client of the feed took nothing for %g s and was let go", timeout_s)
            self._connection.transport.abort()
        except ConnectionClosed:
            pass


class Connection(ServerConnection):
    """Bounds what websockets does not: connections, the bytes of a request, and pongs for a client that never reads.

    Args:
        crowd: the connections that there are; each adds and removes itself.
        at_most: how many of them there may be. asyncio lets go whatever is not taken in here, before TLS takes 300 kB.
        open_s: how long TLS may take, in seconds; nobody tells when it fails.
    """

    def __init__(self, *args: Any, crowd: set[Connection], at_most: int, open_s: float, **settings: Any) -> None:
        if len(crowd) >= at_most:
            raise ConnectionRefusedError("too many connections at once")
        super().__init__(*args, **settings)
        self._crowd = crowd
        self._crowd.add(self)
        self._opening = self.loop.call_later(open_s, crowd.discard, self)
        self._made = False
        self._request_bytes = 0

    def cut(self) -> None:
        """End it at once, whatever is still to be said."""
        if self._made:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the place in the crowd."""
        self._opening.cancel()
        self._crowd.add(self)
        self._made = True
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another."""
        self._crowd.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends, unless it asks without end or lets answers pile up."""
        if self.request is None:
            self._request_bytes += len(data)
        if self._request_bytes > _MAX_REQUEST_BYTES:
            self.cut()
            return
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MAX_BYTES + 2 * WRITE_LIMIT:  # more than the outbox lets out
            self.cut()


def notice(stream: str = "", **what: Any) -> Message:
    """Something for clients that is no record; about `stream` if it is not ""."""
    named = {"stream": stream} if stream else {}
    return Message(stream, to_json({"schema": SCHEMA, **named, **what}), record=False)

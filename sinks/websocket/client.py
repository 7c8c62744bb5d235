"""One client of the WebSocket feed: its subscription, its outbox and its connection.

Knows nothing of frames, authentication or other clients.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from saccade.sinks.outbox import MAX_BYTES, Message, Outbox
from saccade.sinks.record import SCHEMA, to_json
from saccade.sinks.websocket.subscription import Subscription

log = logging.getLogger(__name__)

WRITE_LIMIT = 16 * 1024  # bytes; messages should wait in the outbox, which drops the oldest, not in the connection
_MAX_REQUEST_BYTES = 16 * 1024


@dataclass(slots=True)
class Counters:
    """What happened to the records of all clients, including those that have gone."""

    sent: int = 0
    dropped: int = 0


class Client:
    """A connected client. All that is sent to it is sent by its own task, `write`."""

    def __init__(self, connection: ServerConnection, subscription: Subscription, counters: Counters) -> None:
        self.subscription = subscription
        self._connection = connection
        self._counters = counters
        self._outbox = Outbox(newest=subscription.mode == "newest")
        self._waiting = asyncio.Event()
        self._finishing = False

    def subscribe(self, subscription: Subscription) -> None:
        """Replace the subscription; waiting messages are still sent."""
        self.subscription = subscription
        self._outbox.newest = subscription.mode == "newest"

    def offer(self, message: Message, lost_before: int = 0) -> None:
        """Put a message into the outbox if it is subscribed to."""
        if message.stream and not self.subscription.includes(message.stream):
            return
        dropped = self._outbox.dropped
        self._outbox.put(message, lost_before)
        self._counters.dropped += self._outbox.dropped - dropped
        self._waiting.set()

    def finish(self) -> None:
        """Send the waiting messages, then close the connection."""
        self._finishing = True
        self._waiting.set()

    async def write(self, timeout_s: float) -> None:
        """Send the outbox until the connection ends; end it if nothing can be sent for `timeout_s` seconds."""
        try:
            while not (self._finishing and not len(self._outbox)):
                await self._waiting.wait()
                self._waiting.clear()
                while taken := self._outbox.take():
                    message, lost_before = taken
                    async with asyncio.timeout(timeout_s):
                        if lost_before:
                            await self._connection.send(notice(message.stream, dropped=lost_before).text, text=True)
                        await self._connection.send(message.text, text=True)
                    self._counters.sent += message.record
                if self._outbox.newest:  # else old ones would pile up in TCP's buffers, megabytes on some paths
                    async with asyncio.timeout(timeout_s):
                        await (await self._connection.ping())
            await self._connection.close(1001, "the feed ends")
        except TimeoutError:
            log.warning("a client of the feed took nothing for %g s and was disconnected", timeout_s)
            self._connection.transport.abort()
        except ConnectionClosed:
            pass


class Connection(ServerConnection):
    """Bounds what websockets does not: connections, the bytes of a request, and pongs for a client that never reads.

    Args:
        connections: all open connections; each adds and removes itself.
        max_connections: how many there may be. asyncio drops a connection refused here before TLS takes 300 kB.
        open_s: how long TLS may take, in seconds; its failure is not reported here.
    """

    def __init__(
        self, *args: Any, connections: set[Connection], max_connections: int, open_s: float, **settings: Any
    ) -> None:
        if len(connections) >= max_connections:
            raise ConnectionRefusedError("too many connections at once")
        super().__init__(*args, **settings)
        self._connections = connections
        self._connections.add(self)
        self._opening = self.loop.call_later(open_s, connections.discard, self)
        self._made = False
        self._request_bytes = 0

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent."""
        if self._made:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection is open."""
        self._opening.cancel()
        self._connections.add(self)
        self._made = True
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another connection."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process what the client sends; abort if its request is endless or it does not read the replies."""
        if self.request is None:
            self._request_bytes += len(data)
        if self._request_bytes > _MAX_REQUEST_BYTES:
            self.abort()
            return
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MAX_BYTES + 2 * WRITE_LIMIT:  # more than the outbox holds
            self.abort()


def notice(stream: str = "", **fields: Any) -> Message:
    """A message that is not a record; about `stream` if it is not ""."""
    named = {"stream": stream} if stream else {}
    return Message(stream, to_json({"schema": SCHEMA, **named, **fields}), record=False)

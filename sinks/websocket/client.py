"""One client of the WebSocket server: its subscription, its queue and its connection."""

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
    """How many records were sent and dropped, summed over all WebSocket clients since the start of the server."""

    sent: int = 0
    dropped: int = 0


class Client:
    """A connected WebSocket client. Only its asyncio task `write` sends messages."""

    def __init__(self, connection: ServerConnection, subscription: Subscription, counters: Counters) -> None:
        self.subscription = subscription
        self._connection = connection
        self._counters = counters
        self._outbox = Outbox(newest=subscription.mode == "newest")
        self._waiting = asyncio.Event()
        self._finishing = False

    def subscribe(self, subscription: Subscription) -> None:
        """Replace the client's subscription. Queued messages of the old subscription are still sent."""
        self.subscription = subscription
        self._outbox.newest = subscription.mode == "newest"

    def offer(self, message: Message, lost_before: int = 0) -> None:
        """Queue a message if the client has subscribed to its stream.

        Args:
            message: message to queue.
            lost_before: number of records of this stream that were dropped just before this message.
        """
        if message.stream and not self.subscription.includes(message.stream):
            return
        dropped = self._outbox.dropped
        self._outbox.put(message, lost_before)
        self._counters.dropped += self._outbox.dropped - dropped
        self._waiting.set()

    def finish(self) -> None:
        """Send the queued messages, then close the client's connection."""
        self._finishing = True
        self._waiting.set()

    async def write(self, timeout_s: float) -> None:
        """Send queued messages. Disconnect the client if it reads nothing for `timeout_s` seconds."""
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
            log.warning("a WebSocket client read nothing for %g s and was disconnected", timeout_s)
            self._connection.transport.abort()
        except ConnectionClosed:
            pass


class Connection(ServerConnection):
    """WebSocket connection of a server with limits for connections, request size and unsent data.

    Args:
        connections: set of all open connections, which the connection updates.
        max_connections: maximum number of connections; further clients are refused.
        open_s: timeout of the TLS handshake in seconds.
    """

    def __init__(
        self, *args: Any, connections: set[Connection], max_connections: int, open_s: float, **settings: Any
    ) -> None:
        if len(connections) >= max_connections:
            raise ConnectionRefusedError("the limit of WebSocket connections is reached")
        super().__init__(*args, **settings)
        self._connections = connections
        self._connections.add(self)
        self._opening = self.loop.call_later(open_s, connections.discard, self)
        self._made = False
        self._request_bytes = 0

    def abort(self) -> None:
        """Close the WebSocket connection immediately and discard unsent data."""
        if self._made:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the client's connection as open, after the TLS handshake."""
        self._opening.cancel()
        self._connections.add(self)
        self._made = True
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the client's closed connection."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data. Disconnect if the request is too long, or if the client reads too slowly."""
        if self.request is None:
            self._request_bytes += len(data)
        if self._request_bytes > _MAX_REQUEST_BYTES:
            self.abort()
            return
        super().data_received(data)
        if self.transport.get_write_buffer_size() > MAX_BYTES + 2 * WRITE_LIMIT:  # more than the outbox holds
            self.abort()


def notice(stream: str = "", **fields: Any) -> Message:
    """Create a message to WebSocket clients that is not the record of a frame, such as the end of a stream.

    Args:
        stream: name of the stream that the message is about; "" for none.
        fields: JSON values of the message.
    """
    named = {"stream": stream} if stream else {}
    return Message(stream, to_json({"schema": SCHEMA, **named, **fields}), record=False)

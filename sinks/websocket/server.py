"""WebSocket server that sends the record of each frame to its clients.

    ws://127.0.0.1:8765                                   for programs and pages of this machine
    ws://0.0.0.0:8765/feed?token=sesame                   for clients that know the token
    wss://0.0.0.0:8765?token=…&cert=cert.pem&key=key.pem  the same, encrypted
    …&origin=https://example.org                          allows that page to connect; may be repeated
    …&max_clients=32                                      maximum number of connected clients

An example of a client. To receive only some streams, add `?stream=door&stream=yard` to its URL:

    import json
    from websockets.sync.client import connect

    with connect("ws://127.0.0.1:8765", additional_headers={"Authorization": "Bearer sesame"}) as feed:
        for message in map(json.loads, feed):
            if "frame" in message:
                print(message["stream"], [found["label"] for found in message["objects"]])

The server sends JSON messages. A message without `frame` is a notice:

- `{"schema", "streams": [running streams], "subscribe": "all", "mode": "all"}`: sent first, and as the reply to the
  client's message `{"subscribe": ["door"] or "all", "mode": "newest" or "all"}`, which it may send at any time;
- `{"schema", "stream", "dropped": 12}`: number of records of the stream dropped because this client was slow;
- `{"schema", "stream", "ended": true}`: the stream has ended;
- `{"schema", "stream", "event": {…}}`: an event of a rule begins, changes or ends;
- `{"schema", "error": "…"}`: the client's message was invalid.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Self, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from saccade.engine.results import Result
from saccade.sinks.base import CHANGES, SinkError, SinkStats, SourceHints
from saccade.sinks.outbox import Message, Outbox
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.websocket.access import FeedTarget, RefusedError
from saccade.sinks.websocket.client import WRITE_LIMIT, Client, Connection, Counters, notice
from saccade.sinks.websocket.subscription import Subscription
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)
_library_log = log.getChild("library")
_library_log.setLevel(logging.CRITICAL)  # it would print requests, and thus tokens; and each scan of the port

MAX_MESSAGE_BYTES = 4096  # of a client's
_MAX_PENDING = 64  # connections besides the clients: not admitted yet, or being refused
_OPEN_S = 5.0  # for a client to send its request
_CLOSE_S = 1.0  # for a client to get its waiting messages, and again for its reply that the connection closes
_BETWEEN_MESSAGES_S = 0.05  # so that a client that sends without end costs the others nothing


class WebSocketSink:
    """WebSocket server that sends each record to all subscribed clients. It runs in its own thread.

    Each client has its own queue of 256 records (at most 2 MiB). If a client is slow, its oldest records are dropped,
    and the client is told how many. A client that reads nothing for `write_timeout_s` seconds is disconnected.

    Args:
        target: address to listen on; see the module's description.
        write_timeout_s: timeout for sending a message to a client, in seconds.
        ping_s: interval between pings, and timeout of the replies, in seconds.

    Raises:
        SinkError: if the target is invalid or its port is not available.
    """

    shared: ClassVar[bool] = True

    def __init__(self, target: str, *, write_timeout_s: float = 15.0, ping_s: float = 15.0) -> None:
        self._target = FeedTarget.parse(target)
        self._write_timeout_s = write_timeout_s
        self._ping_s = ping_s
        self._lock = threading.Lock()  # over what the writers share with the server's thread, which follows
        self._inbox = Outbox()
        self._streams: dict[str, None] = {}  # running, in order of appearance
        self._awake = False  # whether the server's thread is about to read the inbox
        self._closed = False
        self._counters = Counters()
        self._clients: set[Client] = set()  # these two are used by the server's thread only
        self._connections: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

        listening: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), name="saccade feed", daemon=True
        )
        self._thread.start()
        host = f"[{self._target.host}]" if ":" in self._target.host else self._target.host
        try:
            port = listening.result()
        except (OSError, UnicodeError) as error:  # the second for an invalid host name
            self._thread.join()
            reason = error.strerror if isinstance(error, OSError) else "invalid host name"
            why = str(reason).rpartition(": ")[2]  # asyncio repeats the address before it
            raise SinkError(f"WebSocket server: cannot listen on {host}:{self._target.port}: {why}") from error
        self.url = f"{'wss' if self._target.tls else 'ws'}://{host}:{port}{self._target.path}"
        """URL for clients, without the token."""
        log.info("the WebSocket server listens on %s", self.url)

    @property
    def clients(self) -> int:
        """Number of connected WebSocket clients."""
        return len(self._clients)

    @property
    def sent(self) -> int:
        """Number of records sent to WebSocket clients, summed over all clients."""
        return self._counters.sent

    @property
    def dropped(self) -> int:
        """Number of records dropped because a WebSocket client was too slow, summed over all clients."""
        return self._counters.dropped

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Start a WebSocket server at the address `target`. Raises SinkError if the address is invalid or in use."""
        return cls(target)

    def stats(self) -> SinkStats:
        """Return the number of WebSocket clients, and the numbers of sent and dropped records."""
        return SinkStats(clients=self.clients, sent=self.sent, dropped=self.dropped)

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Queue the record of one frame for all clients. Thread-safe; never waits for a client."""
        if self._clients:
            self._post(Message(frame.stream, to_json(make_record(frame, result, latency))))
        else:  # without clients, the text is not made
            with self._lock:
                self._streams[frame.stream] = None

    def end(self, stream: str) -> None:
        """Tell the clients that `stream` has ended. Writing to the stream again restarts it."""
        self._post(notice(stream, ended=True))

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Queue an event of a rule for the WebSocket clients."""
        if event["type"] in CHANGES:
            self._post(notice(event["stream"], event=dict(event)), ends=False)

    def close(self) -> None:
        """Send the queued messages and disconnect all clients. This takes at most 3 s. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _post(self, message: Message, *, ends: bool = True) -> None:
        with self._lock:
            if self._closed:
                return
            if message.record:
                self._streams[message.stream] = None
            elif ends:
                self._streams.pop(message.stream, None)
            self._inbox.put(message)
            if not self._awake:
                self._awake = True
                self._loop.call_soon_threadsafe(self._distribute)

    # ---- on the server's thread

    async def _serve(self, listening: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        max_connections = self._target.max_clients + _MAX_PENDING
        connection = partial(Connection, connections=self._connections, max_connections=max_connections, open_s=_OPEN_S)
        try:
            server = await serve(
                self._handle,
                self._target.host,
                self._target.port,
                ssl=self._target.tls,
                process_request=self._admit,
                compression=None,  # each record would be compressed for each client anew, to save a few hundred bytes
                open_timeout=_OPEN_S,
                ping_interval=self._ping_s,
                ping_timeout=self._ping_s,
                close_timeout=_CLOSE_S,
                max_size=MAX_MESSAGE_BYTES,
                max_queue=4,
                write_limit=WRITE_LIMIT,
                logger=_library_log,
                create_connection=cast("type[ServerConnection]", connection),
            )
        except BaseException as error:
            listening.set_exception(error)
            return
        listening.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        self._distribute()
        await self._disconnect_all(server)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        headers = request.headers
        try:
            self._target.admit(request.path, headers.get_all("Origin"), headers.get_all("Authorization"))
            if len(self._clients) >= self._target.max_clients:
                raise RefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE, f"{len(self._clients)} clients are connected, which is the limit"
                )
        except RefusedError as error:
            response = connection.respond(error.status, f"{error}\n")
            if error.status is HTTPStatus.UNAUTHORIZED:
                response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        assert connection.request is not None  # every admitted client has one
        if len(self._clients) >= self._target.max_clients or self._stop.is_set():  # meanwhile
            await connection.close(1013, "no more clients now")
            return
        subscription = Subscription.from_query(connection.request.path.partition("?")[2])
        client = Client(connection, subscription, self._counters)
        client.offer(self._greeting(subscription))
        self._clients.add(client)
        writing = asyncio.create_task(client.write(self._write_timeout_s))
        try:
            async for text in connection:
                client.offer(self._reply(client, text))
                await asyncio.sleep(_BETWEEN_MESSAGES_S)
        except ConnectionClosed:
            pass
        finally:
            self._clients.discard(client)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _reply(self, client: Client, text: str | bytes) -> Message:
        try:
            client.subscribe(client.subscription.updated_by(text))
        except ValueError as error:
            return notice(error=str(error))
        return self._greeting(client.subscription)

    def _greeting(self, subscription: Subscription) -> Message:
        with self._lock:
            return notice(streams=list(self._streams), **subscription.as_json())

    def _distribute(self) -> None:
        with self._lock:
            self._awake = False
            waiting = [taken for _ in range(len(self._inbox)) if (taken := self._inbox.take())]
        for message, lost_before in waiting:
            for client in self._clients:
                client.offer(message, lost_before)

    async def _disconnect_all(self, server: Server) -> None:
        server.close(close_connections=False)
        for client in self._clients:
            client.finish()
        for connection in list(self._connections):
            if connection.request is None:  # no request yet, nothing to answer
                connection.abort()
        for seconds in (2 * _CLOSE_S, _CLOSE_S):
            try:
                async with asyncio.timeout(seconds):
                    await server.wait_closed()
                    break
            except TimeoutError:
                for connection in list(self._connections):  # of clients that do not read
                    connection.abort()

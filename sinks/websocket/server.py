"""The feed: a WebSocket server that sends the record of each frame to whoever connects.

    ws://127.0.0.1:8765                                   for programs and pages of this machine
    ws://0.0.0.0:8765/feed?token=sesame                   for everybody who knows the token
    wss://0.0.0.0:8765?token=…&cert=cert.pem&key=key.pem  the same, encrypted
    …&origin=https://example.org                          lets that page connect as well; may be repeated
    …&max_clients=32                                      how many may be connected at a time

A client, complete (`?stream=door&stream=yard&mode=newest` would ask for less):

    import json
    from websockets.sync.client import connect

    with connect("ws://127.0.0.1:8765", additional_headers={"Authorization": "Bearer sesame"}) as feed:
        for message in map(json.loads, feed):
            if "frame" in message:
                print(message["stream"], [found["label"] for found in message["objects"]])

What the client is sent, each a JSON text: the record of each frame, and notices, which have no `frame`:
- `{"schema", "streams": [those that run], "subscribe": "all", "mode": "all"}` first, and again as the answer to its own
  `{"subscribe": ["door"] or "all", "mode": "newest" or "all"}`, which it may send at any time;
- `{"schema", "stream", "dropped": 12}`: so many records of the stream were lost here, since the client was slow;
- `{"schema", "stream", "ended": true}`;
- `{"schema", "error": "…"}`: its own message was not understood.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import ClassVar, cast

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from saccade.engine.results import Result
from saccade.sinks.base import SinkError
from saccade.sinks.messaging.outbox import Message, Outbox
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.websocket.access import FeedTarget, RefusedError
from saccade.sinks.websocket.client import WRITE_LIMIT, Client, Connection, Tally, notice
from saccade.sinks.websocket.subscription import Subscription
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)
_library_log = log.getChild("library")
_library_log.setLevel(logging.CRITICAL)  # it would print requests, and thus tokens; and each scan of the port

MAX_MESSAGE_BYTES = 4096  # of a client's
_STRANGERS = 64  # connections besides the clients: not let in yet, or just being refused
_OPEN_S = 5.0  # for a client to ask
_CLOSE_S = 1.0  # for a client to get what waits for it, and again for its answer that the connection closes
_BETWEEN_MESSAGES_S = 0.05  # so that a client that talks without end costs the others nothing


class WebSocketSink:
    """Sends every record to each client that wants it. Listens in a thread of its own; no client ever delays a writer.

    Each client has an outbox of 256 records or 2 MiB: whoever reads too slowly loses the oldest and is told how many,
    and whoever takes nothing at all for `write_timeout_s` is let go.

    Args:
        target: where to listen, as above.
        write_timeout_s: how long a client may let a message wait in its connection, in seconds.
        ping_s: how often a client is asked whether it is there, and how long it may take to answer, in seconds.

    Raises:
        SinkError: if the target is not understood or its port cannot be had.
    """

    shared: ClassVar[bool] = True

    def __init__(self, target: str, *, write_timeout_s: float = 15.0, ping_s: float = 15.0) -> None:
        self._target = FeedTarget.parse(target)
        self._write_timeout_s = write_timeout_s
        self._ping_s = ping_s
        self._lock = threading.Lock()  # over what the writers share with the server's thread, which is
        self._inbox = Outbox()
        self._streams: dict[str, None] = {}  # that run, in the order they came
        self._awake = False  # whether the server's thread is about to look into the inbox
        self._closed = False
        self._tally = Tally()
        self._clients: set[Client] = set()  # these two are the server's thread's own
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
        except (OSError, UnicodeError) as error:  # the second for what can be no name of a host
            self._thread.join()
            reason = error.strerror if isinstance(error, OSError) else "no host can be called so"
            why = str(reason).rpartition(": ")[2]  # asyncio repeats the address before it
            raise SinkError(f"ws: cannot listen on {host}:{self._target.port}: {why}") from error
        self.url = f"{'wss' if self._target.tls else 'ws'}://{host}:{port}{self._target.path}"
        """Where clients connect to; without the token."""
        log.info("records are at %s", self.url)

    @property
    def clients(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    @property
    def sent(self) -> int:
        """Records sent so far, to all clients together."""
        return self._tally.sent

    @property
    def dropped(self) -> int:
        """Records that were lost because a client was slow, counted once for each client that lost them."""
        return self._tally.dropped

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Hand over one record; callable from several threads, and never waits for a client."""
        if self._clients:
            self._post(Message(frame.stream, to_json(make_record(frame, result, latency))))
        else:  # nobody there: nobody pays for the text
            with self._lock:
                self._streams[frame.stream] = None

    def end(self, stream: str) -> None:
        """Tell the clients that nothing more comes of `stream`, until it is written again."""
        self._post(notice(stream, ended=True))

    def close(self) -> None:
        """Let the clients have what waits for them, then go; ends within 3 s. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _post(self, message: Message) -> None:
        with self._lock:
            if self._closed:
                return
            if message.record:
                self._streams[message.stream] = None
            else:
                self._streams.pop(message.stream, None)
            self._inbox.put(message)
            if not self._awake:
                self._awake = True
                self._loop.call_soon_threadsafe(self._distribute)

    # ---- on the server's thread

    async def _serve(self, listening: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        everybody = self._target.max_clients + _STRANGERS
        connection = partial(Connection, crowd=self._connections, at_most=everybody, open_s=_OPEN_S)
        try:
            server = await serve(
                self._attend,
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
        await self._let_go(server)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        headers = request.headers
        try:
            self._target.admit(request.path, headers.get_all("Origin"), headers.get_all("Authorization"))
            if len(self._clients) >= self._target.max_clients:
                raise RefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE, f"{len(self._clients)} clients are connected already"
                )
        except RefusedError as error:
            response = connection.respond(error.status, f"{error}\n")
            if error.status is HTTPStatus.UNAUTHORIZED:
                response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None

    async def _attend(self, connection: ServerConnection) -> None:
        assert connection.request is not None  # there is one behind every client that was let in
        if len(self._clients) >= self._target.max_clients or self._stop.is_set():  # meanwhile
            await connection.close(1013, "no more clients now")
            return
        wanted = Subscription.of_query(connection.request.path.partition("?")[2])
        client = Client(connection, wanted, self._tally)
        client.offer(self._greeting(wanted))
        self._clients.add(client)
        writing = asyncio.create_task(client.write(self._write_timeout_s))
        try:
            async for text in connection:
                client.offer(self._answer(client, text))
                await asyncio.sleep(_BETWEEN_MESSAGES_S)
        except ConnectionClosed:
            pass
        finally:
            self._clients.discard(client)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _answer(self, client: Client, text: str | bytes) -> Message:
        try:
            client.want(client.wanted.changed_by(text))
        except ValueError as error:
            return notice(error=str(error))
        return self._greeting(client.wanted)

    def _greeting(self, wanted: Subscription) -> Message:
        with self._lock:
            return notice(streams=list(self._streams), **wanted.as_json())

    def _distribute(self) -> None:
        with self._lock:
            self._awake = False
            waiting = [taken for _ in range(len(self._inbox)) if (taken := self._inbox.take())]
        for message, lost_before in waiting:
            for client in self._clients:
                client.offer(message, lost_before)

    async def _let_go(self, server: Server) -> None:
        server.close(close_connections=False)
        for client in self._clients:
            client.leave()
        for connection in list(self._connections):
            if connection.request is None:  # nothing asked yet, nothing to be answered
                connection.cut()
        for seconds in (2 * _CLOSE_S, _CLOSE_S):
            try:
                async with asyncio.timeout(seconds):
                    await server.wait_closed()
                    break
            except TimeoutError:
                for connection in list(self._connections):  # of those who do not read
                    connection.cut()

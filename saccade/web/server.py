"""HTTP server for untrusted clients: limits the number of connections and closes idle ones.

All HTTP servers of Saccade use this module. uvicorn handles HTTP on an event loop in a separate thread. Client input is
never logged, because it can contain a token.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from email.utils import formatdate
from typing import Any, TypeVar

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 256

_ASK_S = 15.0  # seconds for a client to make its first or next request, headers and all
_TAKE_S = 15.0  # seconds for it to acknowledge any of a response
_LINGER_S = 5.0  # seconds for it to read an answer that came before all of its body was sent
_SHUTDOWN_S = 1.0  # seconds for requests in progress at shutdown
_LOOP_S = 10.0  # seconds for any call to the event loop
_HEADER_BYTES = 32 * 1024

T = TypeVar("T")
Hook = Callable[[], Awaitable[object]]

_library_log = logging.getLogger(f"{__name__}.library")
_library_log.setLevel(logging.CRITICAL)  # it would log requests that it cannot parse


class AppServer:
    """Serves an ASGI application over HTTP, from construction until `close`.

    Attributes:
        url: address of the server, without a path.

    Args:
        app: the application.
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        thread: name of the server's thread.
        tls: TLS context with the server's certificate; None for no encryption.
        on_startup: called on the event loop before the first request.
        on_cleanup: called on the event loop after the last request.

    Raises:
        OSError: if the address cannot be bound.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        thread: str,
        tls: ssl.SSLContext | None = None,
        *,
        on_startup: Sequence[Hook] = (),
        on_cleanup: Sequence[Hook] = (),
    ) -> None:
        self._closing = threading.Lock()
        self._on_cleanup = on_cleanup
        self._state = ServerState()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=thread, daemon=True)
        self._thread.start()
        try:
            bound = self._on_loop(self._listen(app, host, port, tls, on_startup))
        except BaseException:
            self._end_loop()
            raise
        self.url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{bound}"

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._state.connections)

    def close(self) -> None:
        """Stop the server and close all connections. Must not be called from the server's own thread."""
        with self._closing:
            if self._loop.is_closed():
                return
            try:
                self._on_loop(self._shut_down())
            finally:
                self._end_loop()

    # ---- on the event loop

    async def _listen(
        self, app: ASGIApp, host: str, port: int, tls: ssl.SSLContext | None, on_startup: Sequence[Hook]
    ) -> int:
        """Start listening and return the bound port."""
        config = Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,  # it would log tokens and session secrets
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=round(_ASK_S) + 1,  # `_Protocol` is earlier
        )
        config.load()
        loop = asyncio.get_running_loop()
        for hook in on_startup:
            await hook()
        try:
            self._listening = await loop.create_server(
                lambda: _Protocol(config, self._state, {}, loop),
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=_ASK_S if tls else None,
            )
        except UnicodeError:
            raise OSError(0, "not a valid host name") from None
        except OSError as error:
            raise OSError(error.errno, str(error.strerror).rpartition(": ")[2]) from None  # asyncio repeats the address
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it, and the kernel closes them
            for listener in self._listening.sockets:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _TAKE_S))
        self._clock = asyncio.create_task(self._tell_the_date())
        port_bound: int = self._listening.sockets[0].getsockname()[1]
        return port_bound

    async def _tell_the_date(self) -> None:
        while True:
            self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
            await asyncio.sleep(1)

    async def _shut_down(self) -> None:
        """Stop listening. Requests in progress get 1 s to finish, and are then cancelled."""
        self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=_SHUTDOWN_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # it is known then, so that nobody is told of an internal error
        late = list(self._state.tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for hook in self._on_cleanup:
            await hook()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LOOP_S)

    def _end_loop(self) -> None:
        with suppress(TimeoutError):  # a handler in a thread may still be blocked
            self._on_loop(end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Protocol(H11Protocol):
    """uvicorn's HTTP protocol with two more timeouts: for incomplete headers, and for an unread request body."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _library_log
        self.access_log = False
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            transport.abort()  # cameras and recordings need the process's file descriptors as well
            return
        super().connection_made(transport)
        self._wait_for_request()
        closing: Any = _Lingering(transport, self)
        self.transport = closing

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is not None:
            self._stop_waiting()
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # the rest of a body
            return
        super().data_received(data)
        if self._answering:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin the next one
        if not self._answering and not self.transport.is_closing():
            self._wait_for_request()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        seconds = min(_LINGER_S, _ASK_S) if self.unread else _ASK_S
        self._waiting = self.loop.call_later(seconds, self.transport.close)

    @property
    def unread(self) -> bool:
        """Whether the client has not yet sent the complete request body."""
        return self.cycle is not None and self.cycle.more_body

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Lingering:
    """A transport that delays `close` while the client sends its request, so that the client gets the response."""

    def __init__(self, transport: asyncio.Transport, protocol: _Protocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        if self._lingers or not self._protocol.unread or not self._protocol.cycle.response_complete:
            self._transport.close()
            return
        self._lingers = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._protocol.loop.call_later(_LINGER_S, self._transport.close)


async def end_tasks() -> None:
    """Cancel all other tasks of the running asyncio event loop, and end the threads of its executor."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()

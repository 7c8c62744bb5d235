"""Serves an aiohttp application to untrusted clients: a bounded number of connections, and idle ones are closed.

Every HTTP server of the project uses it. Nothing that a client sends is logged, since it may hold a token. Knows
nothing of what is served, nor of authentication.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web

MAX_CONNECTIONS = 256

_ASK_S = 15.0  # seconds for a client to make its first or next request
_TAKE_S = 15.0  # seconds for it to acknowledge any of a response
_SHUTDOWN_S = 1.0  # seconds for requests in progress at shutdown
_LOOP_S = 10.0  # seconds for any call to the event loop

T = TypeVar("T")

_library_log = logging.getLogger(f"{__name__}.library")
_library_log.setLevel(logging.CRITICAL)  # it would log requests that it cannot parse


class AppServer:
    """Serves an application from construction on, until `close`, on an event loop in a thread of its own.

    Attributes:
        url: the server's address, without a path.

    Args:
        application: what to serve.
        host: address to listen on.
        port: the port; 0 for any free one.
        thread: name of the server's thread.
        tls: with the server's certificate; None for no encryption.

    Raises:
        OSError: if the address cannot be bound.
    """

    def __init__(
        self, application: web.Application, host: str, port: int, thread: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=thread, daemon=True)
        self._thread.start()
        try:
            self._runner, bound = self._on_loop(_listen(application, host, port, tls))
        except BaseException:
            self._end_loop()
            raise
        self.url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{bound}"

    def close(self) -> None:
        """Close every connection and the port. Callable from any other thread, repeatedly."""
        with self._closing:
            if self._loop.is_closed():
                return
            try:
                self._on_loop(self._runner.cleanup())
            finally:
                self._end_loop()

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LOOP_S)

    def _end_loop(self) -> None:
        with suppress(TimeoutError):  # a handler in a thread may still be blocked
            self._on_loop(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Full(asyncio.Protocol):
    """Refuses a connection beyond the limit: cameras and recordings need the process's file descriptors as well."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def _listen(
    application: web.Application, host: str, port: int, tls: ssl.SSLContext | None
) -> tuple[web.AppRunner, int]:
    """Serve `application` on the running event loop until `cleanup` of the runner returned is called.

    Returns:
        The runner, and the port bound.

    Raises:
        OSError: if the address cannot be bound.
    """
    listening: list[asyncio.Server] = []

    async def stop_listening(_: web.Application) -> None:
        for server in listening:
            server.close()

    application.on_shutdown.insert(0, stop_listening)
    runner = web.AppRunner(
        application,
        access_log=None,  # it would log tokens and session secrets
        logger=_library_log,
        keepalive_timeout=_ASK_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        await runner.setup()
        handlers = runner.server
        assert handlers is not None  # set by setup()

        def connected() -> asyncio.Protocol:
            return handlers() if len(handlers.connections) < MAX_CONNECTIONS else _Full()

        try:
            server = await asyncio.get_running_loop().create_server(connected, host, port, ssl=tls)
        except UnicodeError:
            raise OSError(0, "not a valid host name") from None
        except OSError as error:
            raise OSError(error.errno, str(error.strerror).rpartition(": ")[2]) from None  # asyncio repeats the address
        listening.append(server)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it, and the kernel closes them
            for listener in server.sockets:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _TAKE_S))
    except BaseException:
        await runner.cleanup()
        raise
    return runner, server.sockets[0].getsockname()[1]


async def _end_tasks() -> None:
    """Cancel what still runs on this loop: aioice notices only 20 ms later that a connection was closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()

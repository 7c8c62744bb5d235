"""Serves an application over HTTP to strangers: few places, and none is kept by who does not use it.

The same for every server of the house. Nothing that a client says is logged, since it may be a token. Knows nothing of
what is served, nor of who may come in.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web

MAX_CONNECTIONS = 256

_ASK_S = 15.0  # for a client to make a request, the first as well as the next one
_TAKE_S = 15.0  # for it to take anything at all of an answer
_SHUTDOWN_S = 1.0  # for requests that are being answered when all is over
_LOOP_S = 10.0  # for anything asked of the event loop

T = TypeVar("T")

_library_log = logging.getLogger(f"{__name__}.library")
_library_log.setLevel(logging.CRITICAL)  # it would print requests that it cannot read


class AppServer:
    """Serves an application from construction on, until `close`, on an event loop in a thread of its own.

    Attributes:
        url: where it is, without a path.

    Args:
        application: what to serve.
        host: address to listen on.
        port: the port; 0 for any that is free.
        thread: name of the thread.

    Raises:
        OSError: if the address cannot be had.
    """

    def __init__(self, application: web.Application, host: str, port: int, thread: str) -> None:
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=thread, daemon=True)
        self._thread.start()
        try:
            self._runner, bound = self._on_loop(_listen(application, host, port))
        except BaseException:
            self._end_loop()
            raise
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    def close(self) -> None:
        """Let nobody in any more and give the port back. Callable from any other thread, repeatedly."""
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
        with suppress(TimeoutError):  # a handler in a thread may still wait for something
            self._on_loop(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Full(asyncio.Protocol):
    """For a connection too many: cameras and recordings need the process's files as well."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def _listen(application: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve `application` on the running event loop until `cleanup` of the runner returned is called.

    Returns:
        The runner, and the port, which is any that is free if 0 was asked for.

    Raises:
        OSError: if the address cannot be had.
    """
    listening: list[asyncio.Server] = []

    async def hang_up(_: web.Application) -> None:
        for server in listening:
            server.close()

    application.on_shutdown.insert(0, hang_up)
    runner = web.AppRunner(
        application,
        access_log=None,  # it would name tokens, and the secrets of sessions
        logger=_library_log,
        keepalive_timeout=_ASK_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        await runner.setup()
        handlers = runner.server
        assert handlers is not None  # there is one from setup() on

        def connected() -> asyncio.Protocol:
            return handlers() if len(handlers.connections) < MAX_CONNECTIONS else _Full()

        try:
            server = await asyncio.get_running_loop().create_server(connected, host, port)
        except UnicodeError:
            raise OSError(0, "no host can be called so") from None
        except OSError as error:
            raise OSError(error.errno, str(error.strerror).rpartition(": ")[2]) from None  # asyncio repeats the address
        listening.append(server)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it, and the kernel ends them
            for place in server.sockets:
                place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * _TAKE_S))
    except BaseException:
        await runner.cleanup()
        raise
    return runner, server.sockets[0].getsockname()[1]


async def _end_tasks() -> None:
    """End what still runs on this loop: aioice notices only 20 ms later that a connection was closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()

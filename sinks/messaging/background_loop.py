"""An asyncio event loop in a separate thread, for a sink that sends messages to a server."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any

from saccade.lookups import DaemonLoop
from saccade.sinks.base import SinkError

log = logging.getLogger(__name__)

_CANCEL_S = 1.0


class SocketLoop(DaemonLoop):
    """An asyncio event loop that ignores scheduled `add_reader` and `add_writer` calls if the socket is closed."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback. `add_reader` and `add_writer` are ignored if their socket is closed before they run."""
        # aiomqtt schedules these from another thread. Until they run, another socket can get the same descriptor.
        if callback in (self.add_reader, self.add_writer):
            owner = _owner_of(args[0])
            return super().call_soon_threadsafe(self._watch, callback, owner, args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def _watch(self, watch: Callable[..., object], owner: tuple[int, int] | None, args: tuple[Any, ...]) -> None:
        if owner is not None and _owner_of(args[0]) == owner:
            watch(*args)


def _owner_of(descriptor: int) -> tuple[int, int] | None:
    """Return the device and inode of an open file descriptor; None if the descriptor is closed."""
    try:
        found = os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


class BackgroundLoop:
    """Runs the coroutine `work(loop)` in a separate thread, from construction until the coroutine returns.

    Args:
        name: name of the thread.
        work: coroutine function. It receives this object and must return soon after `stopping` becomes True.
    """

    def __init__(self, name: str, work: Callable[[BackgroundLoop], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._work = work
        self._woken = asyncio.Event()
        self._stopping = False
        self._error: Exception | None = None
        self._loop = SocketLoop()
        self._thread = threading.Thread(target=self._run, name=f"saccade {name}", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether `close` was called. The coroutine of this loop must then return soon."""
        return self._stopping

    def check(self) -> None:
        """Raise SinkError if the coroutine has ended with an unexpected error."""
        if self._error is not None:
            raise SinkError(f"{self._name} failed: {self._error!r}")

    def wake(self) -> None:
        """Wake the coroutine that waits in `wait`. If none waits, the next `wait` returns immediately. Thread-safe."""
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for `wake`. Return immediately if `wake` was called since the last `wait`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        self._woken.clear()

    async def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds, or until `close` is called."""
        end = self._loop.time() + seconds
        while not self._stopping and (left := end - self._loop.time()) > 0:
            await self.wait(left)

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the coroutine to return, then cancel it. A second call does nothing."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_CANCEL_S)
        if self._thread.is_alive():
            log.warning("%s did not stop in time; its thread keeps running until the program exits", self._name)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._main())

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        try:
            await self._work(self)
        except Exception as error:
            log.exception("%s failed", self._name)
            self._error = error

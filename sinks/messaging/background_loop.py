"""An event loop in a thread, for a sink that talks to a server: woken from any thread, ended in bounded time.

Knows nothing of what the sink does, nor of frames and results.
"""

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
    """An event loop that watches no socket that was closed before it got to it.

    aiomqtt asks for a socket to be watched by its number, from another thread. Where the connection breaks before the
    loop does that, and the number is given to another socket at once, a loop watches that one, and keeps it when it is
    closed: no later socket of that number can be watched, and no answer of the broker is read.
    """

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """As in `asyncio`; `add_reader` and `add_writer` do nothing for a number that has a new owner."""
        if callback in (self.add_reader, self.add_writer):
            owner = _owner_of(args[0])
            return super().call_soon_threadsafe(self._watch, callback, owner, args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def _watch(self, watch: Callable[..., object], owner: tuple[int, int] | None, args: tuple[Any, ...]) -> None:
        if owner is not None and _owner_of(args[0]) == owner:
            watch(*args)


def _owner_of(descriptor: int) -> tuple[int, int] | None:
    """What tells a socket from a later one of the same number; None if there is none."""
    try:
        found = os.fstat(descriptor)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


class BackgroundLoop:
    """Runs the coroutine `work(loop)` in a thread of its own from construction on, until it returns.

    Args:
        name: of the thread.
        work: returns soon after `stopping` has become true; checks it whenever `wait` returns.
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
        """Whether `close` was called."""
        return self._stopping

    def check(self) -> None:
        """Do nothing while the work goes on.

        Raises:
            SinkError: if it has failed: it handles all expected errors itself, so this is a bug.
        """
        if self._error is not None:
            raise SinkError(f"{self._name} failed: {self._error!r}")

    def wake(self) -> None:
        """Let `wait` return. Callable from any thread."""
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, timeout_s: float) -> None:
        """Return after a call of `wake` since the last `wait`, or after `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        self._woken.clear()

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds`, whatever happens, except for `close`."""
        end = self._loop.time() + seconds
        while not self._stopping and (left := end - self._loop.time()) > 0:
            await self.wait(left)

    def close(self, timeout_s: float) -> None:
        """Let the work finish within `timeout_s` seconds, then cancel it. A second call does nothing."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_CANCEL_S)
        if self._thread.is_alive():
            log.warning("%s does not end; its thread is abandoned", self._name)

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

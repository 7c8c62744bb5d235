"""A thread with an event loop, for a sink that talks to a server: woken from any thread, ended in bounded time.

Knows nothing of what the sink does, nor of frames and results.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from saccade.sinks.base import SinkError

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LAST_DELAY_S = 30.0
_CANCEL_S = 3.0


def backoff_s(failures: int, chance: Callable[[], float] = random.random) -> float:
    """How long to wait after so many failures in a row, from 1: 0.5 s, doubling to 30 s, a random quarter of it off."""
    longest = min(_LAST_DELAY_S, _FIRST_DELAY_S * (1 << min(failures - 1, 16)))
    return longest * (1 - 0.25 * chance())


class Worker:
    """Runs the coroutine `work(worker)` in a thread of its own from construction on, until it returns.

    Args:
        name: of the thread.
        work: returns soon after `stopping` has become true; looks at it whenever `pause` comes back.
    """

    def __init__(self, name: str, work: Callable[[Worker], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._work = work
        self._woken = asyncio.Event()
        self._stopping = False
        self._error: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"saccade {name}", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether `close` was called."""
        return self._stopping

    def check(self) -> None:
        """Do nothing as long as the work goes on.

        Raises:
            SinkError: if it has failed; it deals itself with all that is to be expected, so this is a fault of ours.
        """
        if self._error is not None:
            raise SinkError(f"{self._name} failed: {self._error!r}")

    def wake(self) -> None:
        """Let `pause` come back. Callable from any thread."""
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._woken.set)

    async def pause(self, at_most_s: float) -> None:
        """Wait until there was a call of `wake` since the last pause, or so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._woken.wait()
        self._woken.clear()

    async def rest(self, seconds: float) -> None:
        """Wait so long, whatever happens, except for `close`."""
        end = self._loop.time() + seconds
        while not self._stopping and (left := end - self._loop.time()) > 0:
            await self.pause(left)

    def close(self, patience_s: float) -> None:
        """Let the work come to its end within `patience_s` seconds, then cut it short. A second call does nothing."""
        self._stopping = True
        self.wake()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(_CANCEL_S)
        if self._thread.is_alive():
            log.warning("%s does not end; left behind", self._name)

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

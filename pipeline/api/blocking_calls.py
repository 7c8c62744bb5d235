"""Runs blocking calls for an event loop, each in a daemon thread, with a limit on their number and a time limit.

A `ThreadPoolExecutor` would not work: at exit, the interpreter waits for its threads even if they hang.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from saccade.web.errors import HttpError

T = TypeVar("T")


class BusyError(Exception):
    """The maximum number of calls is already running."""


class BlockingCalls:
    """Runs calls of one kind, so that hanging calls do not block calls of other kinds.

    Args:
        count: maximum number of concurrent calls.
        limit_s: time limit of a call, in seconds.
        busy: message if too many calls are running, such as "too many changes are being made".
        late: HTTP status and message after the time limit.
    """

    def __init__(self, count: int, limit_s: float, busy: str = "", late: tuple[int, str] = (503, "")) -> None:
        self.limit_s = limit_s
        self._free = threading.BoundedSemaphore(count)
        self._busy = busy
        self._late = late

    async def ask(self, call: Callable[..., T], *given: object, undo: Callable[[T], object] = lambda result: None) -> T:
        """Run a call for a request; raises HttpError if too many calls are running, or on timeout."""
        try:
            return await self.run(partial(call, *given), undo)
        except BusyError:
            raise HttpError(503, f"{self._busy}; try again") from None
        except TimeoutError:
            raise HttpError(*self._late) from None

    async def run(self, call: Callable[[], T], undo: Callable[[T], object] = lambda result: None) -> T:
        """Run `call` and return its result.

        Args:
            call: the call.
            undo: called with the result if the call returns after the time limit.

        Raises:
            BusyError: if the maximum number of calls is already running.
            TimeoutError: after the time limit; the thread continues until the call returns.
        """
        if not self._free.acquire(blocking=False):
            raise BusyError
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        given_up = False

        def succeed(result: T) -> None:
            if given_up:
                undo(result)
            else:
                future.set_result(result)

        def fail(error: BaseException) -> None:
            if not given_up:
                future.set_exception(error)

        def work() -> None:
            try:
                settle: Callable[[], object] = partial(succeed, call())
            except BaseException as error:
                settle = partial(fail, error)
            finally:
                self._free.release()
            with suppress(RuntimeError):  # the loop is closed, so there is nothing to undo
                loop.call_soon_threadsafe(settle)

        threading.Thread(target=work, name="saccade call", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.limit_s)
        except (TimeoutError, asyncio.CancelledError):
            given_up = True
            if future.done() and not future.exception():  # the result arrived at the last moment
                undo(future.result())
            raise

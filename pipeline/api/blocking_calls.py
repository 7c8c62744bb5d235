"""Calls that may block for ever, for an event loop: each in a daemon thread, a few at a time, with a time limit.

A `ThreadPoolExecutor` would not do: the interpreter waits for its threads at exit, however long they hang.
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
    """As many calls as may run at a time are running, or hang."""


class BlockingCalls:
    """Runs calls of one kind, so that those that hang block none of another kind.

    Args:
        count: how many may run at a time.
        limit_s: after which a call is given up, in seconds.
        busy: what a client is told when as many run, such as "too many changes are being made".
        late: the status and the line for a client whose call was given up.
    """

    def __init__(self, count: int, limit_s: float, busy: str = "", late: tuple[int, str] = (503, "")) -> None:
        self.limit_s = limit_s
        self._free = threading.BoundedSemaphore(count)
        self._busy = busy
        self._late = late

    async def ask(self, call: Callable[..., T], *given: object, undo: Callable[[T], object] = lambda result: None) -> T:
        """As `run`, for a request: raises HttpError where too many calls are running, or this one takes too long."""
        try:
            return await self.run(partial(call, *given), undo)
        except BusyError:
            raise HttpError(503, f"{self._busy}; try again") from None
        except TimeoutError:
            raise HttpError(*self._late) from None

    async def run(self, call: Callable[[], T], undo: Callable[[T], object] = lambda result: None) -> T:
        """The result of `call`.

        Args:
            call: what to run.
            undo: called with the result of a call that returns after it was given up.

        Raises:
            BusyError: if as many as may run at a time are running.
            TimeoutError: if the call takes longer than the limit; its thread goes on until it returns.
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
            with suppress(RuntimeError):  # the loop is closed, and with it all that could be undone
                loop.call_soon_threadsafe(settle)

        threading.Thread(target=work, name="saccade call", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.limit_s)
        except (TimeoutError, asyncio.CancelledError):
            given_up = True
            if future.done() and not future.exception():  # it came at the last moment
                undo(future.result())
            raise

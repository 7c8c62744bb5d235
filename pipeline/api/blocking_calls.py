"""Runs blocking calls in daemon threads, with a timeout and a limit on concurrent calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from saccade.web.errors import HttpError

T = TypeVar("T")


class BlockingCalls:
    """Runs blocking calls in threads, with a timeout and a limit on concurrent calls.

    Args:
        count: maximum number of concurrent calls.
        limit_s: timeout of a call, in seconds.
        busy: error message if too many calls are running, such as "too many changes are being made".
        late: HTTP status and error message after a timeout.
    """

    def __init__(self, count: int, limit_s: float, busy: str, late: tuple[int, str]) -> None:
        self.limit_s = limit_s
        self._free = threading.BoundedSemaphore(count)
        self._busy = busy
        self._late = late

    async def ask(self, call: Callable[..., T], *given: object, undo: Callable[[T], object] = lambda result: None) -> T:
        """Run a blocking call for an HTTP request and return its result.

        Args:
            call: the blocking call.
            given: positional arguments of `call`.
            undo: function that undoes the call if it finishes after the timeout. Its argument is the result of the
                call.

        Raises:
            HttpError: if too many calls are running, or the call times out. The call then continues in its thread.
        """
        if not self._free.acquire(blocking=False):
            raise HttpError(503, f"{self._busy}; try again")
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
                settle: Callable[[], object] = partial(succeed, call(*given))
            except BaseException as error:
                settle = partial(fail, error)
            finally:
                self._free.release()
            with suppress(RuntimeError):  # the loop is closed, so there is nothing to undo
                loop.call_soon_threadsafe(settle)

        # Not a ThreadPoolExecutor: at exit, the interpreter would wait for its threads, even if they hang.
        threading.Thread(target=work, name="saccade call", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.limit_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            given_up = True
            if future.done() and not future.exception():  # the result arrived at the last moment
                undo(future.result())
            if isinstance(error, TimeoutError):
                raise HttpError(*self._late) from None
            raise

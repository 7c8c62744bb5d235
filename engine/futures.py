"""The future of one request: its callbacks run in a thread of their own, and cancelling it drops the work.

A callback may therefore submit and wait, or raise anything, without stopping the engine. Knows nothing of devices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from saccade.engine.results import Result

log = logging.getLogger(__name__)


class CallbackThread:
    """Runs callbacks in order, in a daemon thread that is started with the first one."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.RLock()  # the garbage collector may cancel a future in the thread that holds it
        self._started = False

    def call(self, callback: Callable[[], object]) -> None:
        """Queue a callback; what it raises is logged."""
        with self._lock:
            started, self._started = self._started, True
        if not started:
            threading.Thread(target=_run, args=(self._calls,), name="saccade-callbacks", daemon=True).start()
        self._calls.put(callback)

    def close(self) -> None:
        """End the thread after the callbacks that are queued; does not wait."""
        self._calls.put(None)


def _run(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (callback := calls.get()) is not None:
        try:
            callback()
        except BaseException:  # also sys.exit: it would end the thread that the other callbacks need
            log.exception("a callback of a result raised")
        del callback  # or the last one's future would live until the next


class ResultFuture(Future[Result]):
    """The result of a request.

    Attributes:
        begun: whether something has been done for it, beyond letting it wait.

    Args:
        callbacks: where done callbacks run.
        require_other_thread: raises in the thread that makes results: it would wait for itself for ever.
    """

    def __init__(self, callbacks: CallbackThread, require_other_thread: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._callbacks, self.require_other_thread = callbacks, require_other_thread
        self.begun = False
        self.on_cancel: Callable[[], None] | None = None
        self._settling = threading.RLock()  # a stream that is collected while it is held cancels its future
        self._settled = False

    def result(self, timeout: float | None = None) -> Result:
        """The result. Waits for it.

        Raises:
            EngineError: if it has failed; or if it is not there yet in the thread that has to make it.
            CancelledError: if it was cancelled.
            TimeoutError: if it is not there within `timeout` seconds.
        """
        if not self.done():
            self.require_other_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, None with a result. Waits for it; raises as `result` otherwise."""
        if not self.done():
            self.require_other_thread()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future once it is done: in the callback thread, or at once if it is done already."""
        if self.done():
            super().add_done_callback(fn)
        else:
            callbacks = self._callbacks  # with `self` in it the future, and all that `fn` holds, would be in a cycle
            super().add_done_callback(lambda future: callbacks.call(lambda: fn(future)))

    def call_when_done(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future once it is done, in the thread that ends it: it must neither wait nor raise."""
        super().add_done_callback(fn)

    def set_running_or_notify_cancel(self) -> bool:
        """As in the base class; a second call, from the engine and from `cancel`, changes nothing."""
        with self._settling:
            if self._settled:
                return not self.cancelled()
            self._settled = True
            return super().set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Drop the work, at any time before it is done; `wait` and `as_completed` see it at once."""
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        with self._settling:  # two threads may cancel at once
            drop, self.on_cancel = self.on_cancel, None
        if drop is not None:
            drop()
        return True

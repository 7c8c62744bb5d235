"""Futures of results, and streams of text.

Callbacks run in a thread of their own. A callback may therefore submit requests, wait or raise without stopping the
engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from saccade.engine.results import Result, Text

log = logging.getLogger(__name__)


class CallbackThread:
    """Daemon thread that runs callbacks in order. It starts with the first callback."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: garbage collection may cancel a future in this thread
        self._started = False

    def call(self, callback: Callable[[], object]) -> None:
        """Queue a callback. If it raises, the exception is logged."""
        with self._lock:
            started, self._started = self._started, True
        if not started:
            threading.Thread(target=_run, args=(self._calls,), name="saccade-callbacks", daemon=True).start()
        self._calls.put(callback)

    def close(self) -> None:
        """End the thread after all queued callbacks, without waiting for it."""
        self._calls.put(None)


def _run(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (callback := calls.get()) is not None:
        try:
            callback()
        except BaseException:  # even sys.exit must not end the thread, which later callbacks need
            log.exception("a result callback raised an exception")
        del callback  # otherwise its future would stay alive until the next callback


class ResultFuture(Future[Result]):
    """Future of the result of a request.

    Attributes:
        begun: whether work on the request has started.

    Args:
        callbacks: thread that runs the done callbacks.
        require_other_thread: function that raises if the caller is the engine's thread, where waiting would deadlock.
    """

    def __init__(self, callbacks: CallbackThread, require_other_thread: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._callbacks, self.require_other_thread = callbacks, require_other_thread
        self.begun = False
        self.on_cancel: Callable[[], None] | None = None
        self._settling = threading.RLock()  # reentrant, because garbage collection may cancel a future in this thread
        self._settled = False

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result and return it.

        Raises:
            EngineError: if the request failed. Also if the result is not ready and the caller is the engine's thread.
            CancelledError: if the request was cancelled.
            TimeoutError: if the result is not ready within `timeout` seconds.
        """
        if not self.done():
            self.require_other_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the request, and return its error or None. Raises the same errors as `result` while waiting."""
        if not self.done():
            self.require_other_thread()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future when it is done, in the callback thread.

        If it is already done, call `fn` at once.
        """
        if self.done():
            super().add_done_callback(fn)
        else:
            callbacks = self._callbacks  # the closure must not reference `self`, to avoid a reference cycle
            super().add_done_callback(lambda future: callbacks.call(lambda: fn(future)))

    def call_when_done(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future in the thread that sets the result. `fn` must not wait or raise."""
        super().add_done_callback(fn)

    def set_running_or_notify_cancel(self) -> bool:
        """See the base class. Repeated calls have no effect."""
        with self._settling:
            if self._settled:
                return not self.cancelled()
            self._settled = True
            return super().set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the request if it is not done. All threads that wait for it are notified at once."""
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        with self._settling:  # two threads may cancel at the same time
            drop, self.on_cancel = self.on_cancel, None
        if drop is not None:
            drop()
        return True


class TextStream(Iterator[str]):
    """Iterator over the pieces of an answer while it is generated. It has one reader.

    Closing it, leaving a `with` block or dropping it cancels the rest of the answer.

    Args:
        future: future of the whole answer.
        pieces: queue of pieces, read only by this object.
    """

    def __init__(self, future: ResultFuture, pieces: SimpleQueue[str | None]) -> None:
        self._future, self._pieces, self._over = future, pieces, False
        # Do not use the callback thread: if a callback reads this stream, it would wait for its own thread.
        future.call_when_done(lambda _: pieces.put(None))

    def __next__(self) -> str:
        """Wait for the next piece and return it.

        Raises:
            EngineError: if the answer failed; all earlier pieces are returned first. Also if the caller is the engine's
                thread.
        """
        if not self._over and self._pieces.empty():
            self._future.require_other_thread()
        piece = None if self._over else self._pieces.get()
        if piece is not None:
            return piece
        over, self._over = self._over, True
        if not over and not self._future.cancelled():
            self._future.result()
        raise StopIteration

    @property
    def answer(self) -> Text:
        """The complete answer. Blocks.

        Raises:
            EngineError: if the answer failed.
            CancelledError: if the answer was cancelled.
        """
        return self.result.texts[0]

    @property
    def result(self) -> Result:
        """The complete result. Blocks, and raises the same errors as `answer`."""
        return self._future.result()

    def close(self) -> None:
        """Cancel the rest of the answer. Thread-safe. Repeated calls have no effect."""
        self._over = True
        self._future.cancel()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

"""Futures of results, and streams of text.

Callbacks run in a separate thread: a callback may submit, wait or raise without stopping the engine.
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
    """Runs callbacks in order in a daemon thread that starts on first use."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: garbage collection may cancel a future in this thread
        self._started = False

    def call(self, callback: Callable[[], object]) -> None:
        """Queue a callback; its exceptions are logged."""
        with self._lock:
            started, self._started = self._started, True
        if not started:
            threading.Thread(target=_run, args=(self._calls,), name="saccade-callbacks", daemon=True).start()
        self._calls.put(callback)

    def close(self) -> None:
        """End the thread after the queued callbacks, without waiting."""
        self._calls.put(None)


def _run(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (callback := calls.get()) is not None:
        try:
            callback()
        except BaseException:  # also sys.exit: it would end the thread that the other callbacks need
            log.exception("a result callback raised an exception")
        del callback  # or the last one's future would live until the next


class ResultFuture(Future[Result]):
    """Future of a request's result.

    Attributes:
        begun: whether work beyond queueing was done.

    Args:
        callbacks: thread for done callbacks.
        require_other_thread: raises in the engine's thread, where waiting would deadlock.
    """

    def __init__(self, callbacks: CallbackThread, require_other_thread: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._callbacks, self.require_other_thread = callbacks, require_other_thread
        self.begun = False
        self.on_cancel: Callable[[], None] | None = None
        self._settling = threading.RLock()  # a stream that is collected while it is held cancels its future
        self._settled = False

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result and return it.

        Raises:
            EngineError: if the request failed, or the caller is the engine's thread and the result is not ready.
            CancelledError: if it was cancelled.
            TimeoutError: if it is not ready within `timeout` seconds.
        """
        if not self.done():
            self.require_other_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the request and return its error, or None; raises like `result`."""
        if not self.done():
            self.require_other_thread()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future when it is done, in the callback thread, or at once if it is already done."""
        if self.done():
            super().add_done_callback(fn)
        else:
            callbacks = self._callbacks  # with `self` in it the future, and all that `fn` holds, would be in a cycle
            super().add_done_callback(lambda future: callbacks.call(lambda: fn(future)))

    def call_when_done(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future in the thread that finishes it; `fn` must not wait or raise."""
        super().add_done_callback(fn)

    def set_running_or_notify_cancel(self) -> bool:
        """See the base class; repeated calls are ignored."""
        with self._settling:
            if self._settled:
                return not self.cancelled()
            self._settled = True
            return super().set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the request at any time before it is done; waiters are notified at once."""
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        with self._settling:  # two threads may cancel at once
            drop, self.on_cancel = self.on_cancel, None
        if drop is not None:
            drop()
        return True


class TextStream(Iterator[str]):
    """Iterator over the pieces of an answer during generation, for one reader.

    Closing, leaving a `with` block or dropping it cancels the rest of the answer.

    Args:
        future: future of the whole answer.
        pieces: queue of pieces, read only by this object.
    """

    def __init__(self, future: ResultFuture, pieces: SimpleQueue[str | None]) -> None:
        self._future, self._pieces, self._over = future, pieces, False
        # Not as a callback: a caller's own callback that reads a stream would wait for the thread that it runs in.
        future.call_when_done(lambda _: pieces.put(None))

    def __next__(self) -> str:
        """Return the next piece.

        Raises:
            EngineError: if the answer failed, after all earlier pieces; or in the engine's thread.
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
        """Complete answer; blocks.

        Raises:
            EngineError: if it failed.
            CancelledError: if it was cancelled.
        """
        return self.result.texts[0]

    @property
    def result(self) -> Result:
        """Complete result; blocks and raises like `answer`."""
        return self._future.result()

    def close(self) -> None:
        """Cancel the rest of the answer. Thread-safe; repeated calls are ignored."""
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

"""What a caller holds of a request: the future of its result, and a stream of its text. Knows nothing of devices.

Callbacks run in a thread of their own: a callback may submit and wait, or raise anything, without stopping the engine.
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


class TextStream(Iterator[str]):
    """The pieces of an answer, as they are written. For one reader.

    Closing it before its end, also by leaving a `with` or dropping it, cancels the rest of the answer.

    Args:
        future: of the whole answer.
        pieces: where they come in; nothing else reads it.
    """

    def __init__(self, future: ResultFuture, pieces: SimpleQueue[str | None]) -> None:
        self._future, self._pieces, self._over = future, pieces, False
        # Not as a callback: a caller's own callback that reads a stream would wait for the thread that it runs in.
        future.call_when_done(lambda _: pieces.put(None))

    def __next__(self) -> str:
        """The next piece.

        Raises:
            EngineError: if the answer has failed; what came before it was read first. Or if it would have to be waited
                for in the thread that makes it.
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
        """The whole answer. Waits for it.

        Raises:
            EngineError: if it has failed.
            CancelledError: if it was dropped.
        """
        return self.result.texts[0]

    @property
    def result(self) -> Result:
        """All that was found; as `answer`."""
        return self._future.result()

    def close(self) -> None:
        """Drop what is not written yet. Any thread may call it; a second time, or at the end, it does nothing."""
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

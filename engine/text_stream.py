"""Streamed text: an iterator over the pieces of one answer. Knows the engine's futures, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from types import TracebackType

from saccade.engine.futures import ResultFuture
from saccade.engine.results import Text


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
        return self._future.result().texts[0]

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

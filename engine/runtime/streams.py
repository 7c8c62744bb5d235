"""Interface of a stream. A stream runs submitted work in order, and measures how long the work took.

Streams are CUDA streams (`cuda_executor`) or CPU worker threads (`cpu_executor`). Both are asynchronous, so that
tests on a CPU can detect missing synchronization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Event(Protocol):
    """A point in the work of a `Stream` that other code can wait for, like a CUDA event."""

    def query(self) -> bool:
        """Return whether the event has completed, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait until the event has completed: all earlier work of its stream has run.

        Raises:
            BaseException: any error of the work between the previous event and this event.
        """
        ...


class Watcher(Protocol):
    """Records when the work of a `Stream` was executed. The stream calls its methods."""

    def about(self) -> Any:
        """Return a label of the work that is being submitted. The stream later passes the label to `ran`.

        The submitting thread calls this method.
        """
        ...

    def ran(self, about: Any, start: float, end: float) -> None:
        """Record that work was executed from `start` to `end`, in seconds of `time.perf_counter`.

        A stream calls this method in the order in which its work was executed.
        """
        ...


class Stream(Protocol):
    """Runs submitted work in order, in the background, like a CUDA stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Submit work without waiting for it.

        Raises:
            BaseException: an error of the launch. Errors of work that runs in the background are raised by the next
                event.
        """
        ...

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """Record an event, which completes when all work submitted so far has run.

        Args:
            again: an earlier event of this stream to reuse, if no other work still waits for it.
            reached: callback for the completion of the event. CUDA streams ignore it.
        """
        ...

    def wait(self, event: Event) -> None:
        """Delay all later work of this stream until an event of another stream has completed."""
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Let `watcher` record the times of work submitted from now on. None stops the recording."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Report the times of finished work. If `wait` is True, first wait for all submitted work. Thread-safe."""
        ...

    def close(self) -> None:
        """Wait for all submitted work, then close the stream."""
        ...

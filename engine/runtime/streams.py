"""Streams: work that runs in the order it was given, and when it ran. On CUDA the driver's, on a CPU a worker thread.

Both are alike, so overlap and order are as real on a CPU as on a GPU, and so are mistakes in them.
Knows nothing of models.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come this far."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has come this far.

        Raises:
            BaseException: what any work before this point, since the event before it, has raised.
        """
        ...


class Watcher(Protocol):
    """Notified when work on a stream has run."""

    def about(self) -> Any:
        """What the work is that is being submitted; called in the submitting thread."""
        ...

    def ran(self, about: Any, start: float, end: float) -> None:
        """It has run, from `start` to `end` in seconds of `time.perf_counter`. Called in the stream's order."""
        ...


class Stream(Protocol):
    """Work that runs in the order it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream; does not wait for it.

        Raises:
            BaseException: what the work has raised, if it was run here; else its event raises it.
        """
        ...

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """An event behind all work given so far.

        Args:
            again: an earlier event of this stream, which nobody waits for any more: it may be the one.
            reached: called behind it, in a thread of the stream's; on CUDA it is not.
        """
        ...

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event."""
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher, or none any more, of the work submitted from now on."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Notify the watcher of what has run by now, or wait for all that was submitted; any thread may call this."""
        ...

    def close(self) -> None:
        """End the stream after the work it has."""
        ...


class _CpuEvent:
    __slots__ = ("error", "reached")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error


class CpuStream:
    """A worker thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # of the work since the last event; only the worker touches it
        self._watcher: Watcher | None = None
        self._thread = threading.Thread(target=self._run, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream; what it raises is raised by the next event, and the work up to there is skipped."""
        watcher = self._watcher
        self._work.put(work if watcher is None else _watched(work, watcher))

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """See `Stream.record`; always a new event."""
        event = _CpuEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()
            if reached is not None:
                reached()

        self._work.put(_always(reach))
        return event

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event; its error becomes this stream's."""

        def wait() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._work.put(_always(wait))

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher, or none any more, of the work submitted from now on, in the worker's thread."""
        self._watcher = watcher

    def settle(self, *, wait: bool = False) -> None:
        """Wait for the work submitted, if asked to; the watcher knows of what has run."""
        if wait and self._thread.is_alive():
            reached = threading.Event()
            self._work.put(_always(reached.set))
            while not reached.wait(0.1) and self._thread.is_alive():
                pass

    def close(self) -> None:
        """End the thread after the work it has."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None or getattr(work, "always", False):
                try:
                    work()
                except BaseException as error:  # it is raised where the event is waited for
                    self._error = error


def _always(work: Callable[[], None]) -> Callable[[], None]:
    """Mark work that runs even behind work that failed."""

    def marked() -> None:
        work()

    marked.always = True  # type: ignore[attr-defined]
    return marked


def _watched(work: Callable[[], None], watcher: Watcher) -> Callable[[], None]:
    about = watcher.about()

    def watched() -> None:
        start = time.perf_counter()
        try:
            work()
        finally:
            watcher.ran(about, start, time.perf_counter())

    return watched


class _CudaTimer:
    """When work on a stream ran, by an event before it and one behind it. The two are read once they are reached.

    The device's clock is set by the host's at the start, and then followed from event to event: the time between two
    is given in single precision, which is too coarse across minutes.
    """

    def __init__(self, stream: torch.cuda.Stream, watcher: Watcher) -> None:
        self._stream, self._watcher = stream, watcher
        self._pending: deque[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []  # that have been read: to make one takes the driver 2 µs
        self._lock = threading.Lock()
        self._known, self._known_at = _reference(stream.device)

    def run(self, work: Callable[[], None]) -> None:
        """Launch work, and have it timed."""
        self.settle(wait=False)
        about = self._watcher.about()
        start, end = self._event(), self._event()
        start.record(self._stream)
        work()
        end.record(self._stream)
        self._pending.append((about, start, end))

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)

    def settle(self, *, wait: bool) -> None:
        """Notify of all that has run, or wait until all has."""
        with self._lock:
            while self._pending:
                about, start, end = self._pending[0]
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                self._pending.popleft()
                started = self._known_at + self._known.elapsed_time(start) / 1e3
                ended = started + start.elapsed_time(end) / 1e3
                self._spare += [self._known, start]
                self._known, self._known_at = end, ended
                self._watcher.ran(about, started, ended)


def _reference(device: torch.device) -> tuple[torch.cuda.Event, float]:
    """An event and the host's time of it, the closest of a few tries; waits, on a stream where nothing else is."""
    stream = torch.cuda.Stream(device)
    tries = []
    for _ in range(5):
        event = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter()
        event.record(stream)
        event.synchronize()
        after = time.perf_counter()
        tries.append((after - before, event, (before + after) / 2))
    _, event, at = min(tries, key=lambda one: one[0])
    return event, at


class CudaStream:
    """A CUDA stream; launching happens in the calling thread, and fails there."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_stream(device)
        self._timer: _CudaTimer | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Launch work on the stream; some of it may be there when launching raises."""
        timer = self._timer
        torch.cuda.set_stream(self.stream)  # 1 µs; the context manager asks for the stream before, which takes 15
        try:
            if timer is None:
                work()
            else:
                timer.run(work)
        finally:
            torch.cuda.set_stream(self._default)

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """See `Stream.record`: to make an event takes the driver 2 µs. `reached` is not called.

        A driver's thread that calls Python would wait for the GIL, longer than it takes to ask.
        """
        # A blocking event interrupts the host, which sleeps.
        event = again if isinstance(again, torch.cuda.Event) else torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event."""
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher, or none any more, of the work submitted from now on."""
        self._timer = None if watcher is None else _CudaTimer(self.stream, watcher)

    def settle(self, *, wait: bool = False) -> None:
        """Notify the watcher of what has run by now, or wait for all that was submitted."""
        timer = self._timer
        if timer is not None:
            timer.settle(wait=wait)

    def close(self) -> None:
        """Wait for the work on the stream."""
        self.stream.synchronize()

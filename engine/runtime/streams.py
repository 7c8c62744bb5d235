"""Streams that run work in order: CUDA streams, and worker threads on a CPU, with timing.

Both have the same interface, so overlap and ordering errors are testable on a CPU.
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
        """Return whether the stream has reached this point."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream has reached this point.

        Raises:
            BaseException: any error of the work since the previous event.
        """
        ...


class Watcher(Protocol):
    """Receives notifications when work on a stream has run."""

    def about(self) -> Any:
        """Return a description of the work being submitted; called in the submitting thread."""
        ...

    def ran(self, about: Any, start: float, end: float) -> None:
        """Record that work ran from `start` to `end` (`time.perf_counter`); called in the stream's order."""
        ...


class Stream(Protocol):
    """Runs work in submission order."""

    def run(self, work: Callable[[], None]) -> None:
        """Submit work without waiting.

        Raises:
            BaseException: an error while launching; errors of asynchronous work are raised by its event.
        """
        ...

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """Return an event after all work submitted so far.

        Args:
            again: an earlier event of this stream without waiters, which may be reused.
            reached: called in a thread of the stream when the event is reached; not called on CUDA.
        """
        ...

    def wait(self, event: Event) -> None:
        """Let work submitted from now on start only after the event."""
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher (None for none) about work submitted from now on."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Notify the watcher about finished work; with `wait`, first wait for all work. Thread-safe."""
        ...

    def close(self) -> None:
        """Close the stream after its submitted work."""
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
    """A stream run by a worker thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # of the work since the last event; only the worker touches it
        self._watcher: Watcher | None = None
        self._thread = threading.Thread(target=self._run, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Submit work; an error skips the following work up to the next event, which raises it."""
        watcher = self._watcher
        self._work.put(work if watcher is None else _watched(work, watcher))

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """See `Stream.record`; always returns a new event."""
        event = _CpuEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()
            if reached is not None:
                reached()

        self._work.put(_always(reach))
        return event

    def wait(self, event: Event) -> None:
        """Let work submitted from now on start only after the event; its error becomes this stream's error."""

        def wait() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._work.put(_always(wait))

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher (None for none) in the worker's thread about work submitted from now on."""
        self._watcher = watcher

    def settle(self, *, wait: bool = False) -> None:
        """Wait for the submitted work if `wait` is true; the watcher is already notified."""
        if wait and self._thread.is_alive():
            reached = threading.Event()
            self._work.put(_always(reached.set))
            while not reached.wait(0.1) and self._thread.is_alive():
                pass

    def close(self) -> None:
        """End the thread after its submitted work."""
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
    """Mark work that also runs after failed work."""

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
    """Times work on a stream with an event before and after it.

    The device clock is synchronized with the host clock once and then advanced from event to event. CUDA reports the
    time between two events in single precision, which is too coarse across minutes.
    """

    def __init__(self, stream: torch.cuda.Stream, watcher: Watcher) -> None:
        self._stream, self._watcher = stream, watcher
        self._pending: deque[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []  # that have been read: to make one takes the driver 2 µs
        self._lock = threading.Lock()
        self._known, self._known_at = _reference(stream.device)

    def run(self, work: Callable[[], None]) -> None:
        """Launch work and time it."""
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
        """Notify the watcher about finished work, or wait for all work."""
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
    """Return an event and its host time, the most accurate of several tries; synchronizes on an idle stream."""
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
    """A CUDA stream; work is launched in the calling thread and raises there."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_stream(device)
        self._timer: _CudaTimer | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Launch work on the stream; if launching raises, part of the work may already be queued."""
        timer = self._timer
        torch.cuda.set_stream(self.stream)  # 1 µs; the context manager also queries the stream, which takes 15
        try:
            if timer is None:
                work()
            else:
                timer.run(work)
        finally:
            torch.cuda.set_stream(self._default)

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """See `Stream.record`. `reached` is not called, and events are reused because creating one takes 2 µs.

        A driver thread that calls Python would wait for the GIL for longer than polling takes.
        """
        # A blocking event lets the host sleep until an interrupt.
        event = again if isinstance(again, torch.cuda.Event) else torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        """Let work submitted from now on start only after the event."""
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher (None for none) about work submitted from now on."""
        self._timer = None if watcher is None else _CudaTimer(self.stream, watcher)

    def settle(self, *, wait: bool = False) -> None:
        """Notify the watcher about finished work; with `wait`, first wait for all work."""
        timer = self._timer
        if timer is not None:
            timer.settle(wait=wait)

    def close(self) -> None:
        """Wait for the work on the stream."""
        self.stream.synchronize()

"""Streams, which run work in order and time it: CUDA streams on a GPU, worker threads on a CPU.

Both have the same interface. Tests on a CPU can therefore find errors in overlap and order.
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
    """A point in the work of a stream, like a CUDA event."""

    def query(self) -> bool:
        """Return whether the stream has reached this point."""
        ...

    def synchronize(self) -> None:
        """Block until the stream has reached this point.

        Raises:
            BaseException: any error of the work between the previous event and this one.
        """
        ...


class Watcher(Protocol):
    """Interface for timing: a stream tells its watcher when work has run."""

    def about(self) -> Any:
        """Return a description of the work that is being submitted. Called in the submitting thread."""
        ...

    def ran(self, about: Any, start: float, end: float) -> None:
        """Record that work ran from `start` to `end`, in seconds of `time.perf_counter`.

        The calls follow the order of the work in the stream.
        """
        ...


class Stream(Protocol):
    """Runs submitted work in order, in the background."""

    def run(self, work: Callable[[], None]) -> None:
        """Submit work without waiting for it.

        Raises:
            BaseException: an error of the launch. Errors of work that runs in the background are raised by the next
                event.
        """
        ...

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """Return an event that is reached when all work submitted so far has run.

        Args:
            again: an earlier event of this stream that may be reused; nothing may still wait for it.
            reached: callback that a thread of the stream calls when the event is reached. CUDA streams never call it.
        """
        ...

    def wait(self, event: Event) -> None:
        """Delay all work that is submitted from now on until another stream has reached the event."""
        ...

    def watch(self, watcher: Watcher | None) -> None:
        """Set the watcher of all work that is submitted from now on. None removes the watcher."""
        ...

    def settle(self, *, wait: bool = False) -> None:
        """Tell the watcher about all work that has run. With `wait`, wait for all submitted work first. Thread-safe."""
        ...

    def close(self) -> None:
        """Wait for all submitted work, then close the stream."""
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
    """Stream whose work runs in a worker thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Error of the work since the last event; only the worker thread accesses it.
        self._error: BaseException | None = None
        self._watcher: Watcher | None = None
        self._thread = threading.Thread(target=self._run, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Submit work. If it raises, the work after it is skipped until the next event, which raises the error."""
        watcher = self._watcher
        self._work.put(work if watcher is None else _watched(work, watcher))

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """See `Stream.record`. The event is always new."""
        event = _CpuEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()
            if reached is not None:
                reached()

        self._work.put(_always(reach))
        return event

    def wait(self, event: Event) -> None:
        """See `Stream.wait`. An error of the event also becomes an error of this stream."""

        def wait() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._work.put(_always(wait))

    def watch(self, watcher: Watcher | None) -> None:
        """See `Stream.watch`. The worker thread calls the watcher."""
        self._watcher = watcher

    def settle(self, *, wait: bool = False) -> None:
        """See `Stream.settle`. The watcher already knows about all work that has run."""
        if wait and self._thread.is_alive():
            reached = threading.Event()
            self._work.put(_always(reached.set))
            while not reached.wait(0.1) and self._thread.is_alive():
                pass

    def close(self) -> None:
        """Run all submitted work, then end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None or getattr(work, "always", False):
                try:
                    work()
                except BaseException as error:  # the next event raises it
                    self._error = error


def _always(work: Callable[[], None]) -> Callable[[], None]:
    """Return a copy of the function that is also run after failed work."""

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
    """Times the work on a CUDA stream with one event before it and one after it.

    Device times are converted to host times. One reference event is measured on both clocks. Each later event is placed
    by its distance from the event before it, because CUDA returns distances in single precision, which is too coarse
    for minutes.
    """

    def __init__(self, stream: torch.cuda.Stream, watcher: Watcher) -> None:
        self._stream, self._watcher = stream, watcher
        self._pending: deque[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []  # events for reuse, because creating one takes 2 µs
        self._lock = threading.Lock()
        self._known, self._known_at = _reference(stream.device)

    def run(self, work: Callable[[], None]) -> None:
        """Launch work between two timing events."""
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
        """Tell the watcher about all work that has run. With `wait`, wait for all submitted work first."""
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
    """Return an event and its time on the host clock. Waits for the stream, which must be idle.

    The most accurate of several measurements is used.
    """
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
    """CUDA stream. Work is launched in the calling thread, so launch errors are raised there."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_stream(device)
        self._timer: _CudaTimer | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Launch work on the stream. If it raises, a part of the work may already be queued on the device."""
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
        """See `Stream.record`. Events are reused because creating one takes 2 µs.

        `reached` is never called: a driver thread would wait for the GIL for longer than polling takes.
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

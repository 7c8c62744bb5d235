"""A CUDA stream, and when the work on it ran. Knows nothing of models."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from saccade.engine.runtime.executor import Event, Watcher


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

    def record(self) -> Event:
        """An event behind all work given so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event."""
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def time(
        self, work: Callable[[], object], repeats: int, begin_with: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Seconds on the device's clock of work done again and again, while nothing else runs; the first few left out.

        Args:
            work: to be timed.
            repeats: how often.
            begin_with: done before each time, and not timed.
        """
        pairs = []
        torch.cuda.synchronize(self.stream.device)
        with torch.cuda.stream(self.stream):
            for _ in range(repeats + 5):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin_with()
                begin.record()
                work()
                end.record()
                pairs.append((begin, end))
        torch.cuda.synchronize(self.stream.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs[5:]]

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

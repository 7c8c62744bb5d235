"""Streams and events, on CUDA and on the CPU alike: work that runs in order, beside the thread that asks for it.

On the CPU a stream is one worker thread that runs what it is given, in order, and an event is an event: overlap, order
and mistakes in either are as real there as on a GPU. Knows nothing of models.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has come this far.

        Raises:
            BaseException: what any work before this point, since the event before it, has raised.
        """
        ...


class Stream(Protocol):
    """Work that runs in the order it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream; does not wait for it."""
        ...

    def record(self) -> Event:
        """An event behind all work given so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event."""
        ...

    def close(self) -> None:
        """End the stream after the work it has."""
        ...


class _CpuEvent:
    __slots__ = ("error", "reached")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error


class CpuStream:
    """A worker thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # of the work since the last event; only the worker touches it
        self._thread = threading.Thread(target=self._run, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream; what it raises is told by the next event, and what follows until there is skipped."""
        self._work.put(work)

    def record(self) -> Event:
        """An event behind all work given so far."""
        event = _CpuEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()

        self._work.put(_always(reach))
        return event

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event; the error it tells of becomes this stream's."""

        def wait() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._work.put(_always(wait))

    def close(self) -> None:
        """End the thread after the work it has."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None or getattr(work, "always", False):
                try:
                    work()
                except BaseException as error:  # it belongs to whoever waits for the event
                    self._error = error


def _always(work: Callable[[], None]) -> Callable[[], None]:
    """Mark work that runs even behind work that failed."""
    work.always = True  # type: ignore[attr-defined]
    return work


class _CudaEvent:
    __slots__ = ("error", "event")

    def __init__(self, event: torch.cuda.Event, error: BaseException | None) -> None:
        self.event, self.error = event, error

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self.event.synchronize()


class CudaStream:
    """A CUDA stream; launching happens in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._error: BaseException | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Launch work on the stream; what launching raises is told by the next event."""
        if self._error is None:
            try:
                with torch.cuda.stream(self.stream):
                    work()
            except BaseException as error:
                self._error = error

    def record(self) -> Event:
        """An event behind all work given so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        told, self._error = _CudaEvent(event, self._error), None
        return told

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event."""
        assert isinstance(event, _CudaEvent)
        self._error = self._error or event.error
        self.stream.wait_event(event.event)

    def close(self) -> None:
        """Wait for the work on the stream."""
        self.stream.synchronize()


def open_stream(device: torch.device, name: str) -> Stream:
    """A new stream on a device."""
    return CudaStream(device) if device.type == "cuda" else CpuStream(name)

"""Transfers results from the workers to the shared sinks in the controller process.

A transferred record contains the result, its latency, and the timestamp and size of the frame, but no image.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from saccade.engine.results import Result
from saccade.pipeline.runtime.delivery import Delivery, OutputDelivery
from saccade.pipeline.runtime.output import Output
from saccade.sinks import Latency
from saccade.sources import Frame

_END_S = 5.0  # time for the sinks to take the queued results of an ended stream
_BLACK = np.zeros((1, 1, 3), np.uint8)
_CARRIED = (
    *("stream", "index", "pts", "time_base", "captured_at", "capture_clock"),
    *("decoded_at", "decode_ms", "dropped_before", "damaged", "pixel_aspect"),
)
"""The transferred fields of a frame, besides its size. All processes of a machine have the same `time.monotonic()`."""


class RelaySink:
    """A sink in a worker process that sends the results of every stream to the controller process.

    Args:
        send: sends a pickled result; can block.
    """

    shared: ClassVar[bool] = True

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send_bytes = send

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Send one result to the controller process."""
        head = {name: getattr(frame, name) for name in _CARRIED}
        self._send((head, frame.width, frame.height, result, latency))

    def end(self, stream: str) -> None:
        """Notify the controller that a stream has ended."""
        self._send(stream)

    def close(self) -> None:
        """Do nothing, because the sink has no resources to close."""

    def _send(self, what: Any) -> None:
        self._send_bytes(pickle.dumps(what, pickle.HIGHEST_PROTOCOL))


class ResultReceiver:
    """Receives results from workers in the controller process, and writes them to the shared sinks. Thread-safe.

    Args:
        outputs: the shared sinks. The caller closes them.
        live: returns whether a stream is live, by name.
    """

    def __init__(self, outputs: Sequence[Output], live: Callable[[str], bool]) -> None:
        self._outputs = outputs
        self._live = live
        self._changed = threading.Condition()  # guards the attributes below; notified when a stream has ended
        self._streams: dict[str, tuple[OutputDelivery, threading.Semaphore]] = {}
        self._ending: list[str] = []

    def take(self, data: bytes) -> None:
        """Process a pickled message of a worker: a result, or the name of a stream that has ended."""
        what = pickle.loads(data)  # trusted: it comes from our own process
        if isinstance(what, str):
            self.end(what)
            return
        head, width, height, result, latency = what
        image = np.broadcast_to(_BLACK, (height, width, 3))  # the right size without memory
        delivery = Delivery(Frame(image=image, **head), result, latency)
        self._delivery(head["stream"]).put(delivery, head["dropped_before"])

    def wait_end(self, stream: str, timeout_s: float) -> None:
        """Wait until the shared sinks have written all results of an ended stream, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: stream not in self._streams and stream not in self._ending, timeout_s)

    def end(self, stream: str) -> None:
        """Write the queued results of an ended stream, and notify the sinks that the stream has ended."""
        with self._changed:
            known = self._streams.pop(stream, None)
            if known is None:
                return
            self._ending.append(stream)
        delivery, ended = known
        delivery.close()
        for _ in self._outputs:
            ended.acquire(timeout=_END_S)
        with self._changed:
            self._ending.remove(stream)
            self._changed.notify_all()

    def close(self) -> None:
        """End all streams. Call this after the last result was received."""
        with self._changed:
            names = list(self._streams)
        for name in names:
            self.end(name)

    def _delivery(self, stream: str) -> OutputDelivery:
        with self._changed:
            known = self._streams.get(stream)
            if known is None:
                ended = threading.Semaphore(0)  # released by each sink that is through
                delivery = OutputDelivery(
                    self._outputs,
                    stream,
                    live=self._live(stream),
                    stop=lambda: None,
                    fail=lambda error: None,
                    ended=ended.release,
                )
                delivery.start()
                known = self._streams[stream] = delivery, ended
            return known[0]

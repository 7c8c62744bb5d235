"""The results of a worker's streams on their way to the sinks that all streams share, which are in another process.

What crosses is a frame's times and size, its result and its latency; no image does. Knows no sinks but its own.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from saccade.engine.results import Result
from saccade.pipeline.runtime.delivery import Delivery, OutputDelivery
from saccade.pipeline.runtime.output import Output
from saccade.sinks import Latency
from saccade.sources import Frame

_END_S = 5.0  # for the sinks to take what waits of a stream that has ended
_BLACK = np.zeros((1, 1, 3), np.uint8)
_CARRIED = (
    "stream",
    "index",
    "pts",
    "time_base",
    "captured_at",
    "capture_clock",
    "decoded_at",
    "decode_ms",
    "dropped_before",
    "damaged",
    "pixel_aspect",
)
"""What of a frame is carried besides its size. Its clock, `time.monotonic()`, is the machine's."""


class RelaySink:
    """In a worker: takes what every stream finds, and sends it.

    While too many wait there, `write` waits: a file is held back, and a live stream loses its oldest results.

    Args:
        send: takes each, pickled; may wait.
    """

    shared: ClassVar[bool] = True

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send_bytes = send

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Send one."""
        head = {name: getattr(frame, name) for name in _CARRIED}
        self._send((head, frame.width, frame.height, result, latency))

    def end(self, stream: str) -> None:
        """Send that nothing more comes from `stream`."""
        self._send(stream)

    def close(self) -> None:
        """Nothing is left to do."""

    def _send(self, what: Any) -> None:
        self._send_bytes(pickle.dumps(what, pickle.HIGHEST_PROTOCOL))


class ResultReceiver:
    """In the process with the sinks: hands them what workers have sent.

    Each stream has an outbox and a thread for each sink, as if it ran here. Every method is callable from any thread.

    Args:
        outputs: the sinks that all streams share; they stay the caller's.
        live: whether a stream is, of that name.
    """

    def __init__(self, outputs: Sequence[Output], live: Callable[[str], bool]) -> None:
        self._outputs = [replace(output, shared=True) for output in outputs]
        self._live = live
        self._lock = threading.Lock()
        self._streams: dict[str, tuple[OutputDelivery, list[threading.Thread]]] = {}
        self._ending: list[str] = []
        self._changed = threading.Condition(self._lock)  # when one has ended

    def take(self, data: bytes) -> None:
        """Hand on what a `RelaySink` has sent."""
        what = pickle.loads(data)  # from a process of our own, which has our code
        if isinstance(what, str):
            self.end(what)
            return
        head, width, height, result, latency = what
        image = np.broadcast_to(_BLACK, (height, width, 3))  # of the right size, and of no memory
        delivery = Delivery(Frame(image=image, **head), result, latency)
        self._delivery(head["stream"]).put(delivery, head["dropped_before"])

    def wait_end(self, stream: str, timeout_s: float) -> None:
        """Wait until everything has come that its worker has sent of a stream, which it has let go of."""
        with self._changed:
            self._changed.wait_for(lambda: stream not in self._streams and stream not in self._ending, timeout_s)

    def end(self, stream: str) -> None:
        """Nothing more comes from `stream` until it is received again: give its sinks what waits, and tell them."""
        with self._lock:
            delivery, threads = self._streams.pop(stream, (None, []))
            if delivery is None:
                return
            self._ending.append(stream)
        delivery.close()
        for thread in threads:
            thread.join(_END_S)
        with self._changed:
            self._ending.remove(stream)
            self._changed.notify_all()

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            names = list(self._streams)
        for name in names:
            self.end(name)

    def _delivery(self, stream: str) -> OutputDelivery:
        with self._lock:
            known = self._streams.get(stream)
            if known is None:
                delivery = OutputDelivery(
                    self._outputs, stream, live=self._live(stream), stop=lambda: None, fail=lambda error: None
                )
                threads = [
                    threading.Thread(target=work, name=f"saccade {name}", daemon=True) for name, work in delivery.work()
                ]
                known = self._streams[stream] = delivery, threads
                for thread in threads:
                    thread.start()
            return known[0]

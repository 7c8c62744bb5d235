"""Sink that calls a Python function for each frame, for programs that use Saccade as a library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from saccade.engine.results import Result
from saccade.sinks.base import SinkClosedError, SinkError
from saccade.sinks.record import Latency
from saccade.sources.frame import Frame


class CallbackSink:
    """Calls `function(frame, result, latency)` for each frame. Calls never overlap, even with several streams.

    If `function` raises `SinkClosedError`, the run ends normally. Any other exception ends the run with an error.

    Args:
        function: called in a thread of the pipeline. A slow function delays later results.

    Raises:
        SinkError: if `function` is not callable.
    """

    shared: ClassVar[bool] = True

    def __init__(self, function: Callable[[Frame, Result, Latency], object]) -> None:
        if not callable(function):
            raise SinkError(f"the function must be callable with (frame, result, latency); got {function!r:.100}")
        self._function = function
        self._lock = threading.Lock()
        self._closed = False

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Call the user's function with a frame and its result.

        Raises:
            SinkClosedError: after `close`, or if the function raises it.
        """
        with self._lock:
            if self._closed:
                raise SinkClosedError("the callback sink is closed")
            self._function(frame, result, latency)

    def close(self) -> None:
        """Stop calling the user's function. A second call does nothing."""
        with self._lock:
            self._closed = True

"""What every sink has in common: its face and its errors.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

from typing import Protocol

from engine.results import Result
from sinks.record import Latency
from sources.frame import Frame


class SinkError(Exception):
    """A sink cannot be opened or written. The message is one line for the user: what is wrong and what to do."""


class SinkClosedError(SinkError):
    """The one who was watching has gone: window closed, pipe closed. The run should end, but nothing went wrong."""


class Sink(Protocol):
    """Where results go. One thread writes and closes it; frames of a stream come in presentation order."""

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Take one frame, what was found on it and how long that took.

        Raises:
            SinkClosedError: if the one who was watching has gone.
            SinkError: if the result could not be delivered, such as on a full disk.
        """
        ...

    def close(self) -> None:
        """Finish what was written. A second call does nothing.

        Raises:
            SinkError: if what was written could not be finished.
        """
        ...

"""What every sink has in common: its face and its errors.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from saccade.engine.results import Result
from saccade.sinks.record import Latency
from saccade.sources.frame import Frame


class SinkError(Exception):
    """A sink cannot be opened or written. The message is one line for the user: what is wrong and what to do."""


class SinkClosedError(SinkError):
    """The one who was watching has gone: window closed, pipe closed. The run should end, but nothing went wrong."""


class Sink(Protocol):
    """Where results go. Frames of a stream come in presentation order.

    Attributes:
        shared: whether several streams may write to one such sink, each from its own thread; it is closed once, when
            all have ended. Others have one stream, and one thread that writes and closes them.
    """

    shared: ClassVar[bool]

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


@runtime_checkable
class EndsStreams(Protocol):
    """A shared sink that wants to know when one of its streams has ended while others go on."""

    def end(self, stream: str) -> None:
        """Take note that nothing more comes of `stream`, until it is written again."""
        ...

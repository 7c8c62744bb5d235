"""The interface of all sinks, and the exceptions that sinks raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol, runtime_checkable

from saccade.engine.results import Result
from saccade.sinks.record import Latency
from saccade.sources.frame import Frame
from saccade.sources.live.packets import AudioPacket


class SinkError(Exception):
    """Raised if a sink cannot be opened or written. The one-line message tells the user what is wrong and what to do.

    Attributes:
        lost: number of results that the sink had accepted and then lost.
    """

    def __init__(self, message: str = "", lost: int = 0) -> None:
        super().__init__(message)
        self.lost = lost


class SinkClosedError(SinkError):
    """Raised if the user ends the run through a sink, for example by closing the display window."""


class ReaderGoneError(SinkClosedError):
    """Raised if the program that reads a sink's output has exited, such as `head` in a pipe. This ends the sink."""


@dataclass(slots=True, frozen=True)
class SinkStats:
    """Counters of a sink that sends messages. A counter is None if the sink does not have it.

    Attributes:
        connected: whether the sink's server can be reached.
        clients: number of connected clients.
        backlog: number of messages waiting to be sent.
        backlog_age_s: age of the oldest unsent message in seconds; 0 without unsent messages.
        sent: number of messages sent so far.
        dropped: number of messages dropped so far: the receiver was offline, too slow or rejected them.
    """

    connected: bool | None = None
    clients: int | None = None
    backlog: int | None = None
    backlog_age_s: float | None = None
    sent: int | None = None
    dropped: int | None = None


@dataclass(slots=True, frozen=True)
class SourceHints:
    """Optional information about the stream that a sink will receive.

    Attributes:
        rate: frames per second; None if unknown.
        audio_from: media file whose audio video sinks copy; None for no audio. Sinks never overwrite this file.
        listen: registers a callback for the audio packets of a live source; None for other sources.
    """

    rate: Fraction | None = None
    audio_from: str | None = None
    listen: Callable[[Callable[[AudioPacket], None]], None] | None = None


class Sink(Protocol):
    """Interface of an output for analysis results. A sink receives the frames of each stream in presentation order.

    Attributes:
        shared: whether one sink serves all streams, from several threads. If False, each stream needs its own sink.
    """

    shared: ClassVar[bool]

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Write one frame with its result and latency.

        Raises:
            SinkClosedError: if the user has ended the run.
            ReaderGoneError: if the program that reads the output has exited.
            SinkError: if the result is lost, for example because the disk is full. Later calls may succeed.
        """
        ...

    def close(self) -> None:
        """Complete and close the output. A second call does nothing.

        Raises:
            SinkError: if the output could not be completed.
        """
        ...


@runtime_checkable
class SupportsStreamEnd(Protocol):
    """Interface of a sink that is notified when a stream ends."""

    def end(self, stream: str) -> None:
        """End the output of a stream. A later `write` with a frame of this stream starts it again."""
        ...


@runtime_checkable
class SupportsStats(Protocol):
    """Interface of a sink that counts its messages."""

    def stats(self) -> SinkStats:
        """Return the sink's counters. Thread-safe."""
        ...


CHANGES = ("begin", "update", "end")
"""Values of `type` in an event's record."""


@runtime_checkable
class SupportsEvents(Protocol):
    """Interface of a sink that accepts events of rules in addition to results."""

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Write a message about an event of a rule. Thread-safe; does not block.

        Args:
            event: the message as JSON values. Its keys depend on `type`:

                - `begin`, `update`, `end`: `id`, `stream` and `rule` of the event.
                - `rules`: `stream` and all its `rules`.
                - `media`: the saved file (`path`), its `kind` (`clip` or `snapshot`) and the `event` that it shows.

        Raises:
            SinkError: if the event could not be delivered.
        """
        ...

"""What every sink has in common: its interface and its errors.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol, runtime_checkable

from saccade.engine.results import Result
from saccade.sinks.record import Latency
from saccade.sources.frame import Frame


class SinkError(Exception):
    """A sink cannot be opened or written. The message is one line for the user: what is wrong and what to do.

    Attributes:
        lost: how many results are lost with it that the sink had taken before.
    """

    def __init__(self, message: str = "", lost: int = 0) -> None:
        super().__init__(message)
        self.lost = lost


class SinkClosedError(SinkError):
    """The user has ended the run through this sink, such as by closing its window. No failure."""


class ReaderGoneError(SinkClosedError):
    """The reader of this sink has gone, such as that of a pipe: the sink ends, and the run if it has no other."""


@dataclass(slots=True, frozen=True)
class SinkStats:
    """What a sink with receivers of its own has counted; None for what it does not have.

    Attributes:
        connected: whether its server can be reached.
        clients: how many clients are connected.
        backlog: messages waiting to be sent.
        backlog_age_s: age of the oldest of them, in seconds; 0 if none waits.
        sent: messages sent so far.
        dropped: messages that were never sent, because their receiver was away or slow or refused them.
    """

    connected: bool | None = None
    clients: int | None = None
    backlog: int | None = None
    backlog_age_s: float | None = None
    sent: int | None = None
    dropped: int | None = None


@dataclass(slots=True, frozen=True)
class SourceHints:
    """What a sink may know about the stream it will be written; everything is optional.

    Attributes:
        rate: frames per second; None when unknown.
        audio_from: file whose audio a video copies; it is never overwritten. None for a silent video.
    """

    rate: Fraction | None = None
    audio_from: str | None = None


class Sink(Protocol):
    """Where results go. Frames of a stream come in presentation order.

    Attributes:
        shared: whether several streams may write to one such sink, from several threads; it is closed once, when
            all have ended. Other sinks have one stream, and one thread that writes and closes them.
    """

    shared: ClassVar[bool]

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Take one frame, what was found on it and how long that took.

        Raises:
            SinkClosedError: if the user has ended the run.
            ReaderGoneError: if the reader has gone.
            SinkError: if the result could not be delivered, such as on a full disk. The sink stays usable: a later
                call tries again.
        """
        ...

    def close(self) -> None:
        """Finish what was written. A second call does nothing.

        Raises:
            SinkError: if what was written could not be finished.
        """
        ...


@runtime_checkable
class SupportsStreamEnd(Protocol):
    """A shared sink that is to be informed when one of its streams has ended while others go on."""

    def end(self, stream: str) -> None:
        """Note that nothing more comes from `stream`, until it is written again."""
        ...


@runtime_checkable
class SupportsStats(Protocol):
    """A sink that counts what becomes of its messages."""

    def stats(self) -> SinkStats:
        """The counters; may be called at any time from any thread."""
        ...


CHANGES = ("begin", "update", "end")
"""The types of the records of an event."""


@runtime_checkable
class SupportsEvents(Protocol):
    """A shared sink that takes events of rules as well, besides results."""

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Take the record of an event that begins, changes or ends; callable from any thread, and does not wait.

        Args:
            event: plain values for JSON with at least `type` (`begin`, `update` or `end`), `id`, `stream` and `rule`;
                or of the type `rules`, which says in `rules` which there are in `stream` from now on; or of the type
                `media`, which says that a file of the event `event`, its `kind` (`clip` or `snapshot`), is at `path`.

        Raises:
            SinkError: if it could not be delivered.
        """
        ...

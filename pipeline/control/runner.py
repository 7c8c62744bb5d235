"""What runs streams for a controller: `Local` in this process, `RayWorkers` on the actors of Ray. Both are a `Runner`.

The controller calls what starts, changes and ends streams; servers and terminals call the rest, and need not know which
one it is. Only what needs pixels or the engine itself is asked where `address` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from saccade.pipeline.analytics.counts import Minute, Totals
from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.control.plan import Change
from saccade.pipeline.events.machine import RuleState
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.pipeline.search import Progress, Searched
from saccade.sinks import SinkStatus


@dataclass(slots=True, frozen=True)
class Address:
    """Where a worker serves what needs pixels or the engine.

    Attributes:
        url: such as http://127.0.0.1:40123.
        headers: that it wants.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """The model that finds things.

    Attributes:
        name: of the model, or its folder.
        device: where it runs.
        classes: the names that it knows; None for any.
        skills: what it can do.
        talks: whether a model answers questions here.
    """

    name: str
    device: str
    classes: Sequence[str] | None
    skills: Sequence[str]
    talks: bool


@dataclass(slots=True, frozen=True)
class WorkerStatus:
    """A process with an engine.

    Attributes:
        name: of the worker.
        state: `starting`, `ready` or `ended`.
        reason: why it is not ready; None where that is not known.
        pid: of its process, on its machine.
        machine: that stores its events; "" for that of the controller.
        streams: that it has.
        busy: share of time in which its engine is at work, 0 to 1; None if not known yet.
        rss_bytes: its resident memory.
        starts: how often it was started.
        restarted_in_s: how long it was away each time, in seconds.
        counters: of its engine, as `Engine.counters`.
    """

    name: str
    state: str
    reason: str | None = None
    pid: int | None = None
    machine: str = ""
    streams: Sequence[str] = ()
    busy: float | None = None
    rss_bytes: int | None = None
    starts: int = 1
    restarted_in_s: Sequence[float] = ()
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Ended:
    """A stream that has ended.

    Attributes:
        name: of the stream.
        config: that it ran by.
        error: what went wrong; None if nothing did.
        stopped: whether somebody has ended it.
        status: how it was at last.
    """

    name: str
    config: ListedStream | None
    error: Exception | None
    stopped: bool
    status: StreamStatus


class StoredEvents(Protocol):
    """Stored events, of this machine or of several: an `EventStore`, or a `MachineStores`. See `EventReader`."""

    @property
    def away(self) -> Sequence[str]:
        """The names of the machines whose store does not answer."""

    def page(self, query: EventQuery, more: int = 0) -> list[tuple[dict[str, Any], float]]:
        """The records of events, newest first, each with the time at which it was stored."""

    def rules(self, stream: str | None = None) -> list[str]:
        """The names of rules that have events."""

    def get(self, event: str) -> dict[str, Any] | None:
        """The record of an event; None if there is none of that id."""

    def delete(self, event: str) -> bool:
        """Delete an event with its files; whether there was one."""

    def counts(self, stream: str, since: float) -> list[dict[str, Any]]:
        """What was counted in each minute of a stream."""

    def media(self, event: str, kind: str) -> Path | Address | None:
        """The clip or snapshot of an event, or who serves it, at `/media/{event}/{kind}`; None if there is none."""


class Runner(Protocol):
    """Runs streams. Every method is callable from any thread.

    Attributes:
        on_end: called with each stream that has ended, in any thread.
    """

    on_end: Callable[[Ended], object]

    @property
    def store(self) -> StoredEvents | None:
        """Keeps events; None where nothing does."""

    # ---- what the controller has done: errors are those of `Local`

    def prepare(self, change: Change, *, checked: bool) -> AbstractContextManager[object] | None:
        """Find out whether a change can be made; what is returned is for `follow`, or closed by leaving its block."""

    def follow(
        self, name: str, wanted: ListedStream | None, prepared: object = None, *, checked: bool = False
    ) -> StreamStatus | None:
        """Have a stream run by this configuration from now on; None ends it. Returns how it is doing."""

    def reopen(self, name: str, wanted: ListedStream, *, checked: bool) -> StreamStatus:
        """End a stream, or forget one that failed, and open it again."""

    def remove(self, name: str) -> None:
        """End a stream, or forget one that failed; raises StreamError if there is none, or it does not end."""

    def fail(self, stream: ListedStream, error: Exception) -> None:
        """List a stream as failed that could not be opened."""

    def check_rules(self, stream: ListedStream) -> None:
        """Check that a stream can have its rules; raises PlacedError."""

    def take(self, config: RunConfig) -> list[str]:
        """Have what is not of single streams run by another configuration, and its streams where that restarts them.

        Returns:
            The keys that were taken; others are when Saccade is started again.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if it cannot; all goes on as it was.
        """

    # ---- how it is doing

    @property
    def names(self) -> list[str]:
        """The streams that run, or are being opened."""

    @property
    def idle(self) -> bool:
        """Whether no stream runs, or is to be opened."""

    def stop(self, *, abandon: bool = False) -> float:
        """Have every stream finish and end; returns at once with the seconds that this may still take.

        Args:
            abandon: give up the frames that the engine has.
        """

    @property
    def closed(self) -> bool:
        """Whether everything is being closed."""

    @property
    def ready(self) -> bool:
        """Whether streams can be added."""

    @property
    def model(self) -> ModelInfo:
        """The model that finds things."""

    def statuses(self) -> list[StreamStatus]:
        """The status of every stream, also of those that failed."""

    def status(self, name: str) -> StreamStatus:
        """The status of a stream; raises StreamError if there is none of that name."""

    def workers(self) -> list[WorkerStatus]:
        """The processes with an engine."""

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """How every sink is doing, with the name of its stream, or "" if it is all streams'."""

    def lost_changes(self) -> dict[str, int]:
        """Where changes of events may be lost → how many were."""

    def rule_states(self, name: str) -> list[RuleState] | None:
        """How each rule of a stream is doing; None if it can have none. Raises StreamError. May wait."""

    def counts(self, name: str, since: float) -> tuple[Totals, list[Minute]]:
        """What was counted in a stream: in all, and in each minute from a time on. Raises StreamError. May wait."""

    def search(self, text: str, query: EventQuery, progress: Progress) -> Searched:
        """Ask a model which stored events show something; raises ConfigError or EngineError. Waits."""

    def address(self, stream: str | None) -> Address | None:
        """Who serves the video of a stream, or, for None, the engine; None for this process.

        Raises:
            StreamError: if no worker has the stream, or none is ready.
        """

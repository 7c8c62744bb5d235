"""The interface of runners: `Local` runs streams in this process, `RayWorkers` on Ray actors.

The controller starts, changes and stops streams. Servers and terminals use the other methods and do not depend on the
class. Only requests that need pixels or the engine go to `address`.
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
    """The address of a worker's server for requests that need pixels or the engine.

    Attributes:
        url: URL, such as http://127.0.0.1:40123.
        headers: required headers.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """The model for frames.

    Attributes:
        name: name of the model or its folder.
        device: device of the model.
        classes: its labels; None for any phrase.
        skills: supported skills.
        talks: whether a model answers questions.
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
        name: name of the worker.
        state: `starting`, `ready` or `ended`.
        reason: reason for not being ready; None if unknown.
        pid: process ID on its machine.
        machine: machine that stores its events; empty for the controller's machine.
        streams: its streams.
        busy: busy fraction of its engine, 0 to 1; None if unknown.
        rss_bytes: resident memory, in bytes.
        starts: number of starts.
        restarted_in_s: duration of each restart, in seconds.
        counters: counters of its engine, see `Engine.counters`.
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
        name: name of the stream.
        config: its configuration.
        error: error message, or None.
        stopped: whether it was stopped by a call.
        status: its last status.
    """

    name: str
    config: ListedStream | None
    error: Exception | None
    stopped: bool
    status: StreamStatus


class StoredEvents(Protocol):
    """Stored events of this machine or of several machines; see `EventReader`."""

    @property
    def away(self) -> Sequence[str]:
        """The names of machines whose store is unreachable."""

    def page(self, query: EventQuery, more: int = 0) -> list[tuple[dict[str, Any], float]]:
        """Return the records of matching events, newest first, each with its storage time."""

    def rules(self, stream: str | None = None) -> list[str]:
        """Return the names of rules with events."""

    def get(self, event: str) -> dict[str, Any] | None:
        """Return the record of an event; None if the ID is unknown."""

    def delete(self, event: str) -> bool:
        """Delete an event with its files; return whether it existed."""

    def counts(self, stream: str, since: float) -> list[dict[str, Any]]:
        """Return the counts of each minute of a stream."""

    def media(self, event: str, kind: str) -> Path | Address | None:
        """Return a clip or snapshot, or the address that serves it at `/media/{event}/{kind}`; None if missing."""


class Runner(Protocol):
    """Runs streams. Thread-safe.

    Attributes:
        on_end: called with each ended stream, in any thread.
    """

    on_end: Callable[[Ended], object]

    @property
    def store(self) -> StoredEvents | None:
        """The event store, or None."""

    # ---- what the controller has done: errors are those of `Local`

    def prepare(self, change: Change, *, checked: bool) -> AbstractContextManager[object] | None:
        """Check whether a change is possible; pass the result to `follow`, or leave its `with` block to discard it."""

    def follow(
        self, name: str, wanted: ListedStream | None, prepared: object = None, *, checked: bool = False
    ) -> StreamStatus | None:
        """Make a stream run by a configuration, or stop it with None; return its status."""

    def reopen(self, name: str, wanted: ListedStream, *, checked: bool) -> StreamStatus:
        """Stop a stream, or forget a failed stream, and reopen it."""

    def remove(self, name: str) -> None:
        """Stop a stream, or forget a failed stream; raises StreamError if it does not exist or does not end."""

    def fail(self, stream: ListedStream, error: Exception) -> None:
        """List a stream as failed that could not be opened."""

    def check_rules(self, stream: ListedStream) -> None:
        """Check that a stream supports its rules; raises PlacedError."""

    def take(self, config: RunConfig) -> list[str]:
        """Apply the settings of the whole run, restarting its streams if needed.

        Returns:
            The applied keys; all other keys apply after a restart of Saccade.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if this is not possible; nothing changes.
        """

    # ---- how it is doing

    @property
    def names(self) -> list[str]:
        """The names of streams that are running or being opened."""

    @property
    def idle(self) -> bool:
        """Whether no stream is running or waiting to be opened."""

    def stop(self, *, abandon: bool = False) -> float:
        """Stop every stream; returns at once with the seconds that stopping can still take.

        Args:
            abandon: drop the frames in flight.
        """

    @property
    def closed(self) -> bool:
        """Whether everything is being closed."""

    @property
    def ready(self) -> bool:
        """Whether streams can be added."""

    @property
    def model(self) -> ModelInfo:
        """The model for frames."""

    def statuses(self) -> list[StreamStatus]:
        """Return the status of every stream, including failed streams."""

    def status(self, name: str) -> StreamStatus:
        """Return the status of a stream; raises StreamError if it does not exist."""

    def workers(self) -> list[WorkerStatus]:
        """Return the status of all processes with an engine."""

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """Return the status of every sink, with the name of its stream or an empty name for a shared sink."""

    def lost_changes(self) -> dict[str, int]:
        """Return the number of dropped changes of events, by queue: `hub` and `store`."""

    def rule_states(self, name: str) -> list[RuleState] | None:
        """Return the state of each rule of a stream; None if the stream has no rules. Raises StreamError. May block."""

    def counts(self, name: str, since: float) -> tuple[Totals, list[Minute]]:
        """Return the totals of a stream, and its counts per minute since a time. Raises StreamError. May block."""

    def search(self, text: str, query: EventQuery, progress: Progress) -> Searched:
        """Search stored events with a model; raises ConfigError or EngineError. Blocks."""

    def address(self, stream: str | None) -> Address | None:
        """Return the address for a stream's video or, for None, the engine; None means this process.

        Raises:
            StreamError: if no worker has the stream, or none is ready.
        """

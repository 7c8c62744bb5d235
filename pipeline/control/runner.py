"""Defines the interface `Runner`, which runs streams. `Local` runs them in this process, `RayWorkers` on Ray actors.

Only the controller starts, changes and stops streams. Servers and terminals use only this interface. Requests that
need video frames or the engine are sent to `Runner.address`.
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
from saccade.pipeline.events.verdicts import Verdict
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.pipeline.search import Progress, Searched
from saccade.sinks import SinkStatus


@dataclass(slots=True, frozen=True)
class Address:
    """The address of a worker's HTTP server, which handles requests that need video frames or the engine.

    Attributes:
        url: URL, such as http://127.0.0.1:40123.
        headers: HTTP headers that every request must have, such as the worker's secret.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """Describes the model that processes the frames.

    Attributes:
        name: name of the model, or of its folder.
        device: device that the model runs on, such as `cpu`.
        classes: labels that the model can detect; None if it accepts any phrase.
        skills: supported skills, such as detection.
        talks: whether questions are supported, by this model or by a separate model.
    """

    name: str
    device: str
    classes: Sequence[str] | None
    skills: Sequence[str]
    talks: bool


@dataclass(slots=True, frozen=True)
class WorkerStatus:
    """The status of a worker, which is a process with an engine.

    Attributes:
        name: name of the worker.
        state: `starting`, `ready` or `ended`.
        reason: reason why the worker is not ready; None if unknown.
        pid: process ID on the worker's machine.
        machine: name of the machine that stores the worker's events; empty for the controller's machine.
        streams: names of the worker's streams.
        busy: fraction of time that the engine is busy, from 0 to 1; None if unknown.
        rss_bytes: resident memory, in bytes.
        starts: number of times that the worker was started.
        restarted_in_s: duration of each restart, in seconds.
        counters: counters of the engine, see `Engine.counters`.
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
    """Describes a stream that has ended.

    Attributes:
        name: name of the stream.
        config: configuration of the stream.
        error: the error that ended the stream, or None.
        stopped: whether the stream was stopped by a request, before the end of its source.
        status: last status of the stream.
    """

    name: str
    config: ListedStream | None
    error: Exception | None
    stopped: bool
    status: StreamStatus


class StoredEvents(Protocol):
    """The interface for reading, marking and deleting stored events of one or several machines."""

    @property
    def away(self) -> Sequence[str]:
        """The names of the machines whose event store cannot be reached."""

    def page(self, query: EventQuery, more: int = 0) -> list[tuple[dict[str, Any], float]]:
        """Return at most `query.limit` + `more` matching events, newest first, each with its storage time."""

    def rules(self, stream: str | None = None) -> list[str]:
        """Return the names of rules that have stored events."""

    def get(self, event: str) -> dict[str, Any] | None:
        """Return the record of a stored event. Return None if the event ID is unknown."""

    def delete(self, event: str) -> bool:
        """Delete an event and its media files. Return whether the event existed."""

    def judge(self, event: str, *, false_alarm: bool) -> str | None:
        """Mark an event as a false alarm, or remove the mark.

        Returns:
            The stream of the event, or None if the ID is unknown.

        Raises:
            ValueError: if the event has no bounding box.
        """

    def verdicts(self, stream: str | None = None) -> list[Verdict]:
        """Return the false alarms of a stream, or of all streams, oldest first."""

    def counts(self, stream: str, since: float) -> list[dict[str, Any]]:
        """Return the stored object counts of a stream for each minute that starts at or after the Unix time `since`."""

    def media(self, event: str, kind: str) -> Path | Address | None:
        """Return the path of an event's clip or snapshot. Return None if the file does not exist.

        If the file is on another machine, return the address of the server that serves it at `/media/{event}/{kind}`.
        """


class Runner(Protocol):
    """The interface for running streams. Implementations are thread-safe.

    Attributes:
        on_end: called with an `Ended` when a stream ends, in any thread.
    """

    on_end: Callable[[Ended], object]

    @property
    def store(self) -> StoredEvents | None:
        """The event store of the run, or None."""

    # ---- what the controller has done: errors are those of `Local`

    def prepare(self, change: Change, *, checked: bool) -> AbstractContextManager[object] | None:
        """Check and prepare a change of a stream. Return None if there is nothing to prepare.

        Pass the result to `follow` to apply the change. When its `with` block ends, an unapplied change is discarded.
        """

    def follow(
        self, name: str, wanted: ListedStream | None, prepared: object = None, *, checked: bool = False
    ) -> StreamStatus | None:
        """Open, change, reopen or stop a stream, so that it matches a configuration.

        If `wanted` is None, the stream is stopped. Return the status of the stream, or None if it was stopped.
        """

    def reopen(self, name: str, wanted: ListedStream, *, checked: bool) -> StreamStatus:
        """Stop a stream and open it again. This also opens a failed stream."""

    def remove(self, name: str) -> None:
        """Stop a running stream, or remove a failed stream from the list.

        Raises:
            StreamError: if the stream does not exist, or has not stopped before the timeout.
        """

    def fail(self, stream: ListedStream, error: Exception) -> None:
        """Add a stream that could not be opened to the list of streams, as failed."""

    def check_rules(self, stream: ListedStream) -> None:
        """Check that a stream supports its rules: the labels, questions, zones and lines in the rules.

        Raises:
            PlacedError: if a rule cannot be used for this stream.
        """

    def take(self, config: RunConfig) -> list[str]:
        """Apply changed settings of the whole run. Restart streams if needed.

        Returns:
            The keys of the settings that are now in effect. Other changed settings require a restart of Saccade.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if the settings cannot be applied. The old
                settings then remain in effect.
        """

    # ---- how it is doing

    @property
    def names(self) -> list[str]:
        """The names of streams that are running or being opened."""

    @property
    def idle(self) -> bool:
        """Whether no stream is running or waiting to be opened."""

    def stop(self, *, abandon: bool = False) -> float:
        """Request that every stream stops, without waiting. Return how long stopping can still take, in seconds.

        Args:
            abandon: drop the frames that are being processed.
        """

    @property
    def closed(self) -> bool:
        """Whether the runner has been stopped or closed."""

    @property
    def ready(self) -> bool:
        """Whether streams can be added."""

    @property
    def model(self) -> ModelInfo:
        """The model that runs on video frames."""

    def statuses(self) -> list[StreamStatus]:
        """Return the status of every stream, including failed streams."""

    def status(self, name: str) -> StreamStatus:
        """Return the status of a stream.

        Raises:
            StreamError: if the stream does not exist.
        """

    def workers(self) -> list[WorkerStatus]:
        """Return the status of all workers. A worker is a process with an engine."""

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """Return the status of every sink, with the name of its stream. The name is empty for a shared sink."""

    def lost_changes(self) -> dict[str, int]:
        """Return the number of dropped event changes, by queue: `hub` and `store`."""

    def rule_states(self, name: str) -> list[RuleState] | None:
        """Return the state of each rule of a stream. Return None if the stream has no rules. The call can block.

        Raises:
            StreamError: if the stream is not running.
        """

    def counts(self, name: str, since: float) -> tuple[Totals, list[Minute]]:
        """Return the total object counts of a stream, and its counts for each minute after the Unix time `since`.

        The call can block.

        Raises:
            StreamError: if the stream is not running or has no zones.
        """

    def search(self, text: str, query: EventQuery, progress: Progress) -> Searched:
        """Search stored events by a text. The model scores their snapshots. The call blocks until the search ends.

        Raises:
            ConfigError, EngineError: if no events are stored, or the model does not support search.
        """

    def judge(self, event: str, *, false_alarm: bool) -> str | None:
        """Mark an event as a false alarm, or remove the mark. The call can block.

        Returns:
            The stream of the event, or None if the event ID is unknown.

        Raises:
            ValueError: if the event has no bounding box.
            StoreError: if the store cannot be used.
            StreamError: if the mark was stored, but the stream did not respond before the timeout.
        """

    def held_back(self, stream: str) -> dict[str, int]:
        """Return the number of detections that each false alarm of a stream has suppressed. The keys are event IDs.

        The call can block. The result is empty if the stream is not running.
        """

    def address(self, stream: str | None) -> Address | None:
        """Return the address of the worker that runs a stream, or of any ready worker if `stream` is None.

        Returns:
            The address, or None if this process handles requests itself.

        Raises:
            StreamError: if no worker runs the stream, or no worker is ready.
        """

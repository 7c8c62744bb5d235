"""Defines the messages between the controller and its workers, which are arguments and results of Ray actor calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from saccade.engine.errors import EngineError
from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig
from saccade.pipeline.control.runner import ModelInfo
from saccade.pipeline.control.source_policy import NotAllowedError
from saccade.pipeline.errors import AwayError, ConfigError, NotKeptError, StreamError, one_line
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.pipeline.runtime.targets import Target, targets_of
from saccade.pipeline.settings import PlacedError
from saccade.sinks import SinkError, SinkStatus
from saccade.sources import SourceError

T = TypeVar("T")

_KINDS = (NotKeptError, NotAllowedError, AwayError, StreamError, ConfigError, SourceError, EngineError, SinkError)


@dataclass(slots=True, frozen=True)
class WorkerSettings:
    """The settings of a worker, without its streams.

    Attributes:
        values: values of a `RunConfig`, without streams, servers and shared outputs.
        index: index of the worker, from 0. It selects a GPU if the configuration names none.
        threads: number of CPU threads of the engine; 0 if OMP_NUM_THREADS sets the number.
        results: whether the worker sends results for shared outputs.
        media: folder of clips and snapshots on the controller's machine, or None.
        keep_s, max_bytes: retention time in seconds and size limit in bytes of an event store on another machine, see
            `EventStore`.
        store: folder of the event store on another machine; None if no events are stored.
        node: Ray's node ID of the controller. The controller stores the events of workers on its own machine.
        folder: base folder of relative paths.
        cluster: whether the worker can be on another machine.
        open_by_default: see `SourcePolicy`.
    """

    values: Mapping[str, Any]
    index: int = 0
    threads: int = 0
    results: bool = False
    media: str | None = None
    keep_s: float | None = None
    max_bytes: int | None = None
    store: str | None = None
    node: str = ""
    folder: str = "."
    cluster: bool = False
    open_by_default: bool = True


@dataclass(slots=True, frozen=True)
class Ready:
    """Message of a worker that has loaded its engine and accepts streams.

    Attributes:
        url: URL of the worker's HTTP server.
        secret: token that every request to the server must contain.
        pid: process ID of the worker.
        model: model of the worker's engine.
        streams: streams that a previous controller started and that still run, by name.
        machine, node: name and Ray's node ID of the machine that stores the worker's events; empty for the
            controller's machine.
    """

    url: str
    secret: str = field(repr=False)
    pid: int
    model: ModelInfo
    streams: Mapping[str, ListedStream] = field(default_factory=dict)
    machine: str = ""
    node: str = ""


@dataclass(slots=True, frozen=True)
class Report:
    """Reports the state of a worker and its streams.

    Attributes:
        statuses: status of each stream of the worker.
        seen: capture time of the newest frame of each open event, by stream name and event ID.
        sinks: status of each sink that belongs to one stream.
        busy, rss_bytes, counters: see `WorkerStatus`.
        dropped: number of dropped event changes.
    """

    statuses: Sequence[StreamStatus] = ()
    seen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sinks: Sequence[tuple[str, SinkStatus]] = ()
    busy: float = 0.0
    rss_bytes: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


@dataclass(slots=True, frozen=True)
class ChangeRequest:
    """A viewer's request to change a stream, which a worker forwards to the controller."""

    number: int
    stream: str
    values: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Batch:
    """Messages and results that a worker sends to the controller, oldest first.

    Attributes:
        messages: pairs (message type, value). The types are `event`, `ended`, `closed`, `report`, `wish`, `warning` and
            `end`. `end` is the last message of the worker.
        results: pickled results for shared outputs.
    """

    messages: list[tuple[str, Any]]
    results: list[bytes]


def told(call: Callable[[], T]) -> T | Exception:
    """Call a function and return its result. An error with a message for the user is returned, not raised."""
    try:
        return call()
    except PlacedError as error:
        return error
    except _KINDS as error:
        kind = next(kind for kind in type(error).__mro__ if kind in _KINDS)
        refused: Exception = kind(one_line(str(error)))
        return refused


def taken(answer: T | Exception) -> T:
    """Return the answer of a remote call. If the answer is an exception, raise the exception."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def worker_values(config: RunConfig) -> dict[str, Any]:
    """Return the configuration values that a worker needs. Streams and controller settings are excluded."""
    ours = {*StreamConfig.model_fields, "streams", "workers", "store", "out", "jsonl", "display", "state"}
    ours |= {key for key in RunConfig.model_fields if key.startswith(("http", "ray", "store"))}
    values = config.model_dump(mode="json", exclude_unset=True, exclude=ours)
    targets = targets_of(config)
    own = [target for target in targets if target.each or (is_video(target) and len(config.named()) == 1)]
    return values | {"http": "127.0.0.1:0", "sinks": [target.text for target in own]}


def is_video(target: Target) -> bool:
    """Return whether an output is an MP4 file."""
    return target.path is not None and target.path.suffix.lower() in (".mp4", ".m4v")

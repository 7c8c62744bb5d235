"""The messages between a worker and its controller, exchanged by calls of the worker's actor."""

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
        index: index of the worker, from 0; selects its GPU if the device is not fixed.
        threads: threads of its engine on a CPU; 0 for the default.
        results: whether shared outputs need the results.
        media: folder of clips and snapshots on the controller's machine, or None.
        keep_s, max_bytes: see `EventStore`; for the store of another machine.
        store: folder of that store; None if no events are stored.
        node: Ray's node ID of the controller, which stores the events of its machine.
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
    """A worker has loaded its engine and accepts streams.

    Attributes:
        url: URL of its HTTP server.
        secret: secret of its HTTP server.
        pid: process ID.
        model: model of its engine.
        streams: streams that already run, from a previous controller.
        machine, node: machine name and Ray's node ID of the store of its events; empty for the controller's machine.
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
    """The state of a worker.

    Attributes:
        statuses: status of its streams.
        seen: by stream, the time at which each open event was last seen, by ID.
        sinks: status of its streams' own sinks.
        busy, rss_bytes, counters: see `WorkerStatus`.
        dropped: number of dropped changes of events.
    """

    statuses: Sequence[StreamStatus] = ()
    seen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sinks: Sequence[tuple[str, SinkStatus]] = ()
    busy: float = 0.0
    rss_bytes: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


@dataclass(slots=True, frozen=True)
class Wish:
    """A viewer's request to change a stream, sent through a worker; the answer goes to `Worker.answer`."""

    number: int
    stream: str
    values: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Batch:
    """Messages and results of a worker, in order.

    Attributes:
        messages: (`event`, record), (`ended`, Ended), (`closed`, stream name), (`report`, Report), (`wish`, Wish),
            (`warning`, line), and last (`end`, None).
        results: pickled results for shared outputs.
    """

    messages: list[tuple[str, Any]]
    results: list[bytes]


def told(call: Callable[[], T]) -> T | Exception:
    """Call a function and return its result, or an error with a message for the user.

    An error is converted to the nearest class that can be made from its message alone, for the transfer to another
    process.
    """
    try:
        return call()
    except PlacedError as error:
        return error
    except _KINDS as error:
        kind = next(kind for kind in type(error).__mro__ if kind in _KINDS)
        refused: Exception = kind(one_line(str(error)))
        return refused


def taken(answer: T | Exception) -> T:
    """Return the result of a call; if the call was refused, raise its error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def worker_values(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration for a worker, without streams and without settings of the controller."""
    ours = {*StreamConfig.model_fields, "streams", "workers", "store", "out", "jsonl", "display", "state"}
    ours |= {key for key in RunConfig.model_fields if key.startswith(("http", "ray", "store"))}
    values = config.model_dump(mode="json", exclude_unset=True, exclude=ours)
    targets = targets_of(config)
    own = [target for target in targets if target.each or (is_video(target) and len(config.named()) == 1)]
    return values | {"http": "127.0.0.1:0", "sinks": [target.text for target in own]}


def is_video(target: Target) -> bool:
    """Return whether an output is a video file, which supports one stream only."""
    return target.path is not None and target.path.suffix.lower() in (".mp4", ".m4v")

"""What a worker and its controller say to each other by calls of the worker's actor: values, and errors."""

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
    """What a worker runs by, besides its streams.

    Attributes:
        values: of a `RunConfig`, without streams, servers and outputs that all streams share.
        index: of the worker, from 0: which GPU it takes where that is left open.
        threads: of its engine on a CPU; 0 for those of the machine.
        results: whether what is found is wanted by outputs that all streams share.
        media: folder of the files of events on the controller's machine; None for none.
        keep_s, max_bytes: as in `EventStore`, for the store of another machine.
        store: folder of that store; None where no events are kept.
        node: the controller's, by Ray's id: it keeps the events of that machine.
        folder: that relative paths begin in.
        cluster: whether the worker may be on another machine.
        open_by_default: as in `SourcePolicy`.
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
    """A worker has loaded its engine, and takes streams.

    Attributes:
        url: of its HTTP server.
        secret: that it wants there.
        pid: of its process.
        model: its engine's.
        streams: those that it runs already, where another controller was here before.
        machine, node: where its events are stored, by the machine's name and Ray's id; "" for the controller's machine.
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
    """How a worker is doing.

    Attributes:
        statuses: of its streams.
        seen: by stream: when each event that goes on was seen last, by its id.
        sinks: of its streams' own.
        busy, rss_bytes, counters: as in `WorkerStatus`.
        dropped: changes of events that were lost in it.
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
    """A viewer asks for other values of a stream, by the worker's video; the answer goes to `Worker.answer`."""

    number: int
    stream: str
    values: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Batch:
    """What a worker has to say, in order.

    Attributes:
        messages: (`event`, record), (`ended`, Ended), (`closed`, name of a stream), (`report`, Report), (`wish`, Wish),
            (`warning`, line), and at last (`end`, None).
        results: of frames, pickled, for outputs that all streams share.
    """

    messages: list[tuple[str, Any]]
    results: list[bytes]


def told(call: Callable[[], T]) -> T | Exception:
    """What a call returns, or the error that it raised, if it has a line for the user.

    An error crosses to another process as the nearest class that is made of its line alone.
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
    """What was returned; raises what was raised."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def worker_values(config: RunConfig) -> dict[str, Any]:
    """What a worker is to know of a configuration: streams come one by one, and what belongs to the machine is here."""
    ours = {*StreamConfig.model_fields, "streams", "workers", "store", "out", "jsonl", "display", "state"}
    ours |= {key for key in RunConfig.model_fields if key.startswith(("http", "ray", "store"))}
    values = config.model_dump(mode="json", exclude_unset=True, exclude=ours)
    targets = targets_of(config)
    own = [target for target in targets if target.each or (is_video(target) and len(config.named()) == 1)]
    return values | {"http": "127.0.0.1:0", "sinks": [target.text for target in own]}


def is_video(target: Target) -> bool:
    """Whether an output is a video file, which takes one stream."""
    return target.path is not None and target.path.suffix.lower() in (".mp4", ".m4v")

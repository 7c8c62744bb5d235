"""What a supervisor and its workers tell each other: plain values for JSON, and the interface of a worker.

A worker is an actor with an engine of its own; frames stay in its process. The supervisor holds the desired state, and
decides by `placement` which worker has which stream. Knows no transport, no engine and no HTTP.

    supervisor → worker    {"do": "open", "stream": NAME, "key": N, "config": {…}, "checked": …, "events": […], …}
                           {"do": "close", "stream": NAME, "key": N, "moves": …}
                           {"do": "report"}                       a report at once
                           {"do": "stop"}                         it closes every stream, and ends
    worker → supervisor    {"is": "ready", "url": …, "pid": …, …}    its HTTP API, and its process
                           {"is": "failed", "error": …}           instead: it cannot begin
                           {"is": "report", …}                    `WorkerReport`, once a second
                           {"is": "opened", "stream": NAME, "key": N, "live": …}
                           {"is": "refused", "stream": NAME, "key": N, "kind": …, "error": …}
                           {"is": "closed", "stream": NAME, "key": N, "error": …}
                           {"is": "gone", "stream": NAME, "key": N, "error": …, "frames": …}   it has ended by itself
                           {"is": "event", "record": {…}}         of a rule, a track, a minute or a file of an event
                           {"is": "warning", "line": …}
                           {"is": "ended", "reason": …}           added by the transport: nothing more will come

The values of `config` are those of a `ListedStream`. `checked` is as in `StreamState`; `again` is true where the
stream ran before: its files are not replaced; both may be left out. `key` is that of an opening: an answer has that of
its command. A worker on a machine that stores its events has `machine`, its name, and `store`, the address of that, in
`ready`. `events` are the records of those that went on where the stream ran last, and are to go on here, or to end;
`moves` is true where the stream will be opened again, so that its events do not end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

Message = dict[str, Any]
"""One of the above."""

WorkerState = Literal["starting", "ready", "ended"]


@dataclass(slots=True, frozen=True)
class StreamReport:
    """How a stream is doing in its worker.

    Attributes:
        name: of the stream.
        state: as in `StreamStatus`: `connecting`, `live`, `running`, `stuck`, `ended`, `failed`, …
        reason: why it is unhealthy, in half a line; None when it is healthy.
        live: whether its source is.
        frames: results so far, since the worker has opened it.
        fps: results a second in the last seconds.
        cost: share of the worker's time that it took in the last second, or would have taken without the frames that
            were lost for want of time; None before the first.
        settings: its configuration as it is now, where that has changed since the last report.
        events: when each event that goes on was seen last, by its id.
    """

    name: str
    state: str
    reason: str | None = None
    live: bool = True
    frames: int = 0
    fps: float = 0.0
    cost: float | None = None
    settings: Mapping[str, Any] | None = None
    events: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class WorkerReport:
    """How a worker is doing.

    Attributes:
        busy: share of the last second in which its engine, of the CPU or of a GPU, was at work, from 0 to 1.
        rss_bytes: its resident memory.
        streams: those it has.
    """

    busy: float
    rss_bytes: int
    streams: tuple[StreamReport, ...] = ()

    def to_message(self) -> Message:
        """As a message."""
        return {"is": "report", **asdict(self)}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> Self:
        """Read a message; raises KeyError or TypeError if it is another."""
        streams = tuple(StreamReport(**stream) for stream in message["streams"])
        return cls(message["busy"], message["rss_bytes"], streams)


class Worker(Protocol):
    """A worker as the supervisor sees it: an actor.

    What comes from it is handed, one message at a time, to the function that it was made with; the last one is
    {"is": "ended", "reason": …}, after which it does nothing more. Methods return at once, are callable from any
    thread, and do nothing once it has ended.

    Attributes:
        name: unique among the workers; stays that of its place when another process takes that.
        state: see `WorkerState`.
    """

    @property
    def name(self) -> str:
        """See above."""
        ...

    @property
    def state(self) -> WorkerState:
        """See above."""
        ...

    def start(self) -> None:
        """Begin to start it; `ready` comes when it takes streams."""
        ...

    def send(self, command: Message) -> None:
        """Send it a command; its answer comes as a message."""
        ...

    def stop(self) -> None:
        """Have it close every stream and file, and end."""
        ...

    def kill(self) -> None:
        """End it without that, since it does not answer."""
        ...


class MakeWorker(Protocol):
    """Makes the process, or actor, for a seat."""

    def __call__(self, name: str, on_message: Callable[[Worker, Message], None]) -> Worker:
        """It is not started yet."""
        ...

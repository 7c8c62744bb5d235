"""Defines `Output`: a sink of a run, with its settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.errors import StreamError
from saccade.pipeline.runtime.shared_threads import SharedThreads
from saccade.sinks import Sink, SinkGuard


@dataclass(slots=True, frozen=True)
class Output:
    """A sink of a run, with its settings.

    Attributes:
        sink: the sink.
        outbox: what to do if the sink is slower than the stream. By default, a live stream keeps only the newest 8
            results, and a file waits for the sink.
        shared: whether other runs also use the sink. A run does not close a shared sink, but calls its method
            `end(stream)`, if there is one.
        viewing: whether the sink only shows results to viewers. Results that this sink drops are not counted.
        name: name for logs and metrics, without secrets; default: the class of the sink.
        guard: writes to the sink, and pauses it while writing fails.
        threads: threads that write to the sink: one thread, or several if all streams share the sink.
    """

    sink: Sink
    outbox: QueuePolicy | None = None
    shared: bool = False
    viewing: bool = False
    name: str = ""
    guard: SinkGuard = field(init=False)
    threads: SharedThreads = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or type(self.sink).__name__)
        object.__setattr__(self, "guard", SinkGuard(self.sink, self.name))
        name = f"saccade {type(self.sink).__name__}"
        object.__setattr__(self, "threads", SharedThreads(name) if self.shared else SharedThreads(name, 1))


def close_sinks(outputs: Sequence[Output], timeout_s: float) -> list[Exception]:
    """Close sinks in parallel, so that a hanging sink does not delay other sinks. Return the errors."""
    errors: list[Exception] = []

    def close(output: Output) -> None:
        try:
            output.sink.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=close, args=(output,), name="saccade close", daemon=True) for output in outputs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread, output in zip(threads, outputs, strict=True):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            errors.append(StreamError(f"{type(output.sink).__name__} did not close within {timeout_s:g} s"))
    return errors

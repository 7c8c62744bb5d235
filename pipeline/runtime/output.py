"""A sink as a run uses it: guarded, with the policy for results that come faster than it takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.errors import StreamError
from saccade.sinks import Sink, SinkGuard


@dataclass(slots=True, frozen=True)
class Output:
    """A sink, and the policy for results that come faster than it takes them.

    Attributes:
        sink: where they go.
        outbox: None to keep the newest 8 of a live source, which cannot be held back, and to wait with a file.
        shared: other runs write to the sink too. This one then only calls its `end(stream)`, if it has one, when the
            stream ends, and leaves closing it to its owner.
        viewing: it only shows what comes to those who watch at the moment; what it does not take is no loss.
        name: for logs and metrics, free of secrets; by default that of the sink's class.
        guard: writes to the sink, and pauses it while that fails.
    """

    sink: Sink
    outbox: QueuePolicy | None = None
    shared: bool = False
    viewing: bool = False
    name: str = ""
    guard: SinkGuard = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or type(self.sink).__name__)
        object.__setattr__(self, "guard", SinkGuard(self.sink, self.name))


def close_sinks(outputs: Sequence[Output], timeout_s: float) -> list[Exception]:
    """Close sinks side by side, so that one that hangs keeps none of the others open; returns what went wrong."""
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
            errors.append(StreamError(f"{type(output.sink).__name__} is not closed after {timeout_s:g} s"))
    return errors

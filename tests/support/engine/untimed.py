"""What an `executor.Executor` has beside steps, for executors whose own time is not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from saccade.engine.runtime.streams import Stream


class Untimed:
    """No streams of a device, no measurements, and nothing to close."""

    streams: ClassVar[Mapping[str, Stream]] = {}
    n_graphs: ClassVar[int] = 0

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        return False

    def wait(self, slot: int, step: Any) -> None: ...

    def close(self) -> None:
        pass

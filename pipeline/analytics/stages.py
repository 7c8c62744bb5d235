"""The interfaces of stages and gates. `STAGES` and `GATES` contain the classes that a configuration can name.

    STAGES["count"] = CountStage      # `stages: [count]` in a configuration, `--stage count` on the command line

Each stream has its own stage and gate objects, so the objects can store state between frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:  # the names of stages are read with a configuration, before numpy or FFmpeg is needed
    from saccade.engine.results import Result
    from saccade.sources import Frame

T = TypeVar("T")


class Stage(Protocol):
    """Changes or extends the result of each frame before the sinks receive it."""

    def process(self, frame: Frame, result: Result) -> Result:
        """Return the result of a frame for the next stage or the sinks.

        If this method raises an exception, the frame counts as failed. This method is called in one thread, for each
        processed frame in order. `frame.dropped_before` is the number of frames that were dropped since the previous
        call.
        """


@runtime_checkable
class ClosableStage(Stage, Protocol):
    """A stage that holds resources, such as a file, and must release them."""

    def close(self) -> None:
        """Release the resources of the stage. This method is called once, even if the stream was never started."""


@runtime_checkable
class KeepingStage(Stage, Protocol):
    """A stage that reports how many items it stores in memory."""

    @property
    def kept(self) -> dict[str, int]:
        """The number of stored items, by type of item, such as {"tracks": 12}. Thread-safe."""


def find_stage(stages: Iterable[object], kind: type[T]) -> T | None:
    """Return the first stage that is an instance of a class, or None."""
    return next((stage for stage in stages if isinstance(stage, kind)), None)


class Gate(Protocol):
    """A gate, which decides for each frame whether the engine processes the frame or drops it."""

    def admit(self, frame: Frame) -> bool:
        """Return whether the engine should process a frame. Otherwise the frame counts as dropped.

        This method is called in one thread, for each frame in order.
        """


def _track() -> Stage:
    from saccade.pipeline.analytics.track import TrackStage

    return TrackStage()


STAGES: dict[str, Callable[[], Stage]] = {"track": _track}
"""Maps a name in a configuration to a function that makes the stage for one stream."""


def _motion() -> Gate:
    from saccade.pipeline.analytics.motion import MotionGate

    return MotionGate()


def _camera() -> Gate:
    from saccade.pipeline.analytics.motion import CameraGate

    return CameraGate()


GATES: dict[str, Callable[[], Gate]] = {"motion": _motion, "camera": _camera}
"""Maps a name in a configuration to a function that makes the gate for one stream."""


def check_names(names: list[str], table: dict[str, Callable[[], Stage]] | dict[str, Callable[[], Gate]]) -> list[str]:
    """Check that every name is registered as a stage or gate. Return the names unchanged.

    Raises:
        ValueError: if a name is unknown.
    """
    if unknown := next((name for name in names if name not in table), None):
        raise ValueError(f"unknown stage or gate '{unknown}'; available: {', '.join(sorted(table)) or 'none'}")
    return names

"""Stages and gates: the Protocols, and the tables of those that a configuration can name.

    STAGES["count"] = CountStage          # `stages: [count]` in a configuration, `--stage count` on the command line

Each stream has instances of its own, so a stage may keep state from frame to frame. Knows frames and results only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # the names of stages are read with a configuration, before numpy or FFmpeg is needed
    from saccade.engine.results import Result
    from saccade.sources import Frame


class Stage(Protocol):
    """Changes or adds to the result of each frame before the sinks get it."""

    def process(self, frame: Frame, result: Result) -> Result:
        """The result that the next stage, or the sinks, get for `frame`.

        Called for every frame of the stream that the engine answered, in the stream's order, in one thread; frames
        that were lost in between are counted in `frame.dropped_before`. Whatever it raises fails this frame alone, as
        an error of the engine does.
        """


@runtime_checkable
class ClosableStage(Stage, Protocol):
    """A stage that holds something to be given back."""

    def close(self) -> None:
        """Called once, after the last `process` of the stream, or if the stream never began."""


@runtime_checkable
class KeepingStage(Stage, Protocol):
    """A stage that keeps something from frame to frame, which has a bound."""

    @property
    def kept(self) -> dict[str, int]:
        """How much of what it keeps now, such as `tracks`. Read from any thread."""


class Gate(Protocol):
    """Chooses which frames the engine sees; the others have no record."""

    def admit(self, frame: Frame) -> bool:
        """Whether the engine shall see `frame`.

        Called in one thread, in the stream's order, for each frame that is about to be given to the engine. A frame
        that is not admitted is counted under the cause `gate`, and in `dropped_before` of the next one admitted.
        """


def _track() -> Stage:
    from saccade.pipeline.analytics.track import TrackStage

    return TrackStage()


STAGES: dict[str, Callable[[], Stage]] = {"track": _track}
"""Name in a configuration → what makes the stage for one stream."""


def _motion() -> Gate:
    from saccade.pipeline.analytics.motion import MotionGate

    return MotionGate()


GATES: dict[str, Callable[[], Gate]] = {"motion": _motion}
"""Name in a configuration → what makes the gate for one stream."""


def check_names(names: list[str], table: dict[str, Callable[[], Stage]] | dict[str, Callable[[], Gate]]) -> list[str]:
    """Return `names`.

    Raises:
        ValueError: if one of them is not in the table, in half a line for the user.
    """
    if unknown := next((name for name in names if name not in table), None):
        raise ValueError(f"there is no '{unknown}'; known: {', '.join(sorted(table)) or 'none'}")
    return names

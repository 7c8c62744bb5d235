"""The frames of a live source that is open before they are wanted: dropped until they are iterated.

So the next frame is there at once when another lets go of the camera, instead of after a connection and a key frame.
Knows no runs and no workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from saccade.pipeline.runtime.stats import Captured, captured
from saccade.sources import Frame, Source
from saccade.sources.live.decoder import decode_behind_the_model

_CLOCK_S = 2.0  # beyond which a frame that seems to be older comes from a clock that was set


class HeldFrames:
    """Begins to iterate a source at once; is iterated itself once at most.

    Attributes:
        after: the last frame that another has had, which does not come again.

    Args:
        source: a live one. To close it ends this.
        on_frame: called once, in another thread, when frames come.
        on_end: called instead if they never do, with the error if there is one.
    """

    def __init__(
        self, source: Source, on_frame: Callable[[], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        self.after: Captured | None = None
        self._frames = iter(source)
        self._on_frame, self._on_end = on_frame, on_end
        self._wanted = threading.Event()
        self._first: list[Frame] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._drop, name="saccade held", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames that come from now on; raises what the source does."""
        self._wanted.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._first:
            yield self._first.pop()
            yield from self._frames

    def _drop(self) -> None:
        came = False
        last: float | None = None
        interval = 0.0  # smoothed: frames may arrive in bursts
        try:
            decode_behind_the_model()
            for frame in self._frames:
                passed = 0.0 if last is None else frame.captured_at - last
                interval, last = (interval + (passed - interval) / 4 if interval else passed), frame.captured_at
                if self._wanted.is_set() and is_newer(frame, self.after, interval):
                    self._first.append(frame)
                    break
                if not came:
                    came = True
                    self._on_frame()
        except Exception as error:
            self._error = error
        if not came and not self._first:
            self._on_end(self._error)


def is_newer(frame: Frame, after: Captured | None, interval_s: float) -> bool:
    """Whether a frame is another than the last one that was had, and a later one.

    Two connections get one frame at times that differ by the network alone: less than half a frame's interval.

    Args:
        frame: of a live source.
        after: when that one was captured; None if it is not known.
        interval_s: between two frames.
    """
    if after is None:
        return True
    now = captured(frame)
    # One connection may know the camera's clock before the other does.
    ahead_s = after[0] - now[0] if after[1] == now[1] else after[2] - now[2]
    return not -min(0.5, max(0.0, interval_s / 2)) < ahead_s < _CLOCK_S

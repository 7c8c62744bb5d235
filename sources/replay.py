"""A file as if it were a camera: over and over, at its own pace. Knows nothing of models, results or sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from saccade.sources.base import Source
from saccade.sources.frame import Frame

_RATE = 25  # frames a second, where the file gives none


class ReplaySource(Source):
    """A live source of the frames of one that ends.

    Timestamps go on from one round to the next; each frame is captured at the moment when it is due. Damaged packets
    are counted when their round is over.

    Args:
        open_again: opens the source for another round.

    Raises:
        SourceError: if it cannot be opened.
    """

    def __init__(self, open_again: Callable[[], Source]) -> None:
        self._open = open_again
        with open_again() as first:
            super().__init__(first.name)
            self._info = replace(first.info, live=True, frames=None, duration_s=None, audio=False)

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames, each when it is due.

        Raises:
            SourceError: if the file has gone.
        """
        number, shift, begun = 0, 0, time.monotonic()
        # How long the last frame of a round is shown: as long as the one before it, if there is one.
        step = max(1, round(1 / ((self._info.average_rate or _RATE) * self._info.time_base)))
        while not self._closed.is_set():
            first: int | None = None
            last = shift
            with self._open() as source:
                for frame in source:
                    first = frame.pts if first is None else first
                    pts = frame.pts - first + shift
                    if pts > last:
                        step, last = pts - last, pts
                    if self._closed.wait(max(0.0, begun + float(pts * frame.time_base) - time.monotonic())):
                        return
                    now = time.monotonic()
                    yield replace(
                        frame, index=number, pts=pts, captured_at=time.time(), capture_clock="arrival", decoded_at=now
                    )
                    number += 1
                self._corrupt += source.corrupt_packets
            if first is None:
                return
            shift = last + step

"""A file as if it were a camera: at its own pace, once or over and over. Knows nothing of models, results or sinks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from saccade.sources.base import Source
from saccade.sources.frame import Frame

_RATE = 25  # frames a second, where the file gives none


class ReplaySource(Source):
    """A live source of the frames of a file.

    Timestamps go on from one round to the next; each frame is captured at the moment when it is due. Damaged packets
    are counted when their round is over.

    Args:
        source: is iterated, and closed with this one.
        loop: iterate it again and again; otherwise this ends with it.
    """

    def __init__(self, source: Source, *, loop: bool = True) -> None:
        super().__init__(source.name)
        self._loop = loop
        self._source = source
        self._info = replace(source.info, live=True, frames=None, duration_s=None, audio=False)

    @property
    def decoder(self) -> str:
        """That of the file's."""
        return self._source.decoder

    def close(self) -> None:
        """As in `Source`."""
        super().close()
        self._source.close()

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames, each when it is due.

        Raises:
            SourceError: if the file has gone.
        """
        self._source.gpu = self.gpu
        number, shift, begun = 0, 0, time.monotonic()
        # How long the last frame of a round is shown: as long as the one before it, if there is one.
        base = self._info.time_base
        step = max(1, round(1 / ((self._info.average_rate or _RATE) * base)))
        while not self._closed.is_set():
            first: int | None = None
            last = shift
            for frame in self._source:
                first = frame.pts if first is None else first
                pts = frame.pts - first + shift
                if pts > last:
                    step, last = pts - last, pts
                if self._closed.wait(max(0.0, begun + pts * base.numerator / base.denominator - time.monotonic())):
                    return
                now = time.monotonic()
                yield frame.changed(
                    index=number, pts=pts, captured_at=time.time(), capture_clock="arrival", decoded_at=now
                )
                number += 1
            self._corrupt += self._source.corrupt_packets
            if first is None or not self._loop:
                return
            shift = last + step

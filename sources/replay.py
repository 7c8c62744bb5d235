"""Plays a video file like a camera: in real time, once or in a loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from saccade.sources.base import Source
from saccade.sources.frame import Frame

_RATE = 25  # frames per second, if the file states none


class ReplaySource(Source):
    """A live source that plays the frames of a file in real time. In a loop, timestamps continue to increase.

    Args:
        source: the file source; closed together with this source.
        loop: whether to repeat the file; otherwise the source ends with the file.
    """

    def __init__(self, source: Source, *, loop: bool = True) -> None:
        super().__init__(source.name)
        self._loop = loop
        self._source = source
        self._info = replace(source.info, live=True, frames=None, duration_s=None, audio=False)

    @property
    def decoder(self) -> str:
        """Name of the file's decoder, such as "h264"."""
        return self._source.decoder

    def close(self) -> None:
        """Stop playing and close the file source."""
        super().close()
        self._source.close()

    def __iter__(self) -> Iterator[Frame]:
        """Yield each frame at its presentation time, in real time.

        Raises:
            SourceError: if the file no longer exists.
        """
        self._source.gpu = self.gpu
        number, shift, begun = 0, 0, time.monotonic()
        # The last frame of a round is shown as long as the frame before it, if there is one.
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

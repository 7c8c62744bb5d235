"""A live source: frames for as long as anybody wants them, through every loss of the connection.

Joins a connection of any protocol (`connection`) with the states (`reconnect`). Knows nothing of results or sinks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import av.error
from av.video.reformatter import VideoReformatter

from saccade.sources.base import Source, SourceInfo
from saccade.sources.errors import LiveError, Reason, StreamEndedError
from saccade.sources.frame import Frame, RgbImage
from saccade.sources.live.connection import LiveConnection, LiveFrame
from saccade.sources.live.decoder import LIVE_BASE
from saccade.sources.live.reconnect import Link, LinkStatus
from saccade.sources.rgb import upright_rgb
from saccade.sources.urls import redact

log = logging.getLogger(__name__)

Opener = Callable[[threading.Event], LiveConnection]
"""Connects, within seconds or until the event is set; raises `LiveError` where it cannot."""

_LOOK_S = 0.25  # how often the clock is looked at while nothing comes
_CLOCK_JUMP_S = 60.0  # HLS comes a segment at a time, which is 10 s or so; more is a clock that was set


class LiveClock:
    """Places the frames of all connections on one clock of integers that grows strictly.

    Within a connection the sender's intervals are kept exactly. Where its clock begins again or jumps, the time that
    passed here takes the place of the interval.
    """

    __slots__ = ("_at", "_offset", "_pts", "_timestamp")

    def __init__(self) -> None:
        self._pts = -1
        self._offset = 0
        self._timestamp: int | None = None
        self._at: float | None = None

    def restart(self) -> None:
        """What follows comes from a sender whose clock may have nothing to do with the last one's."""
        self._timestamp = None

    def place(self, timestamp: int | None, at: float) -> int:
        """The pts of a frame, in units of 1/90000 s, from 0.

        Args:
            timestamp: the sender's, in the same units; None if it gives none.
            at: when it came, in seconds on a growing clock.
        """
        passed = round((at - self._at) / LIVE_BASE) if self._at is not None else 0
        last, self._at = self._timestamp, at
        self._timestamp = timestamp
        if timestamp is None:
            self._pts = max(self._pts + 1, self._pts + passed)
            return self._pts
        if last is None or not -1 <= (timestamp - last) * LIVE_BASE <= passed * LIVE_BASE + _CLOCK_JUMP_S:
            self._offset = self._pts + max(1, passed) - timestamp
        self._pts = max(self._pts + 1, timestamp + self._offset)
        return self._pts


class LiveSource(Source):
    """A camera or another live stream as a source. Iterating never ends by itself, unless the stream has an end.

    A source that cannot be reached is tried again for ever (`Link`); `status` tells how it is doing. Timestamps are
    integers in units of 1/90000 s that grow strictly, over reconnects as well. Only whole frames are handed on. Codec
    and size in `info` are the newest frame's, "" and 0 before the first.

    Args:
        url: what the user typed; only ever shown without its credentials.
        opener: makes a connection.
        stream: name of the stream.
        vid_stride: hand on every `vid_stride`-th frame; the others are decoded, but not converted.
        retry: False to raise `LiveError` at the first failure instead of trying again.

    Raises:
        SourceError: if `vid_stride` is less than 1.
    """

    def __init__(
        self,
        url: str,
        opener: Opener,
        *,
        stream: str,
        vid_stride: int = 1,
        retry: bool = True,
        link: Link | None = None,
    ) -> None:
        super().__init__(stream, vid_stride)
        self._opener = opener
        self._retry = retry
        self._link = link or Link()
        self._told: LinkStatus | None = None
        self._decoder = ""
        self._info = SourceInfo(
            codec="",
            width=0,
            height=0,
            average_rate=None,
            frames=None,
            time_base=LIVE_BASE,
            duration_s=None,
            live=True,
            audio=False,
            url=redact(url),
        )

    @property
    def status(self) -> LinkStatus:
        """How the connection is doing; from any thread."""
        return self._link.status

    @property
    def decoder(self) -> str:
        """What decodes it, such as "h264 (cuda)"; "" before the first frame."""
        return self._decoder

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames as they come. `Frame.dropped_before` counts frames that were lost or damaged.

        Raises:
            LiveError: if it cannot be reached, and shall not be tried again.
            SourceError: if no trying again would help, such as with a GPU that is not there.
        """
        clock = LiveClock()
        numbers = itertools.count()
        try:
            while not self._closed.is_set():
                clock.restart()
                self._link.attempt(time.monotonic())
                self._tell()
                try:
                    yield from self._connection(clock, numbers)
                except StreamEndedError:
                    return
                except LiveError as error:
                    if self._closed.is_set():
                        return
                    delay_s = self._failed(error)
                    if not self._retry:
                        raise
                    self._closed.wait(delay_s)
        finally:
            self._link.end()
            self._tell()

    def _connection(self, clock: LiveClock, numbers: Iterator[int]) -> Iterator[Frame]:
        """The frames of one connection, until it fails or close()."""
        feed = self._opener(self._closed)
        damaged_before = self._corrupt
        reformatter = VideoReformatter()  # one for all frames: see `upright_rgb`
        skipped = 0
        try:
            while not self._closed.is_set():
                frame = feed.read(_LOOK_S)
                now = time.monotonic()
                self._corrupt = damaged_before + feed.damaged
                self._link.heard(feed.heard_at)
                if frame is None:
                    if self._link.silent(now):
                        raise LiveError("timeout", f"{self._info.url}: nothing comes any more")
                    continue
                self._link.frame_arrived(now)
                pts = clock.place(frame.timestamp, frame.arrived_at)
                number = next(numbers)
                skipped += frame.lost_before
                if number % self._stride:
                    continue
                try:
                    image = upright_rgb(frame.decoded, reformatter)
                except (av.error.FFmpegError, ValueError):
                    skipped += 1  # a frame in a format that nothing converts
                    continue
                self._know(feed, image)
                yield self._frame(frame, image, number, pts, skipped)
                skipped = 0
        finally:
            self._corrupt = damaged_before + feed.damaged
            feed.close()

    def _frame(self, frame: LiveFrame, image: RgbImage, number: int, pts: int, skipped: int) -> Frame:
        now = time.monotonic()
        arrived = time.time() - (now - frame.arrived_at)
        return Frame(
            image=image,
            stream=self._name,
            index=number,
            pts=pts,
            time_base=LIVE_BASE,
            captured_at=arrived if frame.captured_at is None else frame.captured_at,
            capture_clock="arrival" if frame.captured_at is None else "rtcp",
            decoded_at=now,
            decode_ms=(now - frame.arrived_at) * 1e3,
            dropped_before=skipped,
        )

    def _know(self, feed: LiveConnection, image: RgbImage) -> None:
        """Bring `info` up to date: a camera may be another one after a reconnect."""
        height, width = image.shape[:2]
        known = self._info
        if (known.codec, known.width, known.height, self._decoder) != (feed.codec, width, height, feed.decoder):
            self._decoder = feed.decoder
            self._info = replace(known, codec=feed.codec, width=width, height=height, average_rate=feed.rate)
            log.info("%s: %d x %d, decoded by %s", self._name, width, height, feed.decoder)
        self._tell()

    def _failed(self, error: LiveError) -> float:
        reason: Reason = error.reason
        delay_s = self._link.failed(reason)
        log.info("%s: %s; again in %.1f s", self._name, error, delay_s)
        self._tell()
        return delay_s

    def _tell(self) -> None:
        status = self._link.status
        if status != self._told:
            self._told = status
            log.info("%s: %s", self._name, status)

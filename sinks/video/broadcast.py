"""The video of every stream for people who watch now: coded once for all of them, newest picture always.

Nothing is drawn or coded for a stream that nobody watches. Knows frames and results, but no network, source, model or
pipeline: `saccade.pipeline.server.whep_server` brings the coded pictures to browsers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import av.error

from saccade.engine.results import Result
from saccade.sinks.base import SinkError
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, drawn_latency, make_record
from saccade.sinks.video.live_encoder import TIME_BASE, Codec, Coded, LiveEncoder
from saccade.sources.frame import Frame, RgbImage

_BACKLOG = 8  # coded pictures: a viewer further behind than that goes on at the next key frame
_KEY_FRAMES_S = 0.5  # between two key frames: one viewer who asks on and on must not spoil the picture of the others
_RATE_MEMORY = 0.1  # weight of the newest interval in the mean


class NoSuchStreamError(Exception):
    """Nobody sends a stream of that name."""


@dataclass(slots=True, frozen=True)
class View:
    """One rendition of a stream: with the results drawn on it or not, and in which codec."""

    drawn: bool = True
    codec: Codec = "H264"


@dataclass(slots=True, frozen=True)
class Picture:
    """What a viewer gets: a coded picture, and the record of the frame that it shows."""

    coded: Coded
    record: dict[str, Any]


class Viewer:
    """One who watches. `take` and `ask` are for whoever brings the pictures to him, in any thread.

    Args:
        wake: called in the sink's thread whenever something can be taken, or the stream has ended; returns at once.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._pictures: deque[Picture] = deque()
        self._needs_key = True
        self._ended = False
        self.skipped = 0
        """Pictures not delivered because he was too slow."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    @property
    def needs_key(self) -> bool:
        """Whether he can go on only at a key frame."""
        return self._needs_key

    def take(self) -> Picture | None:
        """The next picture; None if there is none yet."""
        with self._lock:
            return self._pictures.popleft() if self._pictures else None

    def ask(self) -> None:
        """Ask for a key frame, as a decoder does that lost something."""
        self._needs_key = True

    def _give(self, picture: Picture) -> None:
        with self._lock:
            if len(self._pictures) >= _BACKLOG:
                self.skipped += len(self._pictures)
                self._pictures.clear()
                self._needs_key = True
            if self._needs_key and not picture.coded.key:
                self.skipped += 1
                return
            self._needs_key = False
            self._pictures.append(picture)
        self._wake()

    def _end(self) -> None:
        self._ended = True
        self._wake()


class _Rendition:
    """One encoder and those who watch what it makes."""

    def __init__(self, codec: Codec) -> None:
        self.viewers: tuple[Viewer, ...] = ()  # replaced, never changed: pictures go out while others come and leave
        self._encoder = LiveEncoder(codec)
        self._key_at = -_KEY_FRAMES_S

    def send(self, image: RgbImage, record: dict[str, Any], now: float, rate: float) -> None:
        viewers = self.viewers
        key = now - self._key_at >= _KEY_FRAMES_S and any(viewer.needs_key for viewer in viewers)
        # The time of day here, not the source's: a file is read at any pace, and what is shown is shown now.
        coded = self._encoder.encode(image, round(now / TIME_BASE), rate, key=key)
        if coded is None:
            return
        if coded.key:
            self._key_at = now
        for viewer in viewers:
            viewer._give(Picture(coded, record))


class _Stream:
    """The renditions that are watched of one stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # over the renditions: viewers come and go in another thread than the pictures
        self._renditions: dict[View, _Rendition] = {}
        self._last = 0.0
        self._interval = 1 / 30

    def send(self, frame: Frame, result: Result, latency: Latency) -> None:
        now = time.monotonic()
        if self._last:
            self._interval += _RATE_MEMORY * (min(now - self._last, 1.0) - self._interval)
        self._last = now
        with self._lock:
            renditions = list(self._renditions.items())
        if not renditions:
            return
        record = make_record(frame, result, latency)
        drawn: RgbImage | None = None
        for view, rendition in renditions:
            if view.drawn and drawn is None:
                drawn = draw(frame.image, result, drawn_latency(frame, latency))
            image = drawn if view.drawn and drawn is not None else frame.image
            rendition.send(image, record, now, 1 / max(self._interval, 1e-3))

    def join(self, view: View, viewer: Viewer) -> None:
        with self._lock:
            rendition = self._renditions.setdefault(view, _Rendition(view.codec))
            rendition.viewers = (*rendition.viewers, viewer)

    def leave(self, view: View, viewer: Viewer) -> None:
        with self._lock:
            rendition = self._renditions.get(view)
            if rendition is None:
                return
            rendition.viewers = tuple(other for other in rendition.viewers if other is not viewer)
            if not rendition.viewers:
                del self._renditions[view]

    def end(self) -> None:
        with self._lock:
            viewers = [viewer for rendition in self._renditions.values() for viewer in rendition.viewers]
            self._renditions.clear()
        for viewer in viewers:
            viewer._end()


class BroadcastSink:
    """A sink that any number of streams share, and that others watch.

    It draws and codes in the thread that writes; give it an outbox that keeps only the newest.
    """

    shared: ClassVar[bool] = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}

    @property
    def streams(self) -> list[str]:
        """Names of the streams that can be watched."""
        with self._lock:
            return list(self._streams)

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Show one frame to all who watch its stream; does nothing where nobody does.

        Raises:
            SinkError: if it cannot be coded.
        """
        with self._lock:
            stream = self._streams.setdefault(frame.stream, _Stream())
        try:
            stream.send(frame, result, latency)
        except av.error.FFmpegError as error:
            raise SinkError(f"{frame.stream}: a picture cannot be coded for its viewers: {error.strerror}") from error

    def end(self, stream: str) -> None:
        """Let the viewers of `stream` go: nothing more will come of it."""
        with self._lock:
            ended = self._streams.pop(stream, None)
        if ended is not None:
            ended.end()

    def close(self) -> None:
        """Let all viewers go. A second call does nothing."""
        for name in self.streams:
            self.end(name)

    def join(self, stream: str, view: View, wake: Callable[[], None]) -> tuple[Viewer, Callable[[], None]]:
        """Watch a stream from the next picture on.

        Args:
            stream: its name.
            view: which rendition.
            wake: as in `Viewer`.

        Returns:
            The viewer, and what to call when he leaves; may be called repeatedly, from any thread.

        Raises:
            NoSuchStreamError: if there is no such stream.
        """
        with self._lock:
            watched = self._streams.get(stream)
            if watched is None:
                raise NoSuchStreamError(stream)
            viewer = Viewer(wake)
            watched.join(view, viewer)
        return viewer, lambda: watched.leave(view, viewer)

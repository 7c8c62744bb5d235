"""Live video for browsers. Each frame is encoded once for all viewers; slow viewers skip frames.

Streams without viewers are not encoded. The module `saccade.pipeline.api.whep` sends the encoded frames by WebRTC.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import av.error
import cv2
import numpy as np

from saccade.engine.results import Result
from saccade.sinks.base import SinkError
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, make_record
from saccade.sinks.video.encoder import TIME_BASE, Codec, EncodedImage, LiveEncoder
from saccade.sources.frame import Frame, RgbImage

_BACKLOG = 8  # frames: a viewer further behind than that goes on at the next keyframe
_KEY_FRAMES_S = 0.5  # between two keyframes: requests of one viewer must not lower the quality for the others
_RATE_MEMORY = 0.1  # weight of the newest interval in the mean


class NoSuchStreamError(Exception):
    """Raised if no stream has the requested name."""


@dataclass(slots=True, frozen=True)
class View:
    """Settings of a stream's live video. Viewers with equal settings share an encoder.

    Attributes:
        drawn: whether the overlay is drawn.
        codec: video codec, "H264" or "VP8".
        width: width in pixels of a smaller video; None for the stream's own width.
        halvings: how many times the full bit rate is halved.
    """

    drawn: bool = True
    codec: Codec = "H264"
    width: int | None = None
    halvings: int = 0


@dataclass(slots=True, frozen=True)
class Shown:
    """A frame with its analysis result and latency."""

    frame: Frame
    result: Result
    latency: Latency

    def image(self, *, drawn: bool, width: int | None = None) -> RgbImage:
        """Return the frame's image as (height, width, 3) uint8 RGB.

        Args:
            drawn: whether to draw the overlay.
            width: width to scale down to, in pixels; None for the original size.
        """
        image = self.frame.image
        size = width_of, height_of = self.frame.shown_size
        if width is not None and width < width_of:
            size = (width, max(2, round(height_of * width / width_of) // 2 * 2))
        if size != (image.shape[1], image.shape[0]):  # a small one, or one whose pixels are not square
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)
        return draw(image, self.result) if drawn else image


@dataclass(slots=True, frozen=True)
class ViewerFrame:
    """An encoded frame and its result record, for one viewer."""

    encoded: EncodedImage
    record: dict[str, Any]


class Viewer:
    """One viewer of a stream's live video. `BroadcastSink.join` creates it. Thread-safe.

    Args:
        stream: encoders of the stream to view.
        view: requested settings of the video, such as overlay and codec.
        wake: callback for a new frame or the end of the stream. It is called in the sink's thread and must not block.
    """

    def __init__(self, stream: _Stream, view: View, wake: Callable[[], None]) -> None:
        self._stream = stream
        self._view = view
        self._wake = wake
        self._lock = threading.Lock()
        self._frames: deque[ViewerFrame] = deque()
        self._needs_key_frame = True
        self._ended = False
        self.skipped = 0
        """Number of frames not sent because the viewer was too slow."""

    @property
    def ended(self) -> bool:
        """Whether the viewed stream has ended."""
        return self._ended

    @property
    def needs_key_frame(self) -> bool:
        """Whether the viewer is waiting for a keyframe."""
        return self._needs_key_frame

    def take(self) -> ViewerFrame | None:
        """Remove and return the oldest queued frame, or None if the queue is empty."""
        with self._lock:
            return self._frames.popleft() if self._frames else None

    def request_key_frame(self) -> None:
        """Make the viewer's next frame a keyframe, for example after packet loss."""
        self._needs_key_frame = True

    def set_halvings(self, halvings: int) -> None:
        """Change the bit rate of the video for this viewer. The viewer's next frame is a keyframe.

        Args:
            halvings: how many times the full bit rate is halved.
        """
        if self._stream.leave(self._view, self):
            self._view = replace(self._view, halvings=halvings)
            self._needs_key_frame = True
            self._stream.join(self._view, self)

    def leave(self) -> None:
        """Disconnect this viewer from the stream. A second call does nothing."""
        self._stream.leave(self._view, self)

    def _offer(self, frame: ViewerFrame) -> None:
        with self._lock:
            if len(self._frames) >= _BACKLOG:
                self.skipped += len(self._frames)
                self._frames.clear()
                self._needs_key_frame = True
            if self._needs_key_frame and not frame.encoded.key:
                self.skipped += 1
                return
            self._needs_key_frame = False
            self._frames.append(frame)
        self._wake()

    def _end(self) -> None:
        self._ended = True
        self._wake()


class _Rendition:
    """A video encoder and the viewers that receive its encoded frames."""

    def __init__(self, view: View) -> None:
        self.viewers: tuple[Viewer, ...] = ()  # replaced, never changed: frames go out while viewers join and leave
        self._encoder = LiveEncoder(view.codec, view.halvings)
        self._key_at = -_KEY_FRAMES_S

    def send(self, image: RgbImage, record: dict[str, Any], now: float, rate: float) -> None:
        viewers = self.viewers
        key = now - self._key_at >= _KEY_FRAMES_S and any(viewer.needs_key_frame for viewer in viewers)
        # This machine's clock, not the source's: a file is read at any pace, and a viewer is shown it now.
        encoded = self._encoder.encode(image, round(now / TIME_BASE), rate, key=key)
        if encoded is None:
            return
        if encoded.key:
            self._key_at = now
        for viewer in viewers:
            viewer._offer(ViewerFrame(encoded, record))


class _Stream:
    """The encoders of one stream, one for each requested `View`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # over the renditions: viewers join and leave in other threads than the writer's
        self._renditions: dict[View, _Rendition] = {}
        self._awaited: list[Future[Shown]] = []
        self._last = 0.0
        self._interval = 1 / 30

    def send(self, frame: Frame, result: Result, latency: Latency) -> None:
        now = time.monotonic()
        if self._last:
            self._interval += _RATE_MEMORY * (min(now - self._last, 1.0) - self._interval)
        self._last = now
        with self._lock:
            renditions = list(self._renditions.items())
            awaited, self._awaited = self._awaited, []
        if not (renditions or awaited):
            return
        shown = Shown(frame, result, latency)
        for future in awaited:
            if future.set_running_or_notify_cancel():
                future.set_result(shown)
        record = make_record(frame, result, latency) if renditions else {}
        images: dict[tuple[bool, int | None], RgbImage] = {}
        for view, rendition in renditions:
            kind = view.drawn, view.width
            if kind not in images:
                images[kind] = shown.image(drawn=view.drawn, width=view.width)
            rendition.send(images[kind], record, now, 1 / max(self._interval, 1e-3))

    def next(self) -> Future[Shown]:
        future: Future[Shown] = Future()
        with self._lock:
            self._awaited.append(future)
        return future

    def join(self, view: View, viewer: Viewer) -> None:
        with self._lock:
            rendition = self._renditions.setdefault(view, _Rendition(view))
            rendition.viewers = (*rendition.viewers, viewer)

    def leave(self, view: View, viewer: Viewer) -> bool:
        """Remove a viewer. Return False if the viewer had been removed before."""
        with self._lock:
            rendition = self._renditions.get(view)
            if rendition is None or viewer not in rendition.viewers:
                return False
            rendition.viewers = tuple(other for other in rendition.viewers if other is not viewer)
            if not rendition.viewers:
                del self._renditions[view]
            return True

    def end(self) -> None:
        with self._lock:
            viewers = [viewer for rendition in self._renditions.values() for viewer in rendition.viewers]
            self._renditions.clear()
            awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.cancel()
        for viewer in viewers:
            viewer._end()


class BroadcastSink:
    """Encodes the live video of all streams that have viewers.

    `write` is slow, because it draws and encodes. Call it through a queue that keeps only the newest frame.
    """

    shared: ClassVar[bool] = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}

    @property
    def streams(self) -> list[str]:
        """Return the names of the streams that viewers can join."""
        with self._lock:
            return list(self._streams)

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Encode one frame for the viewers of its stream. Without viewers, do nothing.

        Raises:
            SinkError: if the frame cannot be encoded.
        """
        with self._lock:
            stream = self._streams.setdefault(frame.stream, _Stream())
        try:
            stream.send(frame, result, latency)
        except av.error.FFmpegError as error:
            raise SinkError(f"stream {frame.stream}: the live video cannot be encoded: {error.strerror}") from error

    def end(self, stream: str) -> None:
        """Disconnect all viewers of `stream`, because the stream has ended."""
        with self._lock:
            ended = self._streams.pop(stream, None)
        if ended is not None:
            ended.end()

    def close(self) -> None:
        """Disconnect all viewers. A second call does nothing."""
        for name in self.streams:
            self.end(name)

    def next(self, stream: str) -> Future[Shown]:
        """Return a future for the stream's next frame. The future is cancelled if the stream ends first.

        Raises:
            NoSuchStreamError: if no stream has this name.
        """
        with self._lock:
            return self._find(stream).next()

    def join(self, stream: str, view: View, wake: Callable[[], None]) -> Viewer:
        """Add a viewer to a stream. The viewer receives the stream from its next frame on.

        Args:
            stream: name of the stream.
            view: requested settings of the video, such as overlay and codec.
            wake: callback that is called when a frame is available or the stream has ended; see `Viewer`.

        Raises:
            NoSuchStreamError: if no stream has this name.
        """
        with self._lock:
            found = self._find(stream)
            viewer = Viewer(found, view, wake)
            found.join(view, viewer)
        return viewer

    def _find(self, stream: str) -> _Stream:
        """Return a stream by name. The caller must hold the lock."""
        found = self._streams.get(stream)
        if found is None:
            raise NoSuchStreamError(stream)
        return found

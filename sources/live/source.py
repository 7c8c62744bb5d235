"""A live source, such as a camera: yields frames until it is closed, and reconnects after each failure."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

import av.error

from saccade.sources.base import Source, SourceInfo
from saccade.sources.errors import LiveError, Reason, StreamEndedError
from saccade.sources.frame import Frame, RgbImage
from saccade.sources.live.clock import LIVE_BASE, LiveClock
from saccade.sources.live.connection import LiveConnection, LiveFrame, StreamStats
from saccade.sources.live.packets import AudioPacket, Taps
from saccade.sources.live.reconnect import Link, LinkStatus
from saccade.sources.rgb import DecodedImage, Orientation, RgbConverter, orientation_of
from saccade.sources.urls import redact

log = logging.getLogger(__name__)

Opener = Callable[[threading.Event, int | None, Taps], LiveConnection]
"""Connects within seconds, and stops when the event is set; raises `LiveError` if it cannot connect.

The number is the index of the GPU that stores the decoded frames, see `Source.gpu`. The taps
receive all packets of the connection.
"""

_POLL_S = 0.25  # interval of silence checks while nothing arrives
_MAX_MESSAGE = 200  # characters; a server may put any text into an error
_EARLY = 1024  # audio packets that wait for a connection's first frame


class LiveSource(Source):
    """A camera or another live stream as a source.

    An unreachable source is retried without limit; `status` shows the current state. Timestamps are strictly increasing
    integers in units of 1/90000 s, also across reconnects. Codec and size in `info` describe the newest frame; they are
    "" and 0 before the first frame.

    Args:
        url: the URL that the user typed; shown only without its credentials.
        opener: function that opens a connection to the source.
        stream: name of the stream.
        vid_stride: yield every `vid_stride`-th frame. The other frames are decoded but not converted.
        retry: False to raise `LiveError` at the first failure instead of retrying.
        link: state machine of the connection; None creates a `Link`.

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
        self._reported: LinkStatus | None = None
        self._stats: StreamStats | None = None
        self.taps = Taps()
        """Callbacks that receive the encoded packets. Add them before iterating the source."""
        self._sound = _AudioClock()
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
        """Current connection status of the live source. Thread-safe."""
        return self._link.status

    @property
    def stats(self) -> StreamStats | None:
        """Packet statistics of the newest connection; None if unavailable. Only RTSP connections provide them."""
        return self._stats

    def listen(self, take: Callable[[AudioPacket], None]) -> None:
        """Register a callback for the audio packets of the source. Call `listen` before iterating the source.

        Args:
            take: the callback. The packets have timestamps on the same timeline as `Frame.pts`. It can be called in
                different threads and must not block.
        """
        if not self._sound.listeners:
            self.taps.sound.append(self._sound.hear)
        self._sound.listeners.append(take)

    def receive(self) -> None:
        """Receive packets for the callbacks in `taps`, without decoding, until the source is closed.

        Raises:
            SourceError: if the source fails permanently.
        """
        self.taps.decode = False
        for _ in self:
            pass

    def __iter__(self) -> Iterator[Frame]:
        """Yield frames as they arrive. `Frame.dropped_before` counts lost, damaged and skipped frames.

        Raises:
            LiveError: if the source cannot be reached and `retry` is False.
            SourceError: if retrying cannot help, for example because the required GPU is missing.
        """
        clock = LiveClock()
        numbers = itertools.count()
        try:
            while not self._closed.is_set():
                clock.restart()
                self._link.attempt(time.monotonic())
                self._report_status()
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
            self._report_status()

    def _connection(self, clock: LiveClock, numbers: Iterator[int]) -> Iterator[Frame]:
        """Yield the frames of one connection until the connection fails or the source is closed."""
        self._sound.restart()
        connection = self._opener(self._closed, self.gpu, self.taps)
        damaged_before = self._corrupt
        converter = RgbConverter()
        known: object = None  # frame format for which `orientation` was determined
        orientation: Orientation | None = None
        converted: object = None  # last frame format that could be converted
        skipped = 0
        media_at = connection.media_at
        try:
            while not self._closed.is_set():
                frame = connection.read(_POLL_S)
                now = time.monotonic()
                self._corrupt = damaged_before + connection.damaged
                self._stats = connection.stats
                self._link.frames_only = connection.stats is None and connection.heard_at == connection.media_at
                self._link.heard(connection.heard_at, connection.media_at)
                if frame is None:
                    if not self.taps.decode and connection.media_at > media_at:
                        media_at = connection.media_at
                        self._link.frame_arrived(now)
                        self._report_status()
                    if self._link.silent(now):
                        raise LiveError("timeout", f"{self._info.url}: the camera stopped sending data")
                    continue
                pts = clock.place(frame.timestamp, frame.arrived_at)
                if frame.timestamp is not None:
                    self._sound.align(pts - frame.timestamp)
                number = next(numbers)
                skipped += frame.lost_before
                wanted = number % self._stride == 0
                form = frame.decoded.format.name, frame.decoded.width, frame.decoded.height, frame.decoded.rotation
                if form != known:
                    known, orientation = form, orientation_of(frame.decoded)
                image = converter.later(frame.decoded, orientation)
                if wanted and form != converted:
                    try:
                        self._update_info(connection, image())
                    except (av.error.FFmpegError, ValueError):
                        skipped += 1  # a pixel format that swscale cannot convert
                        wanted = False
                    else:
                        converted = form
                self._link.frame_arrived(now)  # after `info`, which is shown beside the state
                self._report_status()
                if wanted:
                    aspect = frame.pixel_aspect
                    if orientation is not None and orientation.transpose:
                        aspect = 1 / aspect
                    yield self._frame(frame, image, number, pts, skipped, aspect)
                    skipped = 0
        finally:
            self._corrupt = damaged_before + connection.damaged
            connection.close()

    def _frame(
        self, frame: LiveFrame, image: DecodedImage, number: int, pts: int, skipped: int, pixel_aspect: Fraction
    ) -> Frame:
        now = time.monotonic()
        arrived = time.time() - (now - frame.arrived_at)
        return Frame.deferred(
            image,
            size=image.size,
            planes=image.planes,
            stream=self._name,
            index=number,
            pts=pts,
            time_base=LIVE_BASE,
            captured_at=arrived if frame.captured_at is None else frame.captured_at,
            capture_clock="arrival" if frame.captured_at is None else "rtcp",
            decoded_at=now,
            decode_ms=(now - frame.arrived_at) * 1e3,
            dropped_before=skipped,
            damaged=frame.damaged,
            pixel_aspect=pixel_aspect,
        )

    def _update_info(self, connection: LiveConnection, image: RgbImage) -> None:
        """Update codec, size and frame rate in `info` if the codec, the size or the decoder has changed."""
        height, width = image.shape[:2]
        known = self._info
        codec, decoder = connection.codec, connection.decoder
        if (known.codec, known.width, known.height, self._decoder) != (codec, width, height, decoder):
            self._decoder = decoder
            self._info = replace(known, codec=codec, width=width, height=height, average_rate=connection.rate)
            log.info("stream %s: video of %d x %d pixels, decoded by %s", self._name, width, height, decoder)

    def _failed(self, error: LiveError) -> float:
        reason: Reason = error.reason
        message = redact(" ".join(error.message.split()))[:_MAX_MESSAGE]
        delay_s = self._link.failed(reason, message, refused=error.refused, now=time.monotonic())
        log.info("stream %s is not connected: %s; next attempt in %.1f s", self._name, error, delay_s)
        self._report_status()
        return delay_s

    def _report_status(self) -> None:
        status = self._link.status
        if status != self._reported:
            self._reported = status
            log.info("stream %s: connection status: %s", self._name, status)


class _AudioClock:
    """Moves the timestamps of audio packets to the timeline of `Frame.pts`, by adding an offset. Thread-safe.

    Attributes:
        listeners: callbacks that receive the moved audio packets.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[AudioPacket], None]] = []
        self._lock = threading.Lock()
        self._shift: int | None = None
        self._early: deque[AudioPacket] = deque(maxlen=_EARLY)

    def restart(self) -> None:
        """Prepare for a new connection, whose timestamp offset is unknown until `align` is called."""
        with self._lock:
            self._shift = None
            self._early.clear()

    def align(self, shift: int) -> None:
        """Set the offset from audio timestamps to frame timestamps. Pass buffered audio packets to the callbacks."""
        if not self.listeners:
            return
        with self._lock:
            self._shift = shift
            while self._early:
                self._pass_on(self._early.popleft())

    def hear(self, packet: AudioPacket) -> None:
        """Pass an audio packet to the callbacks, with its new timestamp. Buffer it until `align` is called."""
        with self._lock:
            if self._shift is None:
                self._early.append(packet)
            else:
                self._pass_on(packet)

    def _pass_on(self, packet: AudioPacket) -> None:
        moved = replace(packet, pts=packet.pts + (self._shift or 0))
        for take in self.listeners:
            take(moved)

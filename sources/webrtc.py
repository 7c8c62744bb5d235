"""One WebRTC peer's video as a source: coded pictures in from the network's thread, the newest frame out.

A thread of its own decodes, because every picture must be decoded and only the newest is wanted. Knows nothing of
signalling, sockets or asyncio (`sources.webrtc_server` does), nor of models, results or sinks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from types import TracebackType
from typing import Self

import av
import av.error
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import VideoReformatter

from sources.base import SourceError, SourceInfo
from sources.frame import CaptureClock, Frame
from sources.jitter import CodedPicture

log = logging.getLogger(__name__)

CLOCK_RATE = 90_000  # of every video codec over RTP
DECODERS = {"VP8": "libvpx", "H264": "h264"}
"""The codecs that are understood, by their names in SDP, and PyAV's decoder of each."""

_BACKLOG = 64  # coded pictures, two seconds: a decoder further behind than that begins anew at a key frame
_ASK_AGAIN_S = 0.5  # between two requests for a key frame; the sender needs a round trip and an encoding
_PLAUSIBLE_S = 10.0  # a sender's clock further off than this was never set


@dataclass(slots=True, frozen=True)
class SenderReport:
    """What a sender says of its clock: at `unix_time` its RTP timestamp was `timestamp`."""

    unix_time: float
    timestamp: int


@dataclass(slots=True, frozen=True)
class _Decoded:
    picture: av.VideoFrame
    index: int
    pts: int
    captured_at: float
    capture_clock: CaptureClock
    decode_ms: float


class WebRtcSource:
    """The video of one peer, live: iterate it in one thread; a slow reader gets the newest picture, not every one.

    `Frame.pts` counts from 0 with the peer's first picture, in 1/90000 s. `Frame.captured_at` is the arrival of the
    picture's first packet, and from the first sender report on the sender's own time. The size may change in
    mid-stream. The iteration ends when the peer has gone.

    Args:
        name: name of the stream.
        codecs: names in SDP of the payload types that the session uses.
        vid_stride: hand on every `vid_stride`-th picture at most.
        url: address for `info`.
        on_close: called once when the source is closed, by whomever, in that one's thread.
    """

    def __init__(
        self,
        name: str,
        codecs: dict[int, str],
        *,
        vid_stride: int = 1,
        url: str = "webrtc:",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        if vid_stride < 1:
            raise SourceError(f"vid_stride must be 1 or more, not {vid_stride}")
        self._name = name
        self._codecs = codecs
        self._stride = vid_stride
        self._url = url
        self._on_close = on_close
        self._changed = threading.Condition()  # over everything from here to `_closed`
        self._coded: deque[CodedPicture] = deque()
        self._newest: _Decoded | None = None
        self._dropped = 0  # decoded, but replaced by a newer one before it was taken
        self._lost = 0  # could not be decoded
        self._lost_since = 0  # of both kinds, since the last picture handed on
        self._needs_key_frame = True
        self._closed = False
        self._report: SenderReport | None = None
        self._asked_at = -_ASK_AGAIN_S
        self._codec = ""
        self._size = (0, 0)
        self._decoder = threading.Thread(target=self._decode, name=f"webrtc-decode-{name}", daemon=True)
        self._decoder.start()

    @property
    def name(self) -> str:
        """Name of the stream, as in `Frame.stream`."""
        return self._name

    @property
    def info(self) -> SourceInfo:
        """What is known by now; codec "unknown" and size 0×0 before the first picture is decoded."""
        with self._changed:
            (width, height), codec = self._size, self._codec or "unknown"
        return live_info(self._url, codec, width, height)

    @property
    def corrupt_packets(self) -> int:
        """Pictures that could not be decoded because a part of them, or what they build on, was lost."""
        with self._changed:
            return self._lost

    @property
    def dropped(self) -> int:
        """Pictures decoded but not handed on, because the reader was slower than the peer."""
        with self._changed:
            return self._dropped

    # ---- the network's side

    def feed(self, picture: CodedPicture) -> None:
        """Take in a coded picture; returns at once."""
        with self._changed:
            if self._closed:
                return
            if len(self._coded) >= _BACKLOG:
                self._lose(len(self._coded))
                self._coded.clear()
            self._coded.append(picture)
            self._changed.notify_all()

    def note_report(self, report: SenderReport) -> None:
        """Take in what the sender says of its clock."""
        self._report = report

    def asks_for_key_frame(self, now: float) -> bool:
        """True when the sender should be asked for a key frame at `now`; then False for half a second."""
        with self._changed:
            if not self._needs_key_frame or now - self._asked_at < _ASK_AGAIN_S:
                return False
            self._asked_at = now
            return True

    # ---- the reader's side

    def __iter__(self) -> Iterator[Frame]:
        """Yield the newest picture each time; wait where there is none newer than the last; end with the peer."""
        # One reformatter for all pictures: VideoFrame.to_ndarray() builds a scaler anew each time, 7 ms against 0.4.
        reformatter = VideoReformatter()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._closed)
                newest, self._newest = self._newest, None
                dropped, self._lost_since = self._lost_since, 0
            if newest is None:
                return
            begun = time.perf_counter()
            rgb = reformatter.reformat(newest.picture, format="rgb24").to_ndarray()
            yield Frame(
                image=np.ascontiguousarray(rgb, dtype=np.uint8),
                stream=self._name,
                index=newest.index,
                pts=newest.pts,
                time_base=Fraction(1, CLOCK_RATE),
                captured_at=newest.captured_at,
                capture_clock=newest.capture_clock,
                decoded_at=time.monotonic(),
                decode_ms=newest.decode_ms + (time.perf_counter() - begun) * 1e3,
                dropped_before=dropped,
            )

    def close(self) -> None:
        """End the iteration and let the peer go. Callable from any thread, repeatedly."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._newest = None
            self._coded.clear()
            self._changed.notify_all()
        if self._on_close is not None:
            self._on_close()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread that decodes, after `close`."""
        self._decoder.join(timeout_s)

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the source."""
        self.close()

    # ---- the thread between the two

    def _decode(self) -> None:
        codec, decoder = "", None
        index, pts, last = 0, 0, None
        while (coded := self._next_coded()) is not None:
            wanted = self._codecs.get(coded.payload_type, "")
            if wanted not in DECODERS:
                continue
            if not self._decodable(coded, is_key_frame(wanted, coded.data), same_codec=wanted == codec):
                continue
            if decoder is None or wanted != codec:
                codec, decoder = wanted, _open_decoder(wanted)
            step = _signed(coded.timestamp - last) if last is not None else 0
            pts, last = pts + max(step, 1) if last is not None else 0, coded.timestamp
            begun = time.perf_counter()
            try:
                pictures = decoder.decode(av.Packet(coded.data))
            except av.error.FFmpegError as error:
                log.debug("%s: a picture could not be decoded (%s)", self._name, error.strerror)
                self._lose(1)
                continue
            if not pictures:
                continue  # parameter sets without a picture
            if pictures[-1].is_corrupt:
                self._lose(1)
                continue
            index += 1
            if (index - 1) % self._stride == 0:
                decode_ms = (time.perf_counter() - begun) * 1e3
                self._offer(_Decoded(pictures[-1], index - 1, pts, *self._captured(coded), decode_ms), codec)

    def _next_coded(self) -> CodedPicture | None:
        with self._changed:
            self._changed.wait_for(lambda: self._coded or self._closed)
            return None if self._closed else self._coded.popleft()

    def _decodable(self, coded: CodedPicture, key_frame: bool, *, same_codec: bool) -> bool:
        """Whether all that the picture builds on was decoded. Half a picture would be shown as grey or smeared."""
        with self._changed:
            if key_frame:
                self._needs_key_frame = False
            elif coded.after_loss or not same_codec or self._needs_key_frame:
                self._lose(1)
                return False
            return True

    def _lose(self, pictures: int) -> None:
        with self._changed:
            self._lost += pictures
            self._lost_since += pictures
            self._needs_key_frame = True

    def _offer(self, decoded: _Decoded, codec: str) -> None:
        with self._changed:
            if self._closed:
                return
            if self._newest is not None:
                self._dropped += 1
                self._lost_since += 1
            self._newest = decoded
            self._codec, self._size = codec, (decoded.picture.width, decoded.picture.height)
            self._changed.notify_all()

    def _captured(self, coded: CodedPicture) -> tuple[float, CaptureClock]:
        arrived = time.time() - (time.monotonic() - coded.arrived)
        if (report := self._report) is not None:
            captured = report.unix_time + _signed(coded.timestamp - report.timestamp) / CLOCK_RATE
            if abs(captured - arrived) < _PLAUSIBLE_S:
                return captured, "rtcp"
        return arrived, "arrival"


def live_info(url: str, codec: str, width: int, height: int) -> SourceInfo:
    """What there is to say of any WebRTC source: endless, live, of no fixed rate."""
    return SourceInfo(
        codec=codec.lower(),
        width=width,
        height=height,
        average_rate=None,
        frames=None,
        time_base=Fraction(1, CLOCK_RATE),
        duration_s=None,
        live=True,
        audio=False,
        url=url,
    )


def is_key_frame(codec: str, data: bytes) -> bool:
    """Whether `data` begins a picture that needs no other one. A piece from its middle does not count."""
    if codec == "VP8":
        return len(data) > 5 and not data[0] & 1 and data[3:6] == b"\x9d\x01\x2a"
    at = 0 if data.startswith(b"\x00\x00\x00\x01") else -1  # as aiortc puts before every unit
    while 0 <= at < len(data) - 4:
        if data[at + 4] & 0x1F == 5:
            return True
        if data[at + 4] & 0x1F == 1:
            return False  # a slice of another kind of picture; what follows is more of it
        at = data.find(b"\x00\x00\x00\x01", at + 4)
    return False


def _open_decoder(codec: str) -> VideoCodecContext:
    decoder = av.CodecContext.create(DECODERS[codec], "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.thread_type = "SLICE"  # FRAME would hold back one picture a thread
    decoder.flags |= av.codec.context.Flags.low_delay
    return decoder


def _signed(difference: int) -> int:
    """The difference of two RTP timestamps, which wrap around at 32 bits."""
    return (difference + (1 << 31)) % (1 << 32) - (1 << 31)

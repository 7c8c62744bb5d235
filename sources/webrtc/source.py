"""Video of one WebRTC peer: decodes every encoded frame and returns the newest decoded frame.

Decoding runs in a separate thread, because the decoder needs all frames, even if the reader skips some.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import av
import av.error

from saccade.sources.errors import LiveError, StreamEndedError
from saccade.sources.gpu import HwAccel
from saccade.sources.live.connection import LiveFrame, StreamStats
from saccade.sources.live.decoder import Decoder
from saccade.sources.live.packets import CodedPacket, Taps
from saccade.sources.live.source import LiveSource
from saccade.sources.rtp.jitter_buffer import CodedFrame
from saccade.sources.rtp.packet import signed
from saccade.sources.rtp.rtcp import SenderClock, SenderReport
from saccade.sources.webrtc.data_channel import Messages

log = logging.getLogger(__name__)

DECODERS = {"VP8": "libvpx", "H264": "h264"}
"""FFmpeg's decoder of each supported codec, by the codec's name in SDP."""

_BACKLOG = 64  # coded frames, two seconds: a decoder further behind than that restarts at a keyframe
_ASK_AGAIN_S = 0.5  # between two requests for a keyframe; the sender needs a round trip and an encoding


class WebRtcConnection:
    """Decoded video of one WebRTC peer. The network thread passes encoded frames to `take`.

    Frames with missing data or missing references are not returned. `read` returns only the newest frame, so a slow
    reader skips frames.

    Args:
        codecs: codec names in SDP by payload type.
        hwaccel: whether to decode H.264 on the GPU.
        on_close: called once when the connection is closed, in the closing thread.
    """

    def __init__(
        self, codecs: dict[int, str], *, hwaccel: HwAccel = "none", on_close: Callable[[], None] | None = None
    ) -> None:
        self._codecs = codecs
        self._hwaccel = hwaccel
        self._on_close = on_close
        self._changed = threading.Condition()  # guards everything from here to `_closed`
        self._coded: deque[CodedFrame] = deque()
        self._newest: LiveFrame | None = None
        self._lost = 0  # could not be decoded
        self._lost_since = 0  # since the last frame that could be
        self._needs_key_frame = True
        self._asked_at = -_ASK_AGAIN_S
        self._error: Exception | None = None  # that has ended the decoding
        self._closed = False
        self._report: SenderReport | None = None
        self._clock = SenderClock()
        self._heard_at = time.monotonic()
        self._codec = ""
        self._decoder_name = ""
        self.taps = Taps()
        """Callbacks that receive the encoded packets."""
        self.final = True
        """Whether the source ends when this peer disconnects, instead of waiting for the next peer."""
        self._thread = threading.Thread(target=self._work, name="webrtc-decode", daemon=True)
        self._thread.start()

    # ---- called by the network thread

    def take(self, frame: CodedFrame) -> None:
        """Queue an encoded frame for decoding. Returns at once."""
        with self._changed:
            if self._closed:
                return
            if len(self._coded) >= _BACKLOG:
                self._count_lost(len(self._coded))
                self._coded.clear()
            self._coded.append(frame)
            self._changed.notify_all()

    def heard(self, now: float) -> None:
        """Record that the WebRTC peer sent data at time `now`, in seconds of `time.monotonic()`."""
        self._heard_at = now

    def note_report(self, report: SenderReport) -> None:
        """Store the latest RTCP sender report, which gives the capture times of frames."""
        self._report = report

    def asks_for_key_frame(self, now: float) -> bool:
        """Return whether to request a keyframe at time `now` in seconds; True at most every 0.5 s."""
        with self._changed:
            if not self._needs_key_frame or now - self._asked_at < _ASK_AGAIN_S:
                return False
            self._asked_at = now
            return True

    # ---- called by the reader

    @property
    def codec(self) -> str:
        """FFmpeg's name of the video codec; "" before the first frame."""
        return self._codec.lower()

    @property
    def decoder(self) -> str:
        """Name of the decoder in use, such as "h264"; "" before the first frame."""
        return self._decoder_name

    @property
    def rate(self) -> Fraction | None:
        """Always None, because WebRTC has no fixed frame rate."""
        return None

    @property
    def heard_at(self) -> float:
        """`time.monotonic()` in seconds when a frame or an RTCP report last arrived."""
        return self._heard_at

    @property
    def media_at(self) -> float:
        """Same as `heard_at`, because silent peers are detected by the signaling server."""
        return self._heard_at

    @property
    def damaged(self) -> int:
        """Number of frames that could not be decoded because of packet loss."""
        return self._lost

    @property
    def stats(self) -> StreamStats | None:
        """Always None, because WebRTC connections provide no statistics."""
        return None

    def read(self, timeout_s: float) -> LiveFrame | None:
        """Return the newest unread frame; None if none arrives within `timeout_s` seconds.

        Raises:
            StreamEndedError: if the peer has left and `final` is set.
            LiveError: if the peer has left and `final` is not set.
            SourceError: if the required GPU cannot decode.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closed or self._error, timeout_s)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StreamEndedError if self.final else LiveError("connection failed", "the publisher disconnected")
            newest, self._newest = self._newest, None
            return newest

    def close(self) -> None:
        """Stop decoding and close the connection to the peer. Thread-safe; may be called more than once."""
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
        """Wait up to `timeout_s` seconds for the decoding thread to end after `close`; None waits without limit."""
        self._thread.join(timeout_s)

    # ---- the decoder thread

    def _work(self) -> None:
        try:
            self._decode_all()
        except Exception as error:  # must not vanish with the thread: the reader would wait for frames for ever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _decode_all(self) -> None:
        timestamp: int | None = None
        # A local, so that it and its threads are freed with this thread and not by the cyclic collector.
        decoder: Decoder | None = None
        while (coded := self._next_coded()) is not None:
            codec = self._codecs.get(coded.payload_type, "")
            if codec not in DECODERS or not self._decodable(coded, codec):
                continue
            if decoder is None or codec != self._codec:
                gpu = self._hwaccel if codec == "H264" else "none"
                self._codec, decoder = codec, Decoder(DECODERS[codec], hwaccel=gpu)
            timestamp = coded.timestamp if timestamp is None else timestamp + signed(coded.timestamp - timestamp)
            if self.taps.video:
                key = is_key_frame(codec, coded.data)
                self.taps.take(CodedPacket(DECODERS[codec], b"", coded.data, timestamp, coded.arrived, key))
            try:
                frames = decoder.decode(coded.data, timestamp)
            except av.error.FFmpegError as error:
                log.debug("a frame could not be decoded (%s)", error.strerror)
                self._count_lost(1)
                continue
            if frames and frames[-1].is_corrupt:
                self._count_lost(1)
            elif frames:  # none for parameter sets alone
                self._decoder_name = decoder.name
                captured_at, aspect = self._captured_at(coded), decoder.pixel_aspect
                self._offer(LiveFrame(frames[-1], timestamp, coded.arrived, captured_at, pixel_aspect=aspect))

    def _next_coded(self) -> CodedFrame | None:
        with self._changed:
            self._changed.wait_for(lambda: self._coded or self._closed)
            return None if self._closed else self._coded.popleft()

    def _decodable(self, coded: CodedFrame, codec: str) -> bool:
        """Return whether all references of the frame were decoded. Otherwise the image would be grey or smeared."""
        with self._changed:
            if is_key_frame(codec, coded.data):
                self._needs_key_frame = False
            elif coded.after_loss or self._needs_key_frame or codec != self._codec:
                self._count_lost(1)
            return not self._needs_key_frame

    def _count_lost(self, frames: int) -> None:
        with self._changed:
            self._lost += frames
            self._lost_since += frames
            self._needs_key_frame = True

    def _offer(self, frame: LiveFrame) -> None:
        with self._changed:
            if self._closed:
                return
            lost, self._lost_since = self._lost_since, 0
            if self._newest is not None:
                lost += 1 + self._newest.lost_before
            self._newest = replace(frame, lost_before=lost)
            self._changed.notify_all()

    def _captured_at(self, coded: CodedFrame) -> float | None:
        arrived = time.time() - (time.monotonic() - coded.arrived)
        return self._clock.captured_at(self._report, coded.timestamp, arrived) if self._report else None


class WebRtcSource(LiveSource):
    """A source with the video of one WebRTC peer. It ends when the peer disconnects. The frame size may change.

    Args:
        connection: the peer's video; closed together with the source.
        stream: name of the stream.
        vid_stride: yield every `vid_stride`-th frame.
        messages: the peer's data channel.
    """

    def __init__(
        self, connection: WebRtcConnection, *, stream: str, vid_stride: int = 1, messages: Messages | None = None
    ) -> None:
        super().__init__("webrtc:", lambda *_: connection, stream=stream, vid_stride=vid_stride)
        self.connection = connection
        connection.taps = self.taps
        self.messages = messages or Messages()

    def close(self) -> None:
        """End the iteration at once and disconnect the peer. Thread-safe; may be called more than once."""
        super().close()
        self.connection.close()


def is_key_frame(codec: str, data: bytes) -> bool:
    """Return whether an encoded frame is a keyframe. False for a fragment from the middle of a keyframe."""
    if codec == "VP8":
        return len(data) > 5 and not data[0] & 1 and data[3:6] == b"\x9d\x01\x2a"
    at = 0 if data.startswith(b"\x00\x00\x00\x01") else -1  # as aiortc puts before every unit
    while 0 <= at < len(data) - 4:
        kind = data[at + 4] & 0x1F
        if kind in (1, 5):
            return kind == 5  # the first slice of the frame; the others have the same type
        at = data.find(b"\x00\x00\x00\x01", at + 4)
    return False

"""Video of one WebRTC peer: assembles RTP packets into frames, decodes them and returns the newest decoded frame.

Decoding runs in a separate thread, so that every frame is decoded even if the reader is slow and skips frames.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import av
import av.error

from saccade.sources.errors import LiveError, StreamEndedError
from saccade.sources.gpu import HwAccel
from saccade.sources.live.coded_queue import CodedQueue
from saccade.sources.live.connection import LiveFrame, StreamStats
from saccade.sources.live.decoder import Decoder
from saccade.sources.live.packets import CodedPacket, Taps
from saccade.sources.live.source import LiveSource
from saccade.sources.rtp.depacketizer import AccessUnit, Depacketizer
from saccade.sources.rtp.h26x import H26xDepacketizer
from saccade.sources.rtp.packet import RtpPacket, signed
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import SenderClock, SenderReport
from saccade.sources.rtp.vp8 import Vp8Depacketizer
from saccade.sources.webrtc.data_channel import Messages

log = logging.getLogger(__name__)

DECODERS = {"VP8": "libvpx", "H264": "h264"}
"""FFmpeg's decoder of each supported codec, by the codec's name in SDP."""

_CAPACITY = 4096  # packets held for a retransmission: 5 MB; a keyframe of 4K has up to 3000
_ASK_AGAIN_S = 0.5  # between two requests for a keyframe; the sender needs a round trip and an encoding


class WebRtcConnection:
    """Decoded video of one WebRTC peer. The network thread passes RTP packets to `take`.

    Frames with missing data or missing reference frames are not returned. `read` returns only the newest frame, so a
    slow reader skips frames.

    Args:
        codecs: codec name in the SDP for each RTP payload type.
        hwaccel: for H.264, "auto" to use a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
        on_close: called once when the connection is closed, in the thread that calls `close`.
    """

    def __init__(
        self, codecs: dict[int, str], *, hwaccel: HwAccel = "none", on_close: Callable[[], None] | None = None
    ) -> None:
        self._codecs = codecs
        self._reorder = ReorderBuffer(_CAPACITY)
        self._hwaccel = hwaccel
        self._on_close = on_close
        self._changed = threading.Condition()  # guards everything from here to `_closed`
        self._depacketizers = {
            "VP8": Vp8Depacketizer(trust_marker=True),
            "H264": H26xDepacketizer("h264", trust_marker=True),
        }
        self._units: Depacketizer = self._depacketizers["VP8"]
        self._queue = CodedQueue()
        self._newest: LiveFrame | None = None
        self._undecodable = 0
        self._lost = 0  # frames since the last decoded one
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

    def take(self, packet: RtpPacket, now: float) -> None:
        """Process an RTP packet that arrived at time `now`, in seconds of `time.monotonic()`. Does not block."""
        with self._changed:
            if self._closed or self._codecs.get(packet.payload_type) not in DECODERS:
                return
            for one, gap, at in self._reorder.push(packet, now):
                units = self._depacketizers[self._codecs[one.payload_type]]
                if units is not self._units:  # the sender has changed the codec
                    self._units, gap = units, True
                for unit in units.push(one, gap, at):
                    self._queue.push(unit, now)
                    self._changed.notify_all()

    def heard(self, now: float) -> None:
        """Record that the WebRTC peer sent data at time `now`, in seconds of `time.monotonic()`."""
        self._heard_at = now

    def note_report(self, report: SenderReport) -> None:
        """Store the latest RTCP sender report, from which the capture times of frames are calculated."""
        self._report = report

    def asks_for_key_frame(self, now: float) -> bool:
        """Return whether to request a keyframe from the sender at time `now`; at most one request per 0.5 s."""
        with self._changed:
            needs_key = self._units.needs_key or self._queue.needs_key
            if not needs_key or now - self._asked_at < _ASK_AGAIN_S:
                return False
            self._asked_at = now
            return True

    # ---- called by the reader

    @property
    def codec(self) -> str:
        """FFmpeg's name of the video codec; "" before the first frame."""
        return self._codec

    @property
    def decoder(self) -> str:
        """Name of the decoder in use, such as "h264"; "" before the first frame."""
        return self._decoder_name

    @property
    def rate(self) -> Fraction | None:
        """Nominal frame rate: always None, because WebRTC does not state it."""
        return None

    @property
    def heard_at(self) -> float:
        """Arrival time of the last RTP packet or RTCP report, in seconds of `time.monotonic()`."""
        return self._heard_at

    @property
    def media_at(self) -> float:
        """Arrival time of the last RTP packet or RTCP report, in seconds of `time.monotonic()`."""
        return self._heard_at

    @property
    def damaged(self) -> int:
        """Number of errors: lost or malformed packets, and frames that could not be decoded."""
        malformed = sum(units.damaged_packets for units in self._depacketizers.values())
        return self._reorder.lost + malformed + self._undecodable

    @property
    def stats(self) -> StreamStats | None:
        """Packet statistics: always None, because they are collected only for RTSP."""
        return None

    def read(self, timeout_s: float) -> LiveFrame | None:
        """Return the newest unread frame, or None if none arrives within `timeout_s` seconds.

        Raises:
            StreamEndedError: if the peer has left for good.
            LiveError: if the peer has left, but may reconnect.
            SourceError: if decoding on a GPU is required and unavailable.
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
        """Stop decoding, and close the connection to the WebRTC peer. Thread-safe; may be called more than once."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._newest = None
            self._queue = CodedQueue()
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
        while (unit := self._pop()) is not None:
            name = DECODERS[unit.codec.upper()]
            if decoder is None or unit.codec != self._codec:
                self._codec = unit.codec
                decoder = Decoder(name, hwaccel=self._hwaccel if unit.codec == "h264" else "none")
            elif unit.fresh:
                decoder.forget()
            timestamp = unit.timestamp if timestamp is None else timestamp + signed(unit.timestamp - timestamp)
            if self.taps.video:
                self.taps.take(CodedPacket(name, b"", unit.data, timestamp, unit.arrived_at, unit.key))
            began = time.monotonic()
            try:
                frames = decoder.decode(unit.data, timestamp)
                failed = bool(frames) and frames[-1].is_corrupt
            except av.error.FFmpegError as error:
                log.debug("a frame could not be decoded (%s)", error.strerror)
                frames, failed = [], True
            with self._changed:
                self._queue.note_decode(time.monotonic() - began)
                self._lost += unit.dropped_before + failed
                if failed:
                    self._undecodable += 1
                    self._queue.need_key()
            if frames and not failed:  # none for parameter sets alone
                self._decoder_name = decoder.name
                captured_at, aspect = self._captured_at(unit), decoder.pixel_aspect
                self._offer(LiveFrame(frames[-1], timestamp, unit.arrived_at, captured_at, pixel_aspect=aspect))

    def _pop(self) -> AccessUnit | None:
        """Wait for the next access unit. Return None after `close`."""
        with self._changed:
            while not self._closed:
                if (unit := self._queue.pop(time.monotonic())) is not None:
                    return unit
                self._changed.wait()
        return None

    def _offer(self, frame: LiveFrame) -> None:
        with self._changed:
            if self._closed:
                return
            lost, self._lost = self._lost, 0
            if self._newest is not None:
                lost += 1 + self._newest.lost_before
            self._newest = replace(frame, lost_before=lost)
            self._changed.notify_all()

    def _captured_at(self, unit: AccessUnit) -> float | None:
        arrived = time.time() - (time.monotonic() - unit.arrived_at)
        return self._clock.captured_at(self._report, unit.timestamp, arrived) if self._report else None


class WebRtcSource(LiveSource):
    """A source with the video of one WebRTC peer. It ends when the peer disconnects. The frame size may change.

    Args:
        connection: the peer's video; closed together with the source.
        stream: name of the stream.
        vid_stride: yield every `vid_stride`-th frame.
        messages: text messages over the peer's data channel.
    """

    def __init__(
        self, connection: WebRtcConnection, *, stream: str, vid_stride: int = 1, messages: Messages | None = None
    ) -> None:
        super().__init__("webrtc:", lambda *_: connection, stream=stream, vid_stride=vid_stride)
        self.connection = connection
        connection.taps = self.taps
        self.messages = messages or Messages()

    def close(self) -> None:
        """End the iteration over frames, and disconnect the peer. Thread-safe; may be called more than once."""
        super().close()
        self.connection.close()

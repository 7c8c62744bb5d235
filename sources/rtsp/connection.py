"""Connection to an RTSP camera with H.264 or H.265 video. Each frame is decoded when its last packet arrives.

FFmpeg's RTSP client, which returns a frame only when the next frame begins, is used for other codecs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from fractions import Fraction
from typing import Literal

import av.error

from saccade.sources.gpu import HwAccel
from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.live.connection import LiveFrame, StreamStats
from saccade.sources.live.decoder import Decoder
from saccade.sources.live.packets import Taps
from saccade.sources.network.dialer import CheckAddress
from saccade.sources.network.tls import TlsPolicy
from saccade.sources.rtp.depacketizer import AccessUnit
from saccade.sources.rtp.packet import signed
from saccade.sources.rtp.rtcp import SenderClock
from saccade.sources.rtsp.receiver import Receiver
from saccade.sources.rtsp.session import open_session
from saccade.sources.rtsp.transport import TransportChoice
from saccade.sources.urls import RtspAddress

Loss = Literal["hide", "show"]
"""Frames after packet loss: dropped until the next keyframe ("hide"), or all shown and marked as damaged ("show")."""

CATCH_UP_S = 0.4  # behind by more, frames are decoded, but not converted, up to the newest
CATCH_UP_FOR_S = 0.2  # at most, before one is handed on in any case
_REMEMBERED = 64  # frames inside the decoder; H.264 allows 16


class RtspConnection:
    """One connection to an RTSP camera. The constructor starts playing.

    If receiving or decoding falls behind, older frames are dropped and counted in `LiveFrame.lost_before`.

    Args:
        address: the URL, with credentials.
        closed: event; setting it aborts all blocking calls.
        choice: selects TCP, UDP or another transport.
        hwaccel: "auto" to decode on a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
        gpu: index of the GPU that stores the decoded frames, see `gpu_decoding`.
        loss: "show" to return damaged frames, "hide" to skip them.
        tls: which TLS certificates to accept.
        check_address: raises SourceError for a forbidden address, also after a redirect; None to allow any.
        taps: callbacks that receive the encoded packets; None for none.

    Raises:
        LiveError: if the stream cannot be played.
        UnhandledCodecError: if the video is neither H.264 nor H.265.
        SourceError: if the URL is malformed, or a GPU is required and cannot decode.
    """

    def __init__(
        self,
        address: RtspAddress,
        closed: threading.Event,
        *,
        choice: TransportChoice | None = None,
        hwaccel: HwAccel = "none",
        gpu: int | None = None,
        loss: Loss = "hide",
        tls: TlsPolicy | None = None,
        check_address: CheckAddress | None = None,
        taps: Taps | None = None,
    ) -> None:
        taps = taps or Taps()
        self._decodes = taps.decode
        choice = choice or TransportChoice("tcp")
        session = open_session(address, closed, choice, tls, check_address, sound=bool(taps.sound))
        self._show_damaged = loss == "show"
        self._media = session.media
        self._codec = session.codec
        self.transport = choice.way
        """Transport of the packets, such as "tcp"."""
        try:
            self._decoder = Decoder(
                session.codec, session.media.parameter_sets, hwaccel, gpu=gpu, show_damaged=self._show_damaged
            )
            self._receiver = Receiver(session, choice, closed, show_damaged=self._show_damaged, taps=taps)
        except BaseException:
            session.client.close()
            raise
        self._time = 0  # RTP timestamp of the newest unit, never wrapped
        self._key_time: int | None = None  # of the latest keyframe
        self._key_interval_s: float | None = None
        self._clock = SenderClock()
        self._undecodable = 0
        self._lost = 0
        self._inside: dict[int, AccessUnit] = {}  # by time: what the decoder has not returned yet
        self._ready: deque[LiveFrame] = deque()

    @property
    def codec(self) -> str:
        """FFmpeg's name of the video codec, such as "h264"."""
        return self._codec

    @property
    def decoder(self) -> str:
        """Name of the decoder in use, such as "h264 (cuda)"."""
        return self._decoder.name

    @property
    def rate(self) -> Fraction | None:
        """Frame rate from the camera's session description, in frames per second; None if not stated."""
        return Fraction(self._media.rate).limit_denominator(1001) if self._media.rate else None

    @property
    def heard_at(self) -> float:
        """Time at which the camera last sent data, in seconds of `time.monotonic()`."""
        return self._receiver.heard_at

    @property
    def media_at(self) -> float:
        """Arrival time of the last video packet, in seconds of `time.monotonic()`."""
        return self._receiver.media_at

    @property
    def damaged(self) -> int:
        """Number of errors: lost or malformed packets, and frames that could not be decoded."""
        return self._receiver.damaged + self._undecodable

    @property
    def stats(self) -> StreamStats | None:
        """Packet statistics of the video stream: packet counts, keyframe interval and clock offset."""
        receiver, off = self._receiver, None
        if receiver.report is not None:
            off = receiver.report.unix_s - (time.time() - (time.monotonic() - receiver.report.at))
        return StreamStats(
            self.transport, receiver.received, receiver.lost, receiver.dropped, self._key_interval_s, off
        )

    def read(self, timeout_s: float) -> LiveFrame | None:
        """Return the next frame, or None if none arrives within `timeout_s` seconds or the connection is closed.

        Raises:
            LiveError: if the connection has failed.
        """
        began = now = time.monotonic()
        late = False
        while not self._ready:
            unit = self._receiver.pop(began + timeout_s - now)
            if unit is None:
                return None
            now = time.monotonic()
            if not self._decodes:
                continue
            self._decode(unit)
            now = time.monotonic()
            backlog_s = self._receiver.backlog_s(now)
            late = backlog_s > CATCH_UP_S or (late and backlog_s > 0.0)
            if late and now - began < CATCH_UP_FOR_S:
                self._lost += sum(1 + frame.lost_before for frame in self._ready)
                self._ready.clear()
        return self._ready.popleft()

    def close(self) -> None:
        """Stop receiving and close the connection to the camera."""
        self._receiver.close()

    def _decode(self, unit: AccessUnit) -> None:
        self._time += signed(unit.timestamp - self._time)
        self._lost += unit.dropped_before
        if unit.fresh:
            self._decoder.forget()
            self._lost += len(self._inside) if unit.dropped_before else 0
            self._inside.clear()
        if unit.key:
            if self._key_time is not None and not unit.dropped_before:
                self._key_interval_s = float((self._time - self._key_time) * LIVE_BASE)
            self._key_time = self._time
        self._inside[self._time] = unit
        if len(self._inside) > _REMEMBERED:
            del self._inside[min(self._inside)]
        report = self._receiver.report
        began = time.monotonic()
        try:
            frames = self._decoder.decode(unit.data, self._time)
        except av.error.FFmpegError:
            frames = []
            self._discard(self._time)
        self._receiver.note_decode(time.monotonic() - began)
        for frame in frames:
            source = self._inside.pop(frame.pts, unit) if frame.pts is not None else unit
            damaged = frame.is_corrupt or source.damaged
            if damaged and not self._show_damaged:
                self._discard(frame.pts)
                continue
            arrived = time.time() - (time.monotonic() - source.arrived_at)
            captured_at = self._clock.captured_at(report, source.timestamp, arrived) if report else None
            aspect = self._decoder.pixel_aspect
            self._ready.append(LiveFrame(frame, frame.pts, source.arrived_at, captured_at, self._lost, damaged, aspect))
            self._lost = 0

    def _discard(self, pts: int | None) -> None:
        """Count a frame that could not be decoded. Skip to the next keyframe, unless damaged frames are returned."""
        self._inside.pop(pts if pts is not None else -1, None)
        self._undecodable += 1
        self._lost += 1
        if not self._show_damaged:
            self._receiver.need_key()

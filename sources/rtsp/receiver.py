"""Receiving thread of an RTSP session: assembles packets into access units and queues them for the decoder.

Decoding runs in another thread, so a slow decoder cannot delay reading from the socket.
"""

from __future__ import annotations

import logging
import threading
import time

from saccade.sources.errors import LiveError
from saccade.sources.live.coded_queue import CodedQueue
from saccade.sources.live.packets import CodedPacket, Taps
from saccade.sources.rtp.depacketizer import AccessUnit
from saccade.sources.rtp.h26x import H26xDepacketizer
from saccade.sources.rtp.packet import RtpPacket, parse_rtp, signed
from saccade.sources.rtp.reorder_buffer import Ordered, ReorderBuffer
from saccade.sources.rtp.rtcp import SenderClock, SenderReport, parse_rtcp, picture_loss_indication, receiver_report
from saccade.sources.rtsp.audio import AudioReceiver
from saccade.sources.rtsp.client import Datagram, RedirectError
from saccade.sources.rtsp.session import RtspSession
from saccade.sources.rtsp.transport import TransportChoice

log = logging.getLogger(__name__)

_WAIT_S = 0.1
_GAP_WAIT_S = 0.02  # while packets are held back for a missing one
_REPORT_S = 5.0
_PROBE_S = 2.0  # of silence before the server is asked for a sign of life; its reply counts as heard
_KEY_REQUEST_S = 0.5
_LOSS_WINDOW = 5000  # packets


class Receiver:
    """Thread that receives an RTSP session's packets, from construction until `close` or an error.

    Args:
        session: RTSP session that is already playing; `close` also closes the session.
        choice: transport of later connections. The receiver switches it to TCP if UDP loses too many packets.
        show_damaged: whether to return damaged access units, see `Depacketizer`.
        closed: event; setting it aborts all blocking calls.
        taps: callbacks that receive the encoded packets in this thread; None for none.

    Attributes:
        media_at: arrival time of the last video packet, in seconds of `time.monotonic()`; 0 before the first.
        received: number of received video packets.
        report: the camera's latest RTCP sender report; None before the first.
    """

    def __init__(
        self,
        session: RtspSession,
        choice: TransportChoice,
        closed: threading.Event,
        *,
        show_damaged: bool = False,
        taps: Taps | None = None,
    ) -> None:
        self._session = session
        self._choice = choice
        self._closed = closed
        self._done = threading.Event()
        self._taps = taps or Taps()
        in_order = choice.way in ("tcp", "http")
        self._reorder = ReorderBuffer(0) if in_order else ReorderBuffer()
        self._units = H26xDepacketizer(session.codec, show_damaged=show_damaged)
        self._changed = threading.Condition()  # guards the two that follow
        self._queue = CodedQueue()
        self._error: Exception | None = None
        now = time.monotonic()
        self._started_at = self._asked_at = self._reported_at = now
        self._key_asked_at = now - _KEY_REQUEST_S
        self.media_at = 0.0
        self._window = (0, 0)  # packets received and lost when the window began
        self.received = 0
        self._time = 0  # RTP timestamp of the newest unit, never wrapped
        self._newest: tuple[int, float] | None = None  # `_time` of it, and when it arrived
        self._sound: AudioReceiver | None = None
        if session.sound is not None:
            try:
                self._sound = AudioReceiver(session.sound, in_order=in_order, began=session.began)
            except ValueError as error:
                log.warning("audio of this camera is disabled: %s", error)
        self.report: SenderReport | None = None
        self._clock = SenderClock()  # of packets for the taps
        feedback = session.media.feedback
        self._takes_pli = "nack pli" in feedback or session.media.profile.endswith("AVPF")
        self._thread = threading.Thread(target=self._receive, name="saccade rtsp", daemon=True)
        self._thread.start()

    @property
    def heard_at(self) -> float:
        """Arrival time of the last packet or RTSP reply, in seconds of `time.monotonic()`."""
        return self._session.client.heard_at

    @property
    def damaged(self) -> int:
        """Number of packets that were lost or could not be parsed."""
        return self._reorder.lost + self._units.damaged_packets

    @property
    def lost(self) -> int:
        """Number of lost RTP packets."""
        return self._reorder.lost

    @property
    def dropped(self) -> int:
        """Number of frames dropped because the decoder was too slow."""
        return self._queue.dropped

    def backlog_s(self, now: float) -> float:
        """Return for how many seconds the oldest access unit has waited for the decoder at time `now`."""
        with self._changed:
            return self._queue.age(now)

    def pop(self, timeout_s: float) -> AccessUnit | None:
        """Return the next access unit, or None if none arrives within `timeout_s` seconds or the receiver is closed.

        Raises:
            LiveError: if the connection has failed and the queue is empty.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed.is_set():
                now = time.monotonic()
                if (unit := self._queue.pop(now)) is not None:
                    return unit
                if self._error is not None:
                    raise self._error
                if now >= deadline:
                    break
                self._changed.wait(min(deadline - now, _WAIT_S))
        return None

    def note_decode(self, seconds: float) -> None:
        """Record the decoding time of an access unit in seconds. The queue uses it to detect a slow decoder."""
        with self._changed:
            self._queue.note_decode(seconds)

    def need_key(self) -> None:
        """Drop all queued and new access units until the next keyframe."""
        with self._changed:
            self._queue.need_key()

    def close(self) -> None:
        """Stop the receiving thread and close the RTSP session."""
        self._done.set()
        self._thread.join()
        if not self.received and time.monotonic() - self._started_at > _PROBE_S:
            self._choice.failed()
        self._session.client.close()
        self._error = None  # its traceback holds this object, and all that holds it: a decoder with its threads

    def _receive(self) -> None:
        client = self._session.client
        try:
            while not self._done.is_set() and not self._closed.is_set():
                datagrams = client.receive(_GAP_WAIT_S if self._reorder.holds_back else _WAIT_S)
                units: list[AccessUnit] = []
                for datagram in datagrams:
                    data: bytes | None = datagram.data
                    srtp = self._session.sound_srtp if datagram.stream else self._session.srtp
                    if srtp is not None:
                        data = srtp.decrypt(datagram.data, rtcp=datagram.rtcp)
                    if data is None:
                        continue
                    if datagram.stream:
                        self._take_sound(data, datagram)
                    elif datagram.rtcp:
                        self._take_rtcp(data, datagram.at)
                    elif packet := parse_rtp(data):
                        units += self._take_rtp(packet, datagram.at)
                now = time.monotonic()
                units += self._depacketize(self._reorder.expire(now))
                if units:
                    self._tap(units)
                    with self._changed:
                        for unit in units:
                            self._queue.push(unit, now)
                        self._changed.notify_all()
                self._maintain(now)
        except RedirectError as error:
            self._fail(LiveError("connection failed", f"the server has moved the stream to {error}"))
        except Exception as error:
            self._fail(error)

    def _tap(self, units: list[AccessUnit]) -> None:
        """Pass every received access unit to the packet callbacks."""
        sets, codec = self._session.media.parameter_sets, self._session.codec
        for unit in units:
            self._time += signed(unit.timestamp - self._time)
            self._newest = self._time, unit.arrived_at
            if self._taps.video:
                arrived = time.time() - (time.monotonic() - unit.arrived_at)
                at = self._clock.captured_at(self.report, unit.timestamp, arrived) if self.report else None
                packet = CodedPacket(codec, sets, unit.data, self._time, unit.arrived_at, unit.key, captured_at=at)
                self._taps.take(packet)

    def _take_sound(self, data: bytes, datagram: Datagram) -> None:
        if self._sound is None:
            return
        if datagram.rtcp:
            self._sound.take_rtcp(data, datagram.at, self.report, self._time)
            return
        for piece in self._sound.take_rtp(data, datagram.at, self._newest):
            self._taps.take(piece)

    def _take_rtp(self, packet: RtpPacket, at: float) -> list[AccessUnit]:
        own = self._session.media.payload_type
        if packet.payload_type != own and packet.ssrc != self._reorder.ssrc:
            return []  # audio or repair packets (RTX, FEC) that another sender sends with the video
        if packet.payload_type == own:
            self.media_at = at
            self.received += 1
        return self._depacketize(self._reorder.push(packet, at))

    def _depacketize(self, packets: list[Ordered]) -> list[AccessUnit]:
        units: list[AccessUnit] = []
        for packet, gap, at in packets:
            if packet.payload_type == self._session.media.payload_type:
                units += self._units.push(packet, gap, at)
            else:
                self._units.skip(gap)
        return units

    def _take_rtcp(self, data: bytes, at: float) -> None:
        report, leaving = parse_rtcp(data, at)
        if report and report.ssrc == self._reorder.ssrc:
            self.report = report
        if self._reorder.ssrc in leaving:
            raise LiveError("connection failed", "the camera has ended the stream")

    def _maintain(self, now: float) -> None:
        """Send keepalives, receiver reports and keyframe requests when due.

        Raises:
            LiveError: if UDP loses too many packets. The next connection then uses TCP.
        """
        client, ssrc = self._session.client, self._reorder.ssrc
        silent = now - client.heard_at > _PROBE_S and now - self._asked_at > _PROBE_S
        if silent or now - self._asked_at >= self._session.keepalive_s:
            self._asked_at = now
            client.send(self._session.keepalive, self._session.control)
        if ssrc is None:
            return
        if now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            client.send_rtcp(receiver_report(ssrc, self._reorder.highest, self._reorder.lost, self.report, now))
        if self._takes_pli and now - self._key_asked_at >= _KEY_REQUEST_S and self._waits_for_key:
            self._key_asked_at = now
            client.send_rtcp(picture_loss_indication(ssrc))
        received, lost = self.received - self._window[0], self._reorder.lost - self._window[1]
        if self._choice.is_lossy(received, lost):
            self._choice.failed()
            share = 100 * lost / (received + lost)
            raise LiveError("connection failed", f"{share:.0f} % of the packets are lost over UDP; trying TCP")
        if received > _LOSS_WINDOW:
            self._window = self.received, self._reorder.lost

    @property
    def _waits_for_key(self) -> bool:
        return self._units.needs_key or self._queue.needs_key

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

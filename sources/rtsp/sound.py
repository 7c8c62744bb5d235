"""The sound of an RTSP session: packets in order, on the clock of the video beside it.

The two streams of a camera have clocks of their own. Their RTCP reports say how they belong together; before both have
come, the sound is placed by when it arrives. Pure: the caller passes the time.
"""

from __future__ import annotations

from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.live.packets import SoundPacket
from saccade.sources.rtp.packet import RtpPacket, parse_rtp, signed
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import SenderReport, parse_rtcp
from saccade.sources.rtp.sound import SoundDepacketizer
from saccade.sources.rtsp.sdp import Media

_VIDEO_RATE = int(1 / LIVE_BASE)


class SoundReceiver:
    """Packets of sound in, `SoundPacket`s out.

    Args:
        media: of the sound.
        in_order: whether no packet overtakes another, as over TCP.

    Raises:
        ValueError: if its format is not supported.
    """

    def __init__(self, media: Media, *, in_order: bool) -> None:
        self._payload_type = media.payload_type
        self._clock = media.clock or 8000
        self._pieces = SoundDepacketizer(media.encoding, self._clock, media.channels, media.parameters)
        self._reorder = ReorderBuffer(0) if in_order else ReorderBuffer()
        self._time = 0  # RTP timestamp of the newest packet, never wrapped
        self._shift: int | None = None  # from its clock, in the video's units, to the video's
        self._report: SenderReport | None = None
        self._aligned_by: tuple[float, float] | None = None  # the wall clocks of the two reports last used

    def take_rtp(self, data: bytes, at: float, video: tuple[int, float] | None) -> list[SoundPacket]:
        """Take a packet in.

        Args:
            data: the packet.
            at: when it arrived, in seconds.
            video: time of the newest frame on the video's clock, and when that arrived; None before the first.

        Returns:
            Nothing while there is no video that it belongs to.
        """
        packet = parse_rtp(data)
        if packet is None or packet.payload_type != self._payload_type:
            return []
        found: list[SoundPacket] = []
        for one, gap in self._reorder.push(packet, at):
            found += self._depacketize(one, gap, at, video)
        return found

    def take_rtcp(self, data: bytes, at: float, video: SenderReport | None, video_time: int) -> None:
        """Take a report in, and place the sound by it and the video's.

        Args:
            data: the report.
            at: when it arrived.
            video: the latest report of the video; None before the first.
            video_time: of the newest frame, on the video's clock.
        """
        report, _ = parse_rtcp(data, at)
        if report is not None and report.ssrc == self._reorder.ssrc:
            self._report = report
        own = self._report
        if own is None or video is None or (own.unix_s, video.unix_s) == self._aligned_by:
            return
        self._aligned_by = own.unix_s, video.unix_s
        sound_at = self._time + signed(own.timestamp - self._time)
        video_at = video_time + signed(video.timestamp - video_time)
        later = round((own.unix_s - video.unix_s) * _VIDEO_RATE)
        self._shift = video_at + later - self._scaled(sound_at)

    def _depacketize(
        self, packet: RtpPacket, gap: bool, at: float, video: tuple[int, float] | None
    ) -> list[SoundPacket]:
        self._time += signed(packet.timestamp - self._time)
        pieces = self._pieces.push(self._time, packet.payload, marker=packet.marker, gap=gap)
        if self._shift is None:
            if video is None:
                return []
            self._shift = video[0] + round((at - video[1]) * _VIDEO_RATE) - self._scaled(self._time)
        sound = self._pieces
        return [
            SoundPacket(
                sound.codec,
                sound.config,
                sound.rate,
                sound.channels,
                piece.data,
                self._scaled(piece.timestamp) + self._shift,
                piece.samples * sound.rate // self._clock,
            )
            for piece in pieces
        ]

    def _scaled(self, timestamp: int) -> int:
        return timestamp * _VIDEO_RATE // self._clock

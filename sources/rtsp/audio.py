"""Audio of an RTSP session: orders packets, and converts their timestamps to the video's clock.

RTCP sender reports align the audio clock with the video clock. Before the first report, the offset between the clocks
is estimated.
"""

from __future__ import annotations

from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.live.packets import AudioPacket
from saccade.sources.rtp.audio import AudioDepacketizer
from saccade.sources.rtp.packet import RtpPacket, parse_rtp, signed
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import SenderReport, parse_rtcp
from saccade.sources.rtsp.sdp import Media

_VIDEO_RATE = int(1 / LIVE_BASE)
_PLAUSIBLE = _VIDEO_RATE  # by at most this, the timestamps in the reply to PLAY may differ from arrival times


class AudioReceiver:
    """Converts RTP packets of audio to `AudioPacket`s with timestamps on the video's clock.

    Args:
        media: description of the audio stream.
        in_order: whether packets arrive in order, as over TCP.
        began: RTP timestamps (video, audio) of the same moment, from the reply to PLAY; None if unknown.

    Raises:
        ValueError: if the audio format is not supported.
    """

    def __init__(self, media: Media, *, in_order: bool, began: tuple[int, int] | None = None) -> None:
        self._began = began
        self._payload_type = media.payload_type
        self._clock = media.clock or 8000
        self._pieces = AudioDepacketizer(media.encoding, self._clock, media.channels, media.parameters)
        self._reorder = ReorderBuffer(0) if in_order else ReorderBuffer()
        self._time = 0  # RTP timestamp of the newest packet, never wrapped
        self._shift: int | None = None  # from its clock, in the video's units, to the video's
        self._report: SenderReport | None = None
        self._aligned_by: tuple[float, float] | None = None  # the wall clocks of the two reports last used

    def take_rtp(self, data: bytes, at: float, video: tuple[int, float] | None) -> list[AudioPacket]:
        """Process an RTP packet of the audio stream.

        Args:
            data: the RTP packet.
            at: arrival time in seconds.
            video: timestamp and arrival time of the newest video frame; None before the first.

        Returns:
            The audio packets that are complete now; an empty list before the first video frame.
        """
        packet = parse_rtp(data)
        if packet is None or packet.payload_type != self._payload_type:
            return []
        found: list[AudioPacket] = []
        for one, gap, arrived_at in self._reorder.push(packet, at):
            found += self._depacketize(one, gap, arrived_at, video)
        return found

    def take_rtcp(self, data: bytes, at: float, video: SenderReport | None, video_time: int) -> None:
        """Process an RTCP packet. From a sender report, learn the offset between the audio clock and the video clock.

        Args:
            data: the RTCP packet.
            at: arrival time in seconds.
            video: the latest sender report of the video; None before the first.
            video_time: RTP timestamp of the newest video frame.
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
    ) -> list[AudioPacket]:
        self._time += signed(packet.timestamp - self._time)
        pieces = self._pieces.push(self._time, packet.payload, marker=packet.marker, gap=gap)
        if self._shift is None:
            if video is None:
                return []
            self._shift = self._first_shift(video[0] + round((at - video[1]) * _VIDEO_RATE), video[0])
        sound = self._pieces
        return [
            AudioPacket(
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

    def _first_shift(self, arrival: int, video_time: int) -> int:
        """Return an estimated offset from audio to video timestamps, for the time before the first RTCP reports.

        Args:
            arrival: arrival time of the newest audio packet, on the video's clock.
            video_time: RTP timestamp of the newest video frame.
        """
        by_arrival = arrival - self._scaled(self._time)
        if self._began is None:
            return by_arrival
        video_at = video_time + signed(self._began[0] - video_time)
        by_reply = video_at - self._scaled(self._time + signed(self._began[1] - self._time))
        return by_reply if abs(by_reply - by_arrival) <= _PLAUSIBLE else by_arrival

    def _scaled(self, timestamp: int) -> int:
        return timestamp * _VIDEO_RATE // self._clock

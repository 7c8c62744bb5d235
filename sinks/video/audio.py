"""Live audio for MP4 files: copies AAC and, if allowed, Opus, and transcodes all other codecs to AAC."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import av
import av.error
from av.audio.codeccontext import AudioCodecContext
from av.audio.fifo import AudioFifo
from av.audio.resampler import AudioResampler

from saccade.sinks.video.fragments import VIDEO_SCALE, AudioTrackInfo, Sample
from saccade.sources.live.packets import AudioPacket

log = logging.getLogger(__name__)

_TOLERANCE_S = 0.1  # by which one piece may be off the time that its samples count up to
_OFFSET_S = 0.02  # by which many pieces may be off: a lost packet, or the clocks are aligned better
_RECENT = 0.1  # weight of the newest piece in the mean offset
_SET_BACK_S = 2.0  # a clock that goes back further was set, or is another connection's
_MOST_WAITING = 4096  # pieces: 90 s of AAC


class AudioWriter:
    """Collects the audio of a live source and returns it as MP4 samples, one fragment at a time.

    Args:
        first: the first audio packet. It determines the audio format.
        copied: codecs that are copied without transcoding.

    Attributes:
        track: description of the audio track.

    Raises:
        ValueError: if FFmpeg cannot decode the audio, or cannot encode it as AAC.
    """

    def __init__(self, first: AudioPacket, copied: Sequence[str] = ("aac", "opus")) -> None:
        self._form = form_of(first)
        # The time base of Opus is always 48 kHz.
        rate = 48000 if first.codec == "opus" else first.rate
        self._coder = None if first.codec in copied else _AacCoder(replace(first, rate=rate))
        self.track = (
            self._coder.track if self._coder else AudioTrackInfo(first.codec, first.config, rate, first.channels)
        )
        # Time on the clock of packets, in the track's units; samples; data.
        self._waiting: deque[tuple[int, int, bytes]] = deque()
        self._next: int | None = None  # the time that follows what waits
        self._off = 0.0  # mean offset of the recent pieces from the times that they were given

    def fits(self, packet: AudioPacket) -> bool:
        """Return whether a packet has the audio format of the first packet."""
        return form_of(packet) == self._form

    def push(self, packet: AudioPacket) -> None:
        """Add an audio packet. Its audio format must be the format of the first packet."""
        time = packet.pts * self.track.rate // VIDEO_SCALE
        if self._coder is None:
            self._place(time, packet.samples, packet.data)
            return
        for later, samples, data in self._coder.code(packet):
            self._place(time + later, samples, data)

    def take(self, origin: int, until: int) -> tuple[int, list[Sample]]:
        """Remove and return the audio samples of one MP4 fragment.

        Args:
            origin: timestamp at which the file starts, in units of 1/90000 s.
            until: end of the fragment relative to `origin`, in units of 1/90000 s.

        Returns:
            The start time of the first sample, in units of `track.rate`, and the samples.
        """
        begin, limit = (time * self.track.rate // VIDEO_SCALE for time in (origin, origin + until))
        taken: list[tuple[int, int, bytes]] = []
        while self._waiting and self._waiting[0][0] < limit:
            one = self._waiting.popleft()
            if one[0] + one[1] // 2 >= begin:
                taken.append(one)
        if not taken:
            return 0, []
        ends = [time for time, _, _ in taken[1:]] + [taken[-1][0] + taken[-1][1]]
        samples = [Sample(data, max(1, end - time)) for (time, _, data), end in zip(taken, ends, strict=True)]
        return max(0, taken[0][0] - begin), samples

    def _place(self, time: int, samples: int, data: bytes) -> None:
        expected, tolerance = self._next, _TOLERANCE_S * self.track.rate
        if expected is not None and time - expected < -_SET_BACK_S * self.track.rate:
            self._waiting.clear()
            expected = None
        if expected is not None and time - expected < -tolerance:
            return  # what is there already does not come twice
        if expected is not None and time - expected <= tolerance:
            self._off += _RECENT * (time - expected - self._off)
            if self._off < -_OFFSET_S * self.track.rate:
                self._off += samples
                return
            if self._off <= _OFFSET_S * self.track.rate:
                time = expected
            else:
                self._off = 0.0
        else:
            self._off = 0.0
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft()
        self._waiting.append((time, samples, data))
        self._next = time + samples


def form_of(packet: AudioPacket) -> tuple[object, ...]:
    """Return the audio format of a packet: codec, configuration, sample rate and channels."""
    return packet.codec, packet.config, packet.rate, packet.channels


class _AacCoder:
    """Transcodes audio to AAC without changing the sample rate."""

    def __init__(self, first: AudioPacket) -> None:
        layout = "mono" if first.channels == 1 else "stereo"
        try:
            decoder = av.CodecContext.create(first.codec, "r")
            assert isinstance(decoder, AudioCodecContext)
            decoder.sample_rate, decoder.layout = first.rate, "mono" if first.channels == 1 else f"{first.channels}c"
            if first.channels == 2:
                decoder.layout = "stereo"
            encoder = av.CodecContext.create("aac", "w")
            assert isinstance(encoder, AudioCodecContext)
            encoder.sample_rate, encoder.layout, encoder.format = first.rate, layout, "fltp"
            encoder.time_base = Fraction(1, first.rate)
            encoder.bit_rate = 32_000 if first.rate <= 16_000 else 96_000
            encoder.open()
        except (av.error.FFmpegError, ValueError) as error:
            raise ValueError(f"audio of {first.rate} Hz (codec {first.codec}) cannot be converted to AAC") from error
        self._decoder, self._encoder = decoder, encoder
        self._resampler = AudioResampler("fltp", layout, first.rate)
        self._fifo = AudioFifo()
        self._size = encoder.frame_size or 1024
        self.track = AudioTrackInfo("aac", bytes(encoder.extradata or b""), first.rate, 1 if layout == "mono" else 2)

    def code(self, packet: AudioPacket) -> list[tuple[int, int, bytes]]:
        """Transcode an audio packet to AAC.

        Returns:
            A tuple (offset, length, data) per AAC packet. The offset is relative to the start of `packet` and can be
            negative. Offset and length are numbers of audio samples.
        """
        found = []
        held = self._fifo.samples
        try:
            for decoded in self._decoder.decode(av.Packet(packet.data)):
                for frame in self._resampler.resample(decoded):
                    frame.pts = None
                    self._fifo.write(frame)
            number = 0
            while (whole := self._fifo.read(self._size)) is not None:
                whole.pts = None
                for coded in self._encoder.encode(whole):
                    # It comes one frame late, and a decoder gives out its begin one frame late.
                    found.append(((number - 2) * self._size - held, self._size, bytes(coded)))
                number += 1
        except av.error.FFmpegError as error:
            log.debug("an audio packet could not be transcoded (%s)", error)
        return found

"""Writes the audio of a live source into annotated MP4 files, as AAC."""

from __future__ import annotations

import io
import logging
from collections import deque
from fractions import Fraction

import av
from av.container import OutputContainer

from saccade.sinks.video.audio import AudioWriter
from saccade.sinks.video.fragments import VIDEO_SCALE, sound_head_of
from saccade.sinks.video.muxer import Muxer
from saccade.sources.live.packets import AudioPacket

log = logging.getLogger(__name__)

WAIT_S = 2
"""How long the first frames of a file wait for audio, in seconds of video."""

_MOST_WAITING = 8192  # packets: 160 s of G.711


class LiveAudio:
    """Collects the audio of a live source for the MP4 files of one sink.

    `take` may be called from any thread. The other methods must be called from the thread that writes the files.
    """

    def __init__(self) -> None:
        self._taken: deque[AudioPacket] = deque(maxlen=_MOST_WAITING)
        self._writer: AudioWriter | None = None
        self._refused = ""

    def take(self, packet: AudioPacket) -> None:
        """Queue an audio packet. Its timestamp must be on the same timeline as `Frame.pts`. Does not block."""
        self._taken.append(packet)

    def writer(self) -> AudioWriter | None:
        """Return the writer with all audio received so far, or None if no audio has arrived yet."""
        while self._taken:
            packet = self._taken.popleft()
            if self._writer is None or not self._writer.fits(packet):
                try:
                    self._writer = AudioWriter(packet, copied=("aac",))
                except ValueError as error:
                    if str(error) != self._refused:
                        self._refused = str(error)
                        log.warning("audio is omitted from the video: %s", error)
                    continue
            self._writer.push(packet)
        return self._writer

    def open(self, target: OutputContainer, muxer: Muxer) -> AudioTrack | None:
        """Add an audio track to an empty MP4. Return None if no audio has arrived yet."""
        writer = self.writer()
        return None if writer is None else AudioTrack(self, writer, target, muxer)


class AudioTrack:
    """The live audio track of one MP4 file. Created by `LiveAudio.open`."""

    def __init__(self, audio: LiveAudio, writer: AudioWriter, target: OutputContainer, muxer: Muxer) -> None:
        self._audio, self._writer, self._muxer = audio, writer, muxer
        # PyAV copies the description of a stream only from another stream.
        with av.open(io.BytesIO(sound_head_of(writer.track)), format="mp4") as head:
            self._output = target.add_stream_from_template(head.streams.audio[0])

    def copy_until(self, time_s: Fraction, shift_s: Fraction) -> None:
        """Write all audio that begins before `time_s` to the file.

        Args:
            time_s: time in seconds, on the same timeline as `Frame.pts`.
            shift_s: time of the file's start in seconds, on the same timeline.
        """
        if self._audio.writer() is not self._writer:
            return  # another audio format, which only the next file can have
        begin = round(shift_s * VIDEO_SCALE)
        pts, samples = self._writer.take(begin, round(time_s * VIDEO_SCALE) - begin)
        for sample in samples:
            packet = av.Packet(sample.data)
            packet.time_base = Fraction(1, self._writer.track.rate)
            packet.pts = packet.dts = pts
            packet.duration = sample.duration
            packet.is_keyframe = True
            self._muxer.mux(packet, self._output)
            pts += sample.duration

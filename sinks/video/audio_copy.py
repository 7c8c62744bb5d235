"""Copies the audio of a file into an MP4 beside its video, packet by packet, without encoding it again.

Knows nothing of frames, results or models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Self

import av
import av.error
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer, OutputContainer

log = logging.getLogger(__name__)

# What both MP4 and browsers accept. Other codecs would make a file that some players refuse as a whole.
_COPYABLE = frozenset({"aac", "mp3", "opus", "flac", "alac", "ac3", "eac3"})


class AudioCopy:
    """The first audio stream of a file on its way into an MP4; created by `open`."""

    def __init__(self, source: InputContainer, target: OutputContainer, start_s: Fraction, shift_s: Fraction) -> None:
        self._source = source
        self._target = target
        self._input = source.streams.audio[0]
        self._output = target.add_stream_from_template(self._input)
        # AAC from MPEG-TS has a header in every packet; in an MP4 there is one for all.
        bare = self._input.codec_context.name == "aac" and not self._input.codec_context.extradata
        self._filter = BitStreamFilterContext("aac_adtstoasc", self._input) if bare else None
        self._start_s = start_s
        self._shift_s = shift_s
        self._packets = self._read()
        self._next = next(self._packets, None)

    @classmethod
    def open(cls, path: Path | None, target: OutputContainer, *, start_s: Fraction, shift_s: Fraction) -> Self | None:
        """Add the audio of `path` to `target` before anything is written there.

        Args:
            path: file with the audio.
            target: MP4 that has its video stream already.
            start_s: audio before this time in seconds is left out.
            shift_s: seconds to take off every timestamp, as was done with the video's.

        Returns:
            The copy, driven by `copy_until`; None where there is no audio, or, with a warning, none that an MP4
            can hold.
        """
        if path is None:
            return None
        try:
            source = av.open(f"file:{path}", metadata_errors="replace")
        except (av.error.FFmpegError, OSError) as error:
            log.warning("no audio: %s cannot be read again (%s)", path, error.strerror)
            return None
        codec = source.streams.audio[0].codec_context.name if source.streams.audio else None
        if codec in _COPYABLE:
            return cls(source, target, start_s, shift_s)
        if codec is not None:
            log.warning("no audio: %s is %s, which an MP4 for browsers cannot hold", path, codec)
        source.close()
        return None

    def copy_until(self, time_s: Fraction) -> None:
        """Copy all audio that begins before `time_s`, in seconds on the source's clock."""
        while self._next is not None and self._time_of(self._next) < time_s:
            packet = self._next
            shift = round(self._shift_s / packet.time_base)
            assert packet.pts is not None
            packet.pts -= shift
            packet.dts = packet.pts  # audio is never reordered
            for ready in self._filter.filter(packet) if self._filter is not None else (packet,):
                ready.stream = self._output
                self._target.mux(ready)
            self._next = next(self._packets, None)

    def close(self) -> None:
        """Close the file the audio comes from."""
        self._source.close()

    def _read(self) -> Iterator[av.Packet[av.AudioStream]]:
        """Yield the packets from `start_s` on; the encoder's priming before it, if any, is left out as well."""
        try:
            for packet in self._source.demux(self._input):
                if packet.pts is not None and packet.size and self._time_of(packet) >= self._start_s:
                    yield packet
        except av.error.FFmpegError as error:
            log.warning("the rest of the audio cannot be read (%s)", error.strerror)

    @staticmethod
    def _time_of(packet: av.Packet[av.AudioStream]) -> Fraction:
        return Fraction(packet.pts or 0) * packet.time_base

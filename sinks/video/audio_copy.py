"""Copies the audio of a media file into an MP4 without transcoding."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import av
import av.error
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer, OutputContainer

from saccade.sinks.video.muxer import Muxer
from saccade.sources.demux import FileDemuxer
from saccade.sources.video_stream import NoVideoError, choose_video

log = logging.getLogger(__name__)

# What both MP4 and browsers accept. Other codecs would make a file that some players refuse as a whole.
_COPYABLE = frozenset({"aac", "mp3", "opus", "flac", "alac", "ac3", "eac3"})
_OVERLAP_S = Fraction(1, 10)  # less is moved on, as a careless muxer writes it
_PAUSE_S = 10  # a longer one at the end of the video is a jump, and no packet lasts longer
_WORTH_SAYING_S = Fraction(1, 20)


@dataclass(slots=True)
class _Sound:
    """An audio packet with its timestamp and duration in the source file, in seconds."""

    packet: av.Packet[Any]
    time_s: Fraction
    lasts_s: Fraction


class AudioCopy:
    """Copies the first audio stream of a media file into an MP4. Created by `AudioCopy.open`."""

    def __init__(self, path: Path, source: InputContainer, target: OutputContainer, muxer: Muxer) -> None:
        self._path = path
        self._source = source
        self._muxer = muxer
        self._input = source.streams.audio[0]
        self._output = target.add_stream_from_template(self._input)
        # AAC from MPEG-TS has a header in every packet; in an MP4 there is one for all.
        bare = self._input.codec_context.name == "aac" and not self._input.codec_context.extradata
        self._filter = BitStreamFilterContext("aac_adtstoasc", self._input) if bare else None
        self._end_s: Fraction | None = None  # of what is copied
        self._left_out_s = Fraction(0)
        self._sounds = self._read()
        self._next = next(self._sounds, None)

    @classmethod
    def open(cls, path: Path | None, target: OutputContainer, muxer: Muxer) -> Self | None:
        """Add an audio track to an MP4, to copy another file's audio. Call this before anything is written to the MP4.

        Args:
            path: media file with the audio, or None.
            target: MP4 that already has its video stream.
            muxer: writes into `target`.

        Returns:
            The audio copy, or None if there is no audio that can be copied.
        """
        if path is None:
            return None
        try:
            source = av.open(f"file:{path}", metadata_errors="replace")
        except (av.error.FFmpegError, OSError) as error:
            log.warning("audio is omitted: %s cannot be reopened to copy its audio (%s)", path, error.strerror)
            return None
        codec = source.streams.audio[0].codec_context.name if source.streams.audio else None
        if codec in _COPYABLE:
            return cls(path, source, target, muxer)
        if codec is not None:
            log.warning("audio is omitted: the audio codec of %s is %s, which browsers do not play in MP4", path, codec)
        source.close()
        return None

    def skip_until(self, time_s: Fraction, *, wanted: bool) -> None:
        """Skip all audio packets that begin before a time.

        Args:
            time_s: time in the source file, in seconds.
            wanted: whether `close` reports the skipped audio as missing.
        """
        while self._next is not None and self._next.time_s < time_s:
            if wanted:
                self._left_out_s += self._next.lasts_s
            self._next = next(self._sounds, None)

    def copy_until(self, time_s: Fraction, shift_s: Fraction) -> None:
        """Copy all audio packets that begin before a time.

        Args:
            time_s: time in the source file, in seconds.
            shift_s: seconds to subtract from the audio timestamps.
        """
        while (sound := self._next) is not None and sound.time_s < time_s:
            self._next = next(self._sounds, None)
            over = self._end_s is not None and sound.time_s < self._end_s - _OVERLAP_S
            if over or not self._mux(sound, shift_s):
                self._left_out_s += sound.lasts_s
            elif self._end_s is None or sound.time_s + sound.lasts_s > self._end_s:
                self._end_s = sound.time_s + sound.lasts_s

    def close(self) -> None:
        """Close the media file, and log a warning if audio is missing in the copy."""
        self._source.close()
        if self._next is not None and self._next.time_s - (self._end_s or self._next.time_s) > _PAUSE_S:
            log.warning("%s: audio ends early, because its timestamps jump ahead of the video", self._path)
        elif self._next is not None and self._end_s is None and not self._left_out_s:
            log.warning("%s: audio is omitted, because it does not overlap the video in time", self._path)
        self._next = None
        if self._left_out_s >= _WORTH_SAYING_S:
            log.warning(
                "%s: %.2f s of audio were omitted, because no video was recorded at that time",
                self._path,
                self._left_out_s,
            )
            self._left_out_s = Fraction(0)

    def _mux(self, sound: _Sound, shift_s: Fraction) -> bool:
        packet = sound.packet
        packet.pts = packet.dts = round((sound.time_s - shift_s) / packet.time_base)  # audio is never reordered
        try:
            ready = self._filter.filter(packet) if self._filter is not None else [packet]
        except av.error.FFmpegError:
            return False
        written = [self._muxer.mux(one, self._output) for one in ready]
        return all(written)

    def _read(self) -> Iterator[_Sound]:
        """Yield the audio packets. A packet without a timestamp starts at the previous packet's end."""
        # The video is read as well: both are on one clock, see `InputClock`.
        demuxer = FileDemuxer(self._source, _video_beside(self._source))
        end_s = Fraction(0)
        for packet in demuxer.packets():
            if packet.stream_index == self._input.index and packet.size:
                base = packet.time_base
                time_s = end_s if packet.pts is None else packet.pts * base
                lasts_s = max(0, packet.duration or 0) * base
                if lasts_s > _PAUSE_S:  # up to the next packet, after a gap
                    lasts_s, packet.duration = Fraction(0), 0
                end_s = time_s + lasts_s
                yield _Sound(packet, time_s, lasts_s)


def _video_beside(container: InputContainer) -> av.VideoStream | None:
    try:
        return choose_video(container)
    except NoVideoError:
        return None

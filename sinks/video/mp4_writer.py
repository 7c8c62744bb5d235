"""Encodes frames into one MP4 that browsers can play. A killed process leaves a playable file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import av
import av.error
import cv2
import numpy as np
from av.container import OutputContainer

from saccade.sinks.base import SinkError
from saccade.sinks.os_errors import write_failure
from saccade.sinks.video.audio_copy import AudioCopy
from saccade.sinks.video.encoder import Mp4Encoder, VideoFormat
from saccade.sinks.video.live_audio import WAIT_S, AudioTrack, LiveAudio
from saccade.sinks.video.muxer import Muxer
from saccade.sinks.video.packet_times import LONGEST_UNITS
from saccade.sinks.video.part_file import SUFFIX, PartFile
from saccade.sources.frame import Frame, RgbImage

log = logging.getLogger(__name__)

_GOP_S = 2  # between keyframes, in seconds; a kill costs at most that
_FIRST_AT_MOST_S = 1  # a first frame later than this (a live stream, a start in the middle) is moved to 0
DEFAULT_RATE = Fraction(25)
_FINEST = 1_000_000  # units a second: with finer ones an MP4 could show a frame for seconds only
_LONGEST_SIDE = 16_384  # of x264
_LARGEST_AREA = 2**28  # of FFmpeg, which adds 128 to each side


class Mp4Writer:
    """An MP4 file that is being written. The first frame determines its size and time base.

    Args:
        path: path of the file.
        first: the first frame to add.
        encoder: encoder for the format of `first`.
        audio_from: file or live source of the audio; None for a video without audio.
        from_zero: whether to shift the timestamps so that the file starts at 0.
    """

    def __init__(
        self,
        path: Path,
        first: Frame,
        encoder: Mp4Encoder,
        audio_from: Path | LiveAudio | None,
        *,
        from_zero: bool = False,
    ) -> None:
        self._base = first.time_base
        form = encoder.form
        self._width, self._height, self._pixel_aspect = form.width, form.height, form.pixel_aspect
        early = 0 <= first.pts * self._base < _FIRST_AT_MOST_S
        self._shift = 0 if early and not from_zero else first.pts
        self._unit = form.unit  # of the file
        self._step = max(1, round(1 / (form.rate * self._base)))  # how long the newest frame is shown, as an estimate
        self._last_pts: int | None = None
        self._last_unit: int | None = None  # that frame's time in the file
        self._held: av.Packet[av.VideoStream] | None = None  # the newest: the next one gives its duration
        self._waiting: list[av.Packet[av.VideoStream]] = []  # for live audio, without which no file can begin
        self._key_pts = first.pts
        self._unfinished = 0
        self._longest = max(1, int((LONGEST_UNITS - 1) * self._unit / self._base))
        self._encoder = encoder
        self._file = PartFile(path)
        try:
            self._container = open_mp4(self._file, self._unit.denominator)
            self._muxer = Muxer(self._container)
            self._video = encoder.add_stream(self._container)
            self._audio: AudioCopy | AudioTrack | None = None
            self._live_audio = audio_from if isinstance(audio_from, LiveAudio) else None
            if not isinstance(audio_from, LiveAudio):
                self._audio = AudioCopy.open(audio_from, self._container, self._muxer)
            if isinstance(self._audio, AudioCopy):
                # Audio before the first frame is kept, unless the timestamps are shifted.
                whole = first.capture_clock == "file" and first.captured_at <= 0
                start = self._shift if whole else first.pts
                self._audio.skip_until(start * self._base, wanted=whole)
        except BaseException:
            self._file.give_up()
            raise

    @property
    def path(self) -> Path:
        """Current path of the MP4 file; it ends in `.part` until the file is playable."""
        return self._file.path

    @property
    def unfinished(self) -> int:
        """Number of frames that a write error would lose, because their MP4 fragment is incomplete."""
        return self._unfinished

    def moved(self) -> bool:
        """Return whether another program has deleted, moved or replaced the file."""
        return self._file.moved()

    def add(self, frame: Frame, image: RgbImage) -> None:
        """Encode and write one image, together with the audio up to the frame's timestamp.

        Args:
            frame: the frame, for its presentation timestamp.
            image: the image to encode, (height, width, 3) uint8 RGB.
        """
        if self._last_pts is not None and (too_long := frame.pts - self._last_pts - self._longest) > 0:
            log.warning(
                "%s: a gap between frames is too long for an MP4 and was shortened by %.0f s",
                frame.stream,
                too_long * self._base,
            )
            if self._audio is not None:
                self._audio.copy_until((frame.pts - too_long) * self._base, self._shift * self._base)
            if isinstance(self._audio, AudioCopy):
                self._audio.skip_until(frame.pts * self._base, wanted=True)
            self._shift += too_long
        unit = round((frame.pts - self._shift) * self._base / self._unit)
        if self._last_unit is not None:
            unit = max(unit, self._last_unit + 1)
        self._last_unit = unit
        key = self._last_pts is None or (frame.pts - self._key_pts) * self._base >= _GOP_S
        if key:
            self._key_pts = frame.pts
        if self._last_pts is not None:
            self._step = frame.pts - self._last_pts
        self._last_pts = frame.pts
        if self._audio is not None:
            self._audio.copy_until(frame.pts * self._base, self._shift * self._base)
        for packet in self._encoder.encode(self._fit(image, frame.pixel_aspect), unit, key=key):
            self._mux(packet)
        self._unfinished += 1

    def close(self, until_pts: int | None = None) -> None:
        """Write the remaining audio, and convert the fragmented file to an ordinary MP4.

        Args:
            until_pts: presentation timestamp at which the last frame ends; None to repeat the previous frame duration.
        """
        try:
            if self._last_pts is not None and until_pts is not None:
                self._step = until_pts - self._last_pts
            self._release(round(self._step * self._base / self._unit))
            self._begin_file()
            if self._last_pts is not None and self._audio is not None:
                self._audio.copy_until((self._last_pts + self._step) * self._base, self._shift * self._base)
            self._file.begin_end()
            self._container.close()
        except BaseException:
            self.give_up()
            raise
        self._file.finish()
        self._close_audio()

    def give_up(self) -> None:
        """Close the file after a write error. Its complete fragments stay playable."""
        self._file.give_up()
        with suppress(av.error.FFmpegError, OSError):
            self._container.close()  # writes nothing any more
        self._close_audio()

    def _close_audio(self) -> None:
        if isinstance(self._audio, AudioCopy):
            self._audio.close()

    def _mux(self, packet: av.Packet[av.VideoStream]) -> None:
        if self._held is not None:
            self._release((packet.pts or 0) - (self._held.pts or 0))
        self._held = packet

    def _release(self, duration: int) -> None:
        if self._held is not None:
            self._held.duration = duration
            held, self._held = self._held, None
            if self._live_audio is None:
                self._write(held)
                return
            self._waiting.append(held)
            waited_s = ((held.pts or 0) - (self._waiting[0].pts or 0)) * self._unit
            if waited_s >= WAIT_S or self._live_audio.writer() is not None:
                self._begin_file()

    def _begin_file(self) -> None:
        """Add the live audio track, if audio has arrived. Then write the queued video packets."""
        if self._live_audio is not None:
            self._audio = self._live_audio.open(self._container, self._muxer)
            self._live_audio = None
        waiting, self._waiting = self._waiting, []
        for packet in waiting:
            self._write(packet)

    def _write(self, packet: av.Packet[av.VideoStream]) -> None:
        ends_fragment = packet.is_keyframe
        self._muxer.mux(packet, self._video)
        if ends_fragment:
            self._unfinished = 1
            self._file.publish()

    def _fit(self, image: RgbImage, pixel_aspect: Fraction) -> RgbImage:
        """Scale an image to the size and the pixel aspect ratio of the MP4's first frame."""
        height, width = image.shape[:2]
        alike = pixel_aspect == self._pixel_aspect
        if (height, width) == (self._height, self._width) and alike:
            return image
        right, below = self._width - width, self._height - height
        if right in (0, 1) and below in (0, 1) and alike:
            return np.asarray(cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), dtype=np.uint8)
        shown = float(width * pixel_aspect / self._pixel_aspect)
        scale = min(self._width / shown, self._height / height)
        size = max(1, round(shown * scale)), max(1, round(height * scale))
        smooth = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        fitted = np.zeros((self._height, self._width, 3), dtype=np.uint8)
        left, top = (self._width - size[0]) // 2, (self._height - size[1]) // 2
        fitted[top : top + size[1], left : left + size[0]] = cv2.resize(image, size, interpolation=smooth)
        return fitted


def check_size(path: Path, width: int, height: int) -> None:
    """Raise SinkError if H.264 does not support a frame size in pixels."""
    if max(width, height) > _LONGEST_SIDE or (width + 130) * (height + 130) > _LARGEST_AREA:
        raise SinkError(
            f"cannot write {path}: the frames are {width} x {height} pixels, and H.264 allows {_LONGEST_SIDE} "
            "pixels per side and 260 million in total; write records (.jsonl) instead"
        )


def _timescale(base: Fraction) -> int:
    """Return the time scale of an MP4 track (units per second) for a source's time base (seconds per unit).

    The time scale is in the range that players support: about 1000 to 1,000,000 units per second.
    """
    timescale = base.denominator
    while timescale < 1000:
        timescale *= 10
    return min(timescale, _FINEST)


def _plain(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == SUFFIX else path


def open_mp4(file: PartFile | str, timescale: int) -> OutputContainer:
    """Open a new MP4 that is playable while it is being written.

    Args:
        file: the file or its path.
        timescale: units per second of the timestamps.
    """
    options = {
        # hybrid_fragmented + flush_packets: readable up to the last full fragment after kill -9, and an ordinary MP4
        # after close(). delay_moov: keeps the time of the first frame, which is moved to 0 otherwise.
        "movflags": "hybrid_fragmented+frag_keyframe+delay_moov",
        "flush_packets": "1",
        # Do not hold back video, by up to 10 s, for audio that has ended.
        "max_interleave_delta": "1",
        "video_track_timescale": str(timescale),
        "movie_timescale": str(timescale),
    }
    return av.open(file, "w", format="mp4", options=options)


class OpenMp4:
    """Writes consecutive MP4 files for a sink, one open file at a time.

    Args:
        rate: approximate frames per second of the source.
        audio_from: file or live source of the audio; None for videos without audio.
        from_zero: whether to shift every file so that it starts at 0.

    Raises:
        SinkError: by every method, if the file cannot be written. The file is then closed, and `begin` may open a
            new one.
    """

    def __init__(self, rate: Fraction | None, audio_from: Path | LiveAudio | None, *, from_zero: bool) -> None:
        self._rate = rate or DEFAULT_RATE
        self._audio_from = audio_from
        self._from_zero = from_zero
        self._writer: Mp4Writer | None = None
        self._encoder: Mp4Encoder | None = None

    def __bool__(self) -> bool:
        return self._writer is not None

    @property
    def path(self) -> Path | None:
        """Current path of the MP4 file; None if no file is open."""
        return self._writer.path if self._writer is not None else None

    def begin(self, path: Path, first: Frame) -> None:
        """Open a new MP4 file for the frame `first`. The previous file must be closed."""
        with self._giving_up(path):
            encoder = self._encoder_for(path, first)
            self._writer = Mp4Writer(path, first, encoder, self._audio_from, from_zero=self._from_zero)

    def _encoder_for(self, path: Path, first: Frame) -> Mp4Encoder:
        """Return an encoder for frames like `first`: the current encoder if it has the same format, else a new one."""
        check_size(_plain(path), first.width, first.height)
        width, height = first.width + first.width % 2, first.height + first.height % 2
        unit = Fraction(1, _timescale(first.time_base))
        form = VideoFormat(width, height, first.pixel_aspect, unit, self._rate)
        if self._encoder is None or self._encoder.failed or self._encoder.form != form:
            self._encoder = Mp4Encoder(form)
        return self._encoder

    def add(self, frame: Frame, image: RgbImage) -> None:
        """Write a frame to the open MP4 file."""
        assert self._writer is not None
        with self._giving_up(self._writer.path):
            self._writer.add(frame, image)

    def end_if_moved(self) -> None:
        """Close the file if another program has deleted or moved it, so that the next frame starts a new file."""
        if self._writer is not None and self._writer.moved():
            log.warning("%s was deleted or moved while being written; starting a new file", self._writer.path)
            self.end()

    def end(self, until_pts: int | None = None) -> None:
        """Close the MP4 file, if one is open. `until_pts` is the timestamp at which its last frame ends."""
        if self._writer is not None:
            with self._giving_up(self._writer.path, "finish"):
                self._writer.close(until_pts)
            self._writer = None

    @contextmanager
    def _giving_up(self, path: Path, what: str = "write") -> Iterator[None]:
        try:
            yield
        except (av.error.FFmpegError, OSError) as error:
            writer, self._writer = self._writer, None
            lost = 0
            if writer is not None:
                writer.give_up()
                lost = writer.unfinished
            raise SinkError(f"cannot {what} {_plain(path)}: {write_failure(path, error)}", lost) from error

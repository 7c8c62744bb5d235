"""An annotated MP4 that plays in a browser, keeps the source's clock, and survives being killed while it is written.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import logging
import os
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import av
import av.error
import cv2
import numpy as np
from av.container import OutputContainer
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from saccade.engine.results import Result
from saccade.sinks.base import SinkError
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, drawn_latency
from saccade.sinks.video.audio_copy import AudioCopy
from saccade.sources.frame import Frame, RgbImage

log = logging.getLogger(__name__)

_GOP_S = 2  # between key frames, in seconds; a kill costs at most that
_FIRST_AT_MOST_S = 1  # a first frame later than this (a live stream, a start in the middle) is moved to 0
DEFAULT_RATE = Fraction(25)
_LONGEST_UNITS = 2**31 - 2  # the longest time that an MP4 can show a frame
_CRF = "23"
_THREADS = min(4, os.cpu_count() or 1)  # zero latency cuts each frame into one slice a thread; more cost quality


class Mp4Sink:
    """Writes frames with their overlay as H.264 (yuv420p) in MP4.

    - Timestamps are the source's own, exactly: pts × time_base of every frame is kept, and so is a variable frame rate.
      Only where the first frame comes later than 1 s is the whole clock moved so that the file starts at 0.
    - A frame of odd width or height is padded by repeating its last column or row. Frames of another size than the
      first are fitted into it with black borders.
    - Until it is closed the file is fragmented, one fragment a group of pictures of 2 s, so a killed process loses at
      most the last one; closing turns it into an ordinary MP4.
    - Audio is copied, not encoded again, as far as the video goes.
    - The index of all frames is kept in memory, 9 MB an hour at 30 a second: for an endless stream, use
      `RecordingSink`.

    Args:
        path: file to write, replaced if it exists.
        rate: frames per second of the source, as a hint for the encoder and for how long the last frame is shown.
        audio_from: file to copy the audio from, usually the source itself; None for a silent video.

    Raises:
        SinkError: if the file cannot be written, or is `audio_from` itself.
    """

    shared: ClassVar[bool] = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rate: Fraction | None = None,
        audio_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self._path = Path(path)
        self._rate = rate or DEFAULT_RATE
        self._audio_from = Path(audio_from) if audio_from is not None else None
        if self._audio_from is not None and self._path.exists() and self._path.samefile(self._audio_from):
            raise SinkError(f"{self._path} is the source itself; write to another file")
        self._created = not self._path.exists()
        try:
            with self._path.open("ab"):  # fails now rather than at the first frame; an old file stays until then
                pass
        except OSError as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from None
        self._writer: Mp4Writer | None = None
        self._closed = False

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Draw and encode one frame.

        Raises:
            SinkError: if it cannot be written, such as on a full disk.
        """
        try:
            if self._writer is None:
                self._writer = Mp4Writer(self._path, frame, self._rate, self._audio_from)
            self._writer.add(frame, draw(frame.image, result, drawn_latency(frame, latency)))
        except (av.error.FFmpegError, OSError) as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Finish the file; where no frame came, no file is left. A second call does nothing.

        Raises:
            SinkError: if the end of the file cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        if self._writer is None:
            if self._created:
                self._path.unlink(missing_ok=True)
            log.warning("no frame came, so %s was not written", self._path)
            return
        try:
            self._writer.close()
        except (av.error.FFmpegError, OSError) as error:
            raise SinkError(f"cannot finish {self._path}: {error.strerror}") from error


class Mp4Writer:
    """An MP4 being written. Created with the first frame, which gives size and clock.

    Args:
        path: the file.
        first: the frame that is added first.
        rate, audio_from: as for `Mp4Sink`.
        from_zero: move the clock so that the file starts at 0, however early the first frame is.
    """

    def __init__(
        self, path: Path, first: Frame, rate: Fraction, audio_from: Path | None, *, from_zero: bool = False
    ) -> None:
        self._base = first.time_base
        self._width = first.width + first.width % 2
        self._height = first.height + first.height % 2
        early = 0 <= first.pts * self._base < _FIRST_AT_MOST_S
        self._shift = 0 if early and not from_zero else first.pts
        self._step = max(1, round(1 / (rate * self._base)))  # how long the newest frame is shown, as an estimate
        self._last_pts: int | None = None
        self._held: av.Packet[av.VideoStream] | None = None  # the newest: the next one gives its duration
        self._key_pts = first.pts
        self._longest = int(_LONGEST_UNITS / _timescale(self._base) / self._base)
        self._reformatter = VideoReformatter()
        self._container = _open_mp4(path, self._base)
        self._video = self._add_video(rate)
        self._audio = AudioCopy.open(
            audio_from, self._container, start_s=first.pts * self._base, shift_s=self._shift * self._base
        )

    def add(self, frame: Frame, image: RgbImage) -> None:
        """Encode `image` at the time of `frame`, after the audio up to then."""
        if self._last_pts is not None and (too_long := frame.pts - self._last_pts - self._longest) > 0:
            log.warning("%s: a gap of %.0f s is too long for an MP4", frame.stream, too_long * self._base)
            self._shift += too_long
        encoded = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(self._fit(image), format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
        )
        encoded.pts = frame.pts - self._shift
        encoded.time_base = self._base
        encoded.pict_type = PictureType.NONE
        if self._last_pts is None or (frame.pts - self._key_pts) * self._base >= _GOP_S:
            encoded.pict_type = PictureType.I
            self._key_pts = frame.pts
        if self._last_pts is not None:
            self._step = frame.pts - self._last_pts
        self._last_pts = frame.pts
        if self._audio is not None:
            self._audio.copy_until(frame.pts * self._base)
        self._mux(encoded)

    def close(self, until_pts: int | None = None) -> None:
        """Write the rest of the audio and turn the file into an ordinary MP4.

        Args:
            until_pts: end of the last frame's display; None to show it as long as the one before it.
        """
        try:
            if self._last_pts is not None:
                if until_pts is not None:
                    self._step = until_pts - self._last_pts
                if self._audio is not None:
                    self._audio.copy_until((self._last_pts + self._step) * self._base)
            self._mux(None)
            self._release(self._step)
        finally:
            if self._audio is not None:
                self._audio.close()
            self._container.close()

    def _add_video(self, rate: Fraction) -> av.VideoStream:
        # zerolatency: no frame waits in the encoder, where a kill would lose it on top of the open group (it holds back
        # none instead of 11 on two cores, for 1.8 times the bytes at the same quality). Without reordering pts = dts as
        # well, so the timestamps need no edit list.
        video = self._container.add_stream(
            "libx264",
            rate=min(rate, Fraction(240)).limit_denominator(100_000),
            options={"preset": "veryfast", "tune": "zerolatency", "crf": _CRF, "forced-idr": "1"},
        )
        video.width, video.height, video.pix_fmt = self._width, self._height, "yuv420p"
        video.time_base = self._base
        context = video.codec_context
        context.time_base = self._base
        context.gop_size = 2**16  # key frames are requested by time, see add(); x264 adds one at a cut
        context.thread_count = _THREADS
        # Written into the stream: players guess from the size otherwise, and each guesses differently. BT.709 has the
        # same number in all three lists.
        context.colorspace = context.color_primaries = context.color_trc = Colorspace.ITU709
        context.color_range = ColorRange.MPEG
        return video

    def _mux(self, frame: av.VideoFrame | None) -> None:
        for packet in self._video.encode(frame):
            if self._held is not None:
                self._release((packet.pts or 0) - (self._held.pts or 0))
            self._held = packet

    def _release(self, duration: int) -> None:
        if self._held is not None:
            self._held.duration = duration
            self._container.mux(self._held)
            self._held = None

    def _fit(self, image: RgbImage) -> RgbImage:
        """The image in the size of the video, which is that of the first frame, made even."""
        height, width = image.shape[:2]
        if (height, width) == (self._height, self._width):
            return image
        right, below = self._width - width, self._height - height
        if right in (0, 1) and below in (0, 1):
            return np.asarray(cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), dtype=np.uint8)
        scale = min(self._width / width, self._height / height)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        smooth = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        fitted = np.zeros((self._height, self._width, 3), dtype=np.uint8)
        left, top = (self._width - size[0]) // 2, (self._height - size[1]) // 2
        fitted[top : top + size[1], left : left + size[0]] = cv2.resize(image, size, interpolation=smooth)
        return fitted


def _timescale(base: Fraction) -> int:
    """Units a second of the file's clocks.

    They are the source's own, so that its timestamps stay the same integers; coarse ones are made finer, since players
    expect less than a millisecond.
    """
    timescale = base.denominator
    while timescale < 1000:
        timescale *= 10
    return timescale


def _open_mp4(path: Path, base: Fraction) -> OutputContainer:
    timescale = _timescale(base)
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
    return av.open(f"file:{path}", "w", format="mp4", options=options)

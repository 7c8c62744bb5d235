"""Encodes the frames of a recording in H.264, with one encoder for all of its files."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from fractions import Fraction

import av
from av.container import OutputContainer
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from saccade.sources.frame import RgbImage

_CRF = "23"
_THREADS = min(4, os.cpu_count() or 1)  # zero latency cuts each frame into one slice a thread; more cost quality
_HIGHEST_RATE = Fraction(240)


@dataclass(slots=True, frozen=True)
class VideoFormat:
    """The video format that all files of one encoder share.

    Attributes:
        width, height: size in pixels, even numbers.
        pixel_aspect: pixel width divided by pixel height.
        unit: seconds per unit of the clock.
        rate: frames per second, as a hint.
    """

    width: int
    height: int
    pixel_aspect: Fraction
    unit: Fraction
    rate: Fraction


class Mp4Encoder:
    """An H.264 encoder that serves several files in turn.

    Each file starts with a keyframe at its own time 0, while the encoder's clock continues. Opening an encoder per
    segment would fragment the heap, since each one takes 4 to 60 MB and several threads.

    Args:
        form: format of all images and files.
    """

    def __init__(self, form: VideoFormat) -> None:
        self.form = form
        # PyAV opens an encoder with the header of a container, and copies streams from streams only. Nothing is ever
        # written into this container.
        self._container = av.open(io.BytesIO(), "w", format="mp4", options={"movflags": "empty_moov+delay_moov"})
        self._stream = _add_stream(self._container, form)
        self._container.start_encoding()
        self._reformatter = VideoReformatter()
        self._offset = 0  # from a file's clock to the encoder's
        self._last = -1  # on the encoder's clock

    def add_stream(self, container: OutputContainer) -> av.VideoStream:
        """Add a stream for this encoder's packets to a container."""
        stream: av.VideoStream = container.add_stream_from_template(self._stream)
        return stream

    def encode(self, image: RgbImage, pts: int, *, key: bool) -> list[av.Packet[av.VideoStream]]:
        """Encode one image without delay.

        Args:
            image: (height, width, 3) uint8 RGB, in the size of the format.
            pts: presentation timestamp in clock units, later than the previous one of the same file.
            key: whether to encode a keyframe, as the first image of a file must be.

        Returns:
            The encoded packets, with timestamps of the file.
        """
        frame = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(image, format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
        )
        if pts + self._offset <= self._last:  # another file
            self._offset = self._last + 1 - pts
        frame.pts = self._last = pts + self._offset
        frame.time_base = self.form.unit
        frame.pict_type = PictureType.I if key else PictureType.NONE
        packets = list(self._stream.encode(frame))
        for packet in packets:
            packet.pts = packet.dts = pts
        return packets


def _add_stream(container: OutputContainer, form: VideoFormat) -> av.VideoStream:
    # zerolatency: no frame waits in the encoder, where a kill would lose it on top of the open group (it holds back
    # none instead of 11 on two cores, for 1.8 times the bytes at the same quality). Without reordering pts = dts as
    # well, so the timestamps need no edit list.
    video = container.add_stream(
        "libx264",
        rate=min(form.rate, _HIGHEST_RATE).limit_denominator(100_000),
        options={"preset": "veryfast", "tune": "zerolatency", "crf": _CRF, "forced-idr": "1"},
    )
    video.width, video.height, video.pix_fmt = form.width, form.height, "yuv420p"
    video.time_base = form.unit
    context = video.codec_context
    context.time_base = form.unit
    context.sample_aspect_ratio = form.pixel_aspect
    context.gop_size = 2**16  # key frames are requested by time, see `Mp4Writer.add`; x264 adds one at a cut
    context.thread_count = _THREADS
    # Written into the stream: players guess from the size otherwise, and each guesses differently. BT.709 has the
    # same number in all three lists.
    context.colorspace = context.color_primaries = context.color_trc = Colorspace.ITU709
    context.color_range = ColorRange.MPEG
    return video

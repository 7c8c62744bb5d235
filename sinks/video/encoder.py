"""Low-latency video encoding for files and live viewers: H.264 on a GPU or the CPU, or VP8 on the CPU.

If GPU encoding fails, the CPU is used, and the GPU is retried later.
"""

from __future__ import annotations

import io
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar

import av
import av.error
import cv2
import numpy as np
from av.container import OutputContainer
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from numpy.typing import NDArray

from saccade.sources.frame import RgbImage

log = logging.getLogger(__name__)

T = TypeVar("T")

Codec = Literal["H264", "VP8"]
TIME_BASE = Fraction(1, 90_000)  # of all video over RTP

_CHOICES: dict[Codec, tuple[str, ...]] = {"H264": ("h264_nvenc", "libx264"), "VP8": ("libvpx",)}
_QUALITY = "23"
_NVENC = {
    "preset": "p4", "tune": "ull", "rc": "vbr", "cq": _QUALITY, "zerolatency": "1", "delay": "0", "forced-idr": "1",
}  # fmt: skip
_LIVE_OPTIONS = {
    # Constant quality up to the bit rate: a still scene costs next to nothing, a moving one is not blurred.
    "libx264": {"preset": "superfast", "tune": "zerolatency", "crf": _QUALITY, "forced-idr": "1"},
    "h264_nvenc": _NVENC,
    "libvpx": {"deadline": "realtime", "cpu-used": "-12", "lag-in-frames": "0"},  # below 0 the speed is fixed
}
_FILE_OPTIONS = {
    # zerolatency: no frame waits in the encoder, where a kill would lose it on top of the open group (it holds back
    # none instead of 11 on two cores, for 1.8 times the bytes at the same quality). Without reordering pts = dts as
    # well, so the timestamps need no edit list.
    "libx264": {"preset": "veryfast", "tune": "zerolatency", "crf": _QUALITY, "forced-idr": "1"},
    "h264_nvenc": _NVENC,
}
_MAX_SIDE = 1920  # larger images are scaled down for viewers: a page does not show 4K, and encoding it takes a core
_RATES = (1.0, 60.0)  # plausible frames a second
_ANOTHER_RATE = 1.5  # a rate that is off by more than this factor needs other settings
_THREADS = min(4, os.cpu_count() or 1)  # zero latency cuts each frame into one slice a thread; more cost quality
_HIGHEST_RATE = Fraction(240)
_NO_KEYS = 2**16  # frames between two keyframes, which are requested
_RETRY_S, _RETRY_MOST_S = 10.0, 600.0


class Backoff:
    """Decides when to retry an encoder that could not be opened. The retry delay doubles with each failure."""

    def __init__(self) -> None:
        self._failures = 0
        self._at = float("-inf")

    def allows(self, now: float) -> bool:
        """Return whether the retry delay has passed at time `now`, in seconds."""
        return now >= self._at

    def failed(self, now: float) -> None:
        """Record that opening the encoder failed at time `now` in seconds, and double the retry delay."""
        self._at = now + min(_RETRY_S * 2**self._failures, _RETRY_MOST_S)
        self._failures = min(self._failures + 1, 16)

    def worked(self) -> None:
        """Reset the retry delay, because opening the encoder succeeded."""
        self._failures, self._at = 0, float("-inf")


_backoffs: dict[str, Backoff] = {name: Backoff() for names in _CHOICES.values() for name in names}


def _open_first(codec: Codec, opened: Callable[[str], T]) -> tuple[str, T]:
    """Open the first working encoder of a codec. Return its name and the opened encoder.

    Args:
        codec: video codec, "H264" or "VP8".
        opened: function that opens an encoder. Its argument is FFmpeg's name of the encoder.

    Raises:
        FFmpegError, ValueError: if no encoder works.
    """
    choices = _CHOICES[codec]  # FFmpeg lists GPU encoders even without a GPU, so each is tested by opening it
    while True:
        now = time.monotonic()
        name = next((one for one in choices if _backoffs[one].allows(now)), choices[-1])
        try:
            found = opened(name)
        except (av.error.FFmpegError, ValueError) as error:
            if name == choices[-1]:
                raise
            _note_failure(name, error)
        else:
            _backoffs[name].worked()
            return name, found


def _note_failure(name: str, error: Exception) -> None:
    _backoffs[name].failed(time.monotonic())
    log.info("the encoder %s is not available (%s)", name, error)


def _set_colors(context: Any) -> None:
    """Declare the colour space BT.709 in the video. Players otherwise guess a colour space from the image size."""
    # BT.709 has the same number in all three lists.
    context.colorspace = context.color_primaries = context.color_trc = Colorspace.ITU709
    context.color_range = ColorRange.MPEG


class _Converter:
    """Converts RGB images to yuv420p video frames.

    Args:
        codec: selects the colour space: BT.601 for VP8, BT.709 for H.264.
    """

    def __init__(self, codec: Codec) -> None:
        self._colorspace = Colorspace.ITU709 if codec == "H264" else Colorspace.ITU601
        self._reformatter = VideoReformatter()

    def convert(self, image: RgbImage, pts: int, unit: Fraction, *, key: bool) -> av.VideoFrame:
        """Convert an RGB image to a yuv420p frame for the encoder.

        Args:
            image: (height, width, 3) uint8 RGB, with even sides.
            pts: presentation timestamp in units of `unit`.
            unit: seconds per unit.
            key: whether the encoder must make the frame a keyframe.
        """
        frame = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(image, format="rgb24"),
            format="yuv420p",
            dst_colorspace=self._colorspace,
            dst_color_range=ColorRange.MPEG,
        )
        frame.pts, frame.time_base = pts, unit
        frame.pict_type = PictureType.I if key else PictureType.NONE
        return frame


def even(image: RgbImage) -> RgbImage:
    """Pad an image to even width and height by repeating its last column and row."""
    below, right = image.shape[0] % 2, image.shape[1] % 2
    if not right and not below:
        return image
    return np.asarray(cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), dtype=np.uint8)


def try_encoder(name: str) -> None:
    """Test whether an encoder works, by encoding a small image.

    Raises:
        FFmpegError, ValueError: if the encoder does not work.
    """
    context = _open_live(name, (320, 240), 25.0)
    frame = av.VideoFrame.from_ndarray(np.zeros((360, 320), np.uint8), format="yuv420p")
    frame.pts, frame.time_base = 0, TIME_BASE
    if not [*context.encode(frame), *context.encode(None)]:
        raise ValueError(f"the encoder {name} returned no packet for a test image")


# ---- for files


@dataclass(slots=True, frozen=True)
class VideoFormat:
    """Video format of an MP4 encoder and of all files that it writes.

    Attributes:
        width, height: size in pixels, even numbers.
        pixel_aspect: pixel width divided by pixel height.
        unit: seconds per unit of the timestamps.
        rate: approximate number of frames per second.
    """

    width: int
    height: int
    pixel_aspect: Fraction
    unit: Fraction
    rate: Fraction


class Mp4Encoder:
    """An H.264 encoder for several consecutive MP4 files. Each file starts with a keyframe.

    Args:
        form: format of all images and files.

    Attributes:
        name: FFmpeg's name of the encoder.
        failed: whether the encoder has failed. A new encoder is then needed for the next file.

    Raises:
        FFmpegError: if no encoder works.
    """

    def __init__(self, form: VideoFormat) -> None:
        self.form = form
        # Once for all files, because opening an encoder many times fragments the heap.
        self.name, (self._container, self._stream) = _open_first("H264", lambda name: _open_for_files(name, form))
        self.failed = False
        self._converter = _Converter("H264")
        self._offset = 0  # from a file's clock to the encoder's
        self._last = -1  # on the encoder's clock

    def add_stream(self, container: OutputContainer) -> av.VideoStream:
        """Add a video stream for the encoded packets to a media container."""
        stream: av.VideoStream = container.add_stream_from_template(self._stream)
        return stream

    def encode(self, image: RgbImage, pts: int, *, key: bool) -> list[av.Packet[av.VideoStream]]:
        """Encode one image and return its packets. The encoder buffers no images.

        Args:
            image: (height, width, 3) uint8 RGB, with the width and height of the `VideoFormat`.
            pts: presentation timestamp in units of `VideoFormat.unit`. It must increase within a file.
            key: whether to encode a keyframe. The first image of a file must be a keyframe.

        Returns:
            The encoded packets, with `pts` as their timestamp.

        Raises:
            FFmpegError: if the encoder has failed.
        """
        if pts + self._offset <= self._last:  # another file
            self._offset = self._last + 1 - pts
        self._last = pts + self._offset
        try:
            packets = list(self._stream.encode(self._converter.convert(image, self._last, self.form.unit, key=key)))
        except av.error.FFmpegError as error:
            self.failed = True
            _note_failure(self.name, error)
            raise
        for packet in packets:
            packet.pts = packet.dts = pts
        return packets


def _open_for_files(name: str, form: VideoFormat) -> tuple[OutputContainer, av.VideoStream]:
    # PyAV opens an encoder with the header of a container, and copies streams from streams only. Nothing is ever
    # written into this container.
    container = av.open(io.BytesIO(), "w", format="mp4", options={"movflags": "empty_moov+delay_moov"})
    rate = min(form.rate, _HIGHEST_RATE).limit_denominator(100_000)
    video = container.add_stream(name, rate=rate, options=_FILE_OPTIONS[name])
    assert isinstance(video, av.VideoStream)
    video.width, video.height, video.pix_fmt = form.width, form.height, "yuv420p"
    video.time_base = form.unit
    context = video.codec_context
    context.time_base = form.unit
    context.sample_aspect_ratio = form.pixel_aspect
    context.gop_size = _NO_KEYS  # x264 adds one at a cut
    context.max_b_frames = 0
    if name == "libx264":
        context.thread_count = _THREADS
    _set_colors(context)
    container.start_encoding()
    return container, video


# ---- for live viewers


@dataclass(slots=True, frozen=True)
class EncodedImage:
    """An encoded image.

    Attributes:
        data: the encoded image; H.264 is in Annex B format.
        pts: presentation timestamp in units of 1/90000 s.
        key: whether the image is a keyframe.
    """

    data: bytes
    pts: int
    key: bool


def bit_rate(width: int, height: int, rate: float) -> int:
    """Return the maximum bit rate in bit/s for a video size in pixels and a frame rate in frames per second.

    Examples at 30 frames per second: 1.5 Mbit/s for 640×360, and 7 Mbit/s for 1920×1080.
    """
    return round(1_500_000 * math.pow(width * height * rate / (640 * 360 * 30), 0.7))


class LiveEncoder:
    """Encodes live video. If the image size or the frame rate changes, the encoder is replaced.

    Args:
        codec: video codec, "H264" or "VP8".
        halvings: how many times the full bit rate is halved.
    """

    def __init__(self, codec: Codec, halvings: int = 0) -> None:
        self._codec = codec
        self._halvings = halvings
        self._name = _CHOICES[codec][0]
        self._context: Any = None
        self._size = (0, 0)
        self._rate = 0.0
        self._converter = _Converter(codec)

    @property
    def name(self) -> str:
        """FFmpeg's name of the encoder, such as "libx264"."""
        return self._name

    def encode(self, image: NDArray[np.uint8], pts: int, rate: float, *, key: bool = False) -> EncodedImage | None:
        """Encode one image.

        Args:
            image: (height, width, 3) uint8 RGB.
            pts: presentation timestamp in units of 1/90000 s, later than that of the previous image.
            rate: approximate number of images per second.
            key: whether to encode a keyframe.

        Returns:
            The encoded image; None if the encoder dropped it.

        Raises:
            FFmpegError: if no encoder works.
        """
        image = _fit(image)
        size, rate = (image.shape[1], image.shape[0]), min(max(rate, _RATES[0]), _RATES[1])
        steady = 1 / _ANOTHER_RATE < rate / max(self._rate, 0.01) < _ANOTHER_RATE
        if self._context is None or size != self._size or not steady:
            self._context, self._size, self._rate, key = None, size, rate, True
        packets = self._packets(self._converter.convert(image, pts, TIME_BASE, key=key))
        if not packets:
            return None
        return EncodedImage(b"".join(bytes(packet) for packet in packets), pts, packets[0].is_keyframe)

    def _packets(self, frame: av.VideoFrame) -> list[Any]:
        """Encode a frame and return its packets. If no encoder is open, open the first one that works."""
        while True:
            if self._context is None:
                self._name, self._context = _open_first(self._codec, self._open)
            try:
                return list(self._context.encode(frame))
            except (av.error.FFmpegError, ValueError) as error:
                self._context = None
                if self._name == _CHOICES[self._codec][-1]:
                    raise
                _note_failure(self._name, error)

    def _open(self, name: str) -> Any:
        return _open_live(name, self._size, self._rate, self._halvings)


def _open_live(name: str, size: tuple[int, int], rate: float, halvings: int = 0) -> Any:
    context: Any = av.CodecContext.create(name, "w")
    most = bit_rate(*size, rate) >> halvings
    context.width, context.height, context.pix_fmt = *size, "yuv420p"
    context.time_base, context.framerate = TIME_BASE, Fraction(rate).limit_denominator(1000)
    context.gop_size = _NO_KEYS
    context.max_b_frames = 0
    context.options = {**_LIVE_OPTIONS[name], "maxrate": str(most), "bufsize": str(most // 2)}
    if name != "libx264":  # which prefers a rate to a quality, given both
        context.bit_rate = most
    if name != "libvpx":
        context.profile = "Baseline" if name == "libx264" else "baseline"
        _set_colors(context)
    context.open()
    return context


def _fit(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scale an image to even width and height of at most `_MAX_SIDE` pixels."""
    height, width = image.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(width, height))
    if scale < 1:
        size = max(2, round(width * scale / 2) * 2), max(2, round(height * scale / 2) * 2)
        return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    return even(image)

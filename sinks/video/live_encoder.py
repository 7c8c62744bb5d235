"""Encodes images for live viewers without delay: H.264 on a GPU or the CPU, or VP8. Keyframes come on request."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import av
import av.error
import cv2
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Codec = Literal["H264", "VP8"]
TIME_BASE = Fraction(1, 90_000)  # of all video over RTP

_MAX_SIDE = 1920  # larger images are scaled down: a page does not show 4K, and encoding it takes a core
_RATES = (1.0, 60.0)  # plausible frames a second
_ANOTHER_RATE = 1.5  # a rate that is off by more than this factor needs other settings
_CHOICES: dict[Codec, tuple[str, ...]] = {"H264": ("h264_nvenc", "libx264"), "VP8": ("libvpx",)}
_OPTIONS = {
    # Constant quality up to the bit rate: a still scene costs next to nothing, a moving one is not blurred.
    "libx264": {"preset": "superfast", "tune": "zerolatency", "crf": "23", "forced-idr": "1"},
    "h264_nvenc": {
        "preset": "p4", "tune": "ull", "rc": "vbr", "cq": "23", "zerolatency": "1", "delay": "0", "forced-idr": "1",
    },
    "libvpx": {"deadline": "realtime", "cpu-used": "-12", "lag-in-frames": "0"},  # below 0 the speed is fixed
}  # fmt: skip

_RETRY_S, _RETRY_MOST_S = 10.0, 600.0


@dataclass(slots=True, frozen=True)
class EncodedImage:
    """An encoded image: its data (Annex B for H.264), its time in units of 1/90000 s, and whether it is a keyframe."""

    data: bytes
    pts: int
    key: bool


def bit_rate(width: int, height: int, rate: float) -> int:
    """Return the highest bit rate in bit/s for images of a size in pixels at `rate` images per second.

    It grows less than proportionally, since large and frequent images are more redundant: 1.5 Mbit/s for 640×360 at
    30, 7 Mbit/s for 1920×1080.
    """
    return round(1_500_000 * math.pow(width * height * rate / (640 * 360 * 30), 0.7))


class Backoff:
    """Retry schedule of a failed GPU encoder, with growing delays, since each attempt creates a CUDA context.

    A session may fail temporarily, if the GPU has no free memory or session. The caller passes the time.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._at = float("-inf")

    def allows(self, now: float) -> bool:
        """Return whether the encoder may be tried at a time in seconds."""
        return now >= self._at

    def failed(self, now: float) -> None:
        """Record a failed attempt."""
        self._at = now + min(_RETRY_S * 2**self._failures, _RETRY_MOST_S)
        self._failures = min(self._failures + 1, 16)

    def worked(self) -> None:
        """Record a successful attempt."""
        self._failures, self._at = 0, float("-inf")


_backoffs: dict[str, Backoff] = {name: Backoff() for names in _CHOICES.values() for name in names}


def try_encoder(name: str) -> None:
    """Encode a small image to test an encoder, since FFmpeg also lists encoders without a device.

    Raises:
        FFmpegError, ValueError: if the encoder does not work.
    """
    context = _open(name, (320, 240), 25.0)
    frame = av.VideoFrame.from_ndarray(np.zeros((360, 320), np.uint8), format="yuv420p")
    frame.pts, frame.time_base = 0, TIME_BASE
    if not [*context.encode(frame), *context.encode(None)]:
        raise ValueError("it returned no packet for an image")


class LiveEncoder:
    """One stream of encoded images. Its settings follow the input's size and rate; each change forces a keyframe.

    Args:
        codec: codec of the stream.
        halvings: number of times that the highest bit rate is halved.
    """

    def __init__(self, codec: Codec, halvings: int = 0) -> None:
        self._codec = codec
        self._halvings = halvings
        self._name = _CHOICES[codec][0]
        self._context: Any = None
        self._size = (0, 0)
        self._rate = 0.0
        self._reformatter = VideoReformatter()

    @property
    def name(self) -> str:
        """FFmpeg's name of the encoder, such as "libx264"."""
        return self._name

    def encode(self, image: NDArray[np.uint8], pts: int, rate: float, *, key: bool = False) -> EncodedImage | None:
        """Encode one image.

        Args:
            image: (height, width, 3) uint8 RGB.
            pts: presentation timestamp in units of 1/90000 s, later than the previous one.
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
        frame = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(image, format="rgb24"),
            format="yuv420p",
            # VP8 has one colour space; a player reads H.264's from the stream.
            dst_colorspace=Colorspace.ITU709 if self._codec == "H264" else Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
        )
        frame.pts, frame.time_base = pts, TIME_BASE
        frame.pict_type = PictureType.I if key else PictureType.NONE
        packets = self._packets(frame)
        if not packets:
            return None
        return EncodedImage(b"".join(bytes(packet) for packet in packets), pts, packets[0].is_keyframe)

    def _packets(self, frame: av.VideoFrame) -> list[Any]:
        """Return the packets of the first working encoder. A missing GPU is noticed only when an encoder is opened."""
        choices = _CHOICES[self._codec]
        while True:
            try:
                if self._context is None:
                    now = time.monotonic()
                    self._name = next((one for one in choices if _backoffs[one].allows(now)), choices[-1])
                    self._context = _open(self._name, self._size, self._rate, self._halvings)
                    _backoffs[self._name].worked()
                return list(self._context.encode(frame))
            except (av.error.FFmpegError, ValueError) as error:
                self._context = None
                if self._name == choices[-1]:
                    raise
                _backoffs[self._name].failed(time.monotonic())
                log.info("the encoder %s is not available (%s)", self._name, error)


def _open(name: str, size: tuple[int, int], rate: float, halvings: int = 0) -> Any:
    context: Any = av.CodecContext.create(name, "w")
    most = bit_rate(*size, rate) >> halvings
    context.width, context.height, context.pix_fmt = *size, "yuv420p"
    context.time_base, context.framerate = TIME_BASE, Fraction(rate).limit_denominator(1000)
    context.gop_size = 2**16  # key frames are requested
    context.max_b_frames = 0
    context.options = {**_OPTIONS[name], "maxrate": str(most), "bufsize": str(most // 2)}
    if name != "libx264":  # which prefers a rate to a quality, given both
        context.bit_rate = most
    if name != "libvpx":
        context.profile = "Baseline" if name == "libx264" else "baseline"
        context.colorspace = context.color_primaries = context.color_trc = Colorspace.ITU709
        context.color_range = ColorRange.MPEG
    context.open()
    return context


def _fit(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Scale the image to even sides of at most `_MAX_SIDE` pixels."""
    height, width = image.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(width, height))
    size = max(2, round(width * scale / 2) * 2), max(2, round(height * scale / 2) * 2)
    if scale < 1:
        return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    right, below = width % 2, height % 2
    if right or below:
        return np.asarray(cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), dtype=np.uint8)
    return image

"""Codes pictures for people who watch now: H.264 on the GPU where there is one, else on the CPU; or VP8.

Nothing waits in the encoder, and a key frame comes when it is asked for. Knows no frames, results, network or pipeline.
"""

from __future__ import annotations

import logging
import math
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

_MAX_SIDE = 1920  # larger pictures are made smaller: nobody watches 4K in a page, and coding it takes a core
_RATES = (1.0, 60.0)  # frames a second that are believed
_ANOTHER_RATE = 1.5  # a rate that is off by more than this factor asks for other settings
_CHOICES: dict[Codec, tuple[str, ...]] = {"H264": ("h264_nvenc", "libx264"), "VP8": ("libvpx",)}
_OPTIONS = {
    # Constant quality up to the bit rate: a still scene costs next to nothing, a moving one is not blurred.
    "libx264": {"preset": "superfast", "tune": "zerolatency", "crf": "23", "forced-idr": "1"},
    "h264_nvenc": {
        "preset": "p4", "tune": "ull", "rc": "vbr", "cq": "23", "zerolatency": "1", "delay": "0", "forced-idr": "1",
    },
    "libvpx": {"deadline": "realtime", "cpu-used": "-12", "lag-in-frames": "0"},  # below 0 the speed is fixed
}  # fmt: skip

_unusable: set[str] = set()  # encoders that this machine has no device for


@dataclass(slots=True, frozen=True)
class Coded:
    """A coded picture: its bytes (H.264 as Annex B), its time in units of 1/90000 s, and whether it needs no other."""

    data: bytes
    pts: int
    key: bool


def bit_rate(width: int, height: int, rate: float) -> int:
    """Most bits a second for pictures of that size in pixels, `rate` a second.

    1.5 Mb/s for 640×360 at 30, 4 for 1280×720, 7 for 1920×1080: less than proportional, since large pictures and fast
    ones repeat themselves more.
    """
    return round(1_500_000 * math.pow(width * height * rate / (640 * 360 * 30), 0.7))


class LiveEncoder:
    """One stream of coded pictures. Its settings follow the size and the rate of what comes, each time at a key frame.

    Args:
        codec: what to make.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._choices = [name for name in _CHOICES[codec] if name not in _unusable]
        self._context: Any = None
        self._size = (0, 0)
        self._rate = 0.0
        self._reformatter = VideoReformatter()

    @property
    def name(self) -> str:
        """FFmpeg's name of what codes, such as "libx264"."""
        return self._choices[0]

    def encode(self, image: NDArray[np.uint8], pts: int, rate: float, *, key: bool = False) -> Coded | None:
        """Code one picture.

        Args:
            image: (height, width, 3) uint8 RGB.
            pts: its time in units of 1/90000 s, later than the last one's.
            rate: how many such pictures come a second, about.
            key: make it one that needs no other.

        Returns:
            The coded picture; None where the encoder left it out.

        Raises:
            FFmpegError: if no encoder can do it.
        """
        image = _fitted(image)
        size, rate = (image.shape[1], image.shape[0]), min(max(rate, _RATES[0]), _RATES[1])
        steady = 1 / _ANOTHER_RATE < rate / max(self._rate, 0.01) < _ANOTHER_RATE
        if self._context is None or size != self._size or not steady:
            self._context, self._size, self._rate, key = None, size, rate, True
        picture = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(image, format="rgb24"),
            format="yuv420p",
            # VP8 knows no other colours; a player takes H.264's from the stream.
            dst_colorspace=Colorspace.ITU709 if self._codec == "H264" else Colorspace.ITU601,
            dst_color_range=ColorRange.MPEG,
        )
        picture.pts, picture.time_base = pts, TIME_BASE
        picture.pict_type = PictureType.I if key else PictureType.NONE
        packets = self._encoded(picture)
        if not packets:
            return None
        return Coded(b"".join(bytes(packet) for packet in packets), pts, packets[0].is_keyframe)

    def _encoded(self, picture: av.VideoFrame) -> list[Any]:
        """The packets, of the first encoder that can: one without a GPU is found out only when it is opened."""
        while True:
            try:
                if self._context is None:
                    self._context = _opened(self.name, self._size, self._rate)
                return list(self._context.encode(picture))
            except (av.error.FFmpegError, ValueError) as error:
                self._context = None
                if len(self._choices) == 1:
                    raise
                _unusable.add(self.name)  # to find out again takes a new CUDA context each time
                log.debug("%s cannot be used (%s)", self._choices.pop(0), error)


def _opened(name: str, size: tuple[int, int], rate: float) -> Any:
    context: Any = av.CodecContext.create(name, "w")
    most = bit_rate(*size, rate)
    context.width, context.height, context.pix_fmt = *size, "yuv420p"
    context.time_base, context.framerate = TIME_BASE, Fraction(rate).limit_denominator(1000)
    context.gop_size = 2**16  # key frames are asked for
    context.max_b_frames = 0
    context.options = {**_OPTIONS[name], "maxrate": str(most), "bufsize": str(most // 2)}
    if name != "libx264":  # which takes a rate instead of a quality, if it is given both
        context.bit_rate = most
    if name != "libvpx":
        context.profile = "Baseline" if name == "libx264" else "baseline"
        context.colorspace = context.color_primaries = context.color_trc = Colorspace.ITU709
        context.color_range = ColorRange.MPEG
    context.open()
    return context


def _fitted(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture with even sides, none longer than `_MAX_SIDE`."""
    height, width = image.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(width, height))
    size = max(2, round(width * scale / 2) * 2), max(2, round(height * scale / 2) * 2)
    if scale < 1:
        return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    right, below = width % 2, height % 2
    if right or below:
        return np.asarray(cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), dtype=np.uint8)
    return image

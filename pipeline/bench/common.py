"""Code that several benchmarks use: parsing of command-line flags, test images, and results as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from itertools import islice

import cv2
import numpy as np

from saccade.engine.tasks import Detect
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.errors import ConfigError
from saccade.sources import RgbImage, open_source

MAX_COUNT = 64  # number of batch slots of the engine
_IMAGES = 20  # number of different images, so that the number of boxes varies as in practice
_STRIDE = 10  # the demo clip has 200 frames


def parse_size(text: str) -> tuple[int, int]:
    """Parse an image size such as `640x360`, in pixels.

    Raises:
        ConfigError: if the text is not a size.
    """
    match = re.fullmatch(r"([1-9]\d{0,4})[x×]([1-9]\d{0,4})", text.strip().lower())
    if not match:
        raise ConfigError(f"--size: should be width x height in pixels, such as 640x360, got {text!r}")
    return int(match[1]), int(match[2])


def parse_counts(text: str, flag: str) -> list[int]:
    """Parse a comma-separated list of integers from 1 to 64, such as `1,8,32`.

    Raises:
        ConfigError: if the text is invalid. The error message contains `flag`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d?", part) and int(part) <= MAX_COUNT for part in parts):
        raise ConfigError(
            f"{flag}: should be whole numbers from 1 to {MAX_COUNT} separated by commas, such as 1,8,32, got {text!r}"
        )
    return [int(part) for part in parts]


def parse_range(text: str, flag: str) -> tuple[float, float]:
    """Parse a frame rate such as `15`, or a range of frame rates such as `5-30`, in frames per second (at most 1000).

    Raises:
        ConfigError: if the text is invalid. The error message contains `flag`.
    """
    match = re.fullmatch(r"(\d{1,4}(?:\.\d+)?)(?:-(\d{1,4}(?:\.\d+)?))?", text.strip())
    low, high = (float(match[1]), float(match[2] or match[1])) if match else (0.0, 0.0)
    if not 0 < low <= high <= 1000:
        raise ConfigError(f"{flag}: should be a frame rate or range up to 1000 fps, such as 15 or 5-30, got {text!r}")
    return low, high


def parse_weights(text: str, flag: str) -> list[float]:
    """Parse a comma-separated list of scheduling weights from 0.01 to 100, such as `1,1,4`.

    Raises:
        ConfigError: if the text is invalid. The error message contains `flag`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,3}(\.\d+)?", part) and 0.01 <= float(part) <= 100 for part in parts):
        raise ConfigError(
            f"{flag}: should be scheduling weights from 0.01 to 100 separated by commas, such as 1,1,4, got {text!r}"
        )
    return [float(part) for part in parts]


@dataclass(slots=True, frozen=True)
class Measurement:
    """The results of a benchmark."""

    def as_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)


def images_of(source: str, width: int, height: int, count: int = _IMAGES) -> list[RgbImage]:
    """Return every tenth frame of a video source, scaled to `width` × `height` pixels.

    Args:
        source: path or URL of the video source.
        width: width of the images, in pixels.
        height: height of the images, in pixels.
        count: number of images.

    Raises:
        SourceError: if the source cannot be used.
    """
    with open_source(source, vid_stride=_STRIDE) as frames:
        return [
            np.asarray(cv2.resize(frame.image, (width, height), interpolation=cv2.INTER_AREA), dtype=np.uint8)
            for frame in islice(frames, count)
        ]


def distinct_images(size: tuple[int, int]) -> list[RgbImage]:
    """Return 64 different images, made from frames of the demo clip."""
    # If an image were repeated, the engine could reuse its work on the image.
    shown = images_of(str(DEMO_CLIP), *size)
    dice = np.random.default_rng(0)
    return [np.roll(shown[i % len(shown)], int(dice.integers(1, size[0])), axis=1) for i in range(64)]


def person_task(objects: int | None) -> Detect:
    """Return a task that detects persons, with a fixed number of objects per image if `objects` is given."""
    return Detect("person") if objects is None else Detect("person", objects, conf=0.0)

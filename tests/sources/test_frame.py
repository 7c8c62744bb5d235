"""Frames whose image is made when it is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from saccade.sources import Frame
from saccade.sources.rgb import RgbConverter
from tests.support.clips import numbered_image

OTHERS = {
    "stream": "door",
    "index": 3,
    "pts": 9,
    "time_base": Fraction(1, 25),
    "captured_at": 1.0,
    "capture_clock": "arrival",
    "decoded_at": 2.0,
    "decode_ms": 1.0,
}


def test_an_image_is_made_once_and_when_it_is_read() -> None:
    calls = []
    frame = Frame.deferred(lambda: calls.append(1) or numbered_image(7, 160, 120), **OTHERS)
    assert (frame.stream, frame.index, calls) == ("door", 3, [])
    assert frame.image is frame.image
    assert (frame.width, frame.height) == (160, 120)
    assert np.array_equal(frame.image, numbered_image(7, 160, 120))
    assert replace(frame, dropped_before=2).image is frame.image
    assert calls == [1]


def test_a_missing_attribute_is_an_error() -> None:
    frame = Frame.deferred(lambda: numbered_image(7, 160, 120), **OTHERS)
    with pytest.raises(AttributeError, match="'colour'"):
        _ = frame.colour  # type: ignore[attr-defined]


def test_threads_share_one_conversion() -> None:
    decoded = av.VideoFrame.from_ndarray(numbered_image(7, 160, 120), format="rgb24").reformat(format="yuv420p")
    frame = Frame.deferred(RgbConverter().later(decoded), **OTHERS)
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda _: frame.image, range(8)))
    assert all(image is images[0] for image in images)
    assert np.abs(images[0].astype(int) - numbered_image(7, 160, 120)).max() < 60

"""Frames as decoders give them: what an engine makes of their planes is what swscale makes."""

from __future__ import annotations

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import VideoReformatter

from saccade.pipeline.runtime.engine_stream import yuv_image
from saccade.sources.planes import planes_of
from saccade.sources.rgb import Orientation, RgbConverter

UNSPECIFIED, LIMITED, FULL = 0, 1, 2


def noise(width: int, height: int, matrix: int, color_range: int) -> av.VideoFrame:
    """Every value of luma and chroma beside every other."""
    frame = av.VideoFrame(width, height, "yuv420p")
    generator = np.random.default_rng(0)
    for plane in frame.planes:
        plane.update(generator.integers(0, 256, plane.buffer_size, np.uint8).tobytes())
    frame.colorspace, frame.color_range = matrix, color_range
    return frame


@pytest.mark.parametrize("color_range", [UNSPECIFIED, LIMITED, FULL])
@pytest.mark.parametrize("matrix", [1, 2, 5, 6, 7, 9])
def test_planes_are_as_swscale_converts_them(matrix: int, color_range: int) -> None:
    frame = noise(640, 64, matrix, color_range)
    wanted = RgbConverter().later(frame)().astype(int)
    pairs = VideoReformatter().reformat(frame, format="nv12")  # as a GPU gives them
    pairs.colorspace, pairs.color_range = matrix, color_range
    for decoded in (frame, pairs):
        planes = planes_of(decoded)
        assert planes is not None
        assert planes.gpu is None
        assert np.abs(yuv_image(planes).rgb().numpy() - wanted).max() <= 2  # 0 on x86
        assert np.array_equal(RgbConverter().later(decoded)(), wanted)


def test_they_outlive_the_frame_they_are_of() -> None:
    frame = noise(64, 48, 1, LIMITED)
    planes = planes_of(frame)
    assert planes is not None
    image = yuv_image(planes)
    before = image.rgb()
    del frame, planes
    others = [noise(64, 48, 1, FULL) for _ in range(8)]
    assert torch.equal(image.rgb(), before)
    assert len(others) == 8


@pytest.mark.parametrize(("width", "height", "form"), [(63, 48, "yuv420p"), (64, 47, "yuv420p"), (64, 48, "yuv444p")])
def test_what_is_no_420_of_even_sides_is_converted(width: int, height: int, form: str) -> None:
    assert planes_of(av.VideoFrame(width, height, form)) is None


def test_a_deferred_image_has_a_size_before_it_is_made() -> None:
    later = RgbConverter().later(noise(64, 48, 1, LIMITED))
    assert later.size == (64, 48)
    assert later.planes() is not None
    assert later().shape == (48, 64, 3)
    assert later.planes() is None


@pytest.mark.parametrize("turn", [Orientation(mirror_y=True), Orientation(mirror_x=True), Orientation(transpose=True)])
def test_a_frame_that_is_to_be_turned_has_no_planes(turn: Orientation) -> None:
    """One that is only mirrored from top to bottom has a `rotation` of 0."""
    assert RgbConverter().later(av.VideoFrame(64, 48, "yuv420p"), turn).planes() is None

"""The brightness of frames for motion, without their images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from saccade.pipeline.analytics.motion import FINE_ROWS, MotionMap
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.runtime.luma import FrameLuma
from saccade.sources import Frame, YuvPlanes, open_source
from tests.support.sinks.results import live_frame


def frame_of(luma: torch.Tensor, gpu: int | None) -> Frame:
    """A frame whose image must not be made."""

    def convert() -> Any:
        raise AssertionError("an image was made")

    planes = YuvPlanes((luma, luma[::2, ::2]), (104597, 132201, 25675, 53279), full_range=False, gpu=gpu)
    known = live_frame(0.0)
    height, width = luma.shape
    return Frame.deferred(
        convert,
        **{name: getattr(known, name) for name in ("stream", "index", "pts", "time_base", "captured_at")},
        capture_clock="file",
        decoded_at=0.0,
        decode_ms=0.0,
        size=(width, height),
        planes=lambda: planes,
    )


def noise(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (1080, 1920), np.uint8))


def test_planes_in_main_memory_are_read_where_they_are() -> None:
    luma = noise(0)
    read = FrameLuma()(frame_of(luma, None), 2)
    assert read is not None
    assert np.array_equal(read, luma.numpy()[::2, ::2])


def test_a_frame_without_planes_is_converted() -> None:
    assert FrameLuma()(live_frame(0.0), 2) is None
    motion = MotionMap(FINE_ROWS, FrameLuma())
    assert motion.see(live_frame(0.0)).area == 1.0


def test_motion_of_planes_is_that_of_the_image() -> None:
    with open_source(DEMO_CLIP, end=3.0, paced=True) as source:
        plain, of_planes, apart = MotionMap(), MotionMap(read=FrameLuma()), []
        for frame in source:
            kept = replace_planes(frame)
            a, b = of_planes.see(kept), plain.see(frame)
            apart.append(abs(a.area - b.area))
    assert len(apart) >= 25
    assert max(apart[1:]) < 0.05


def replace_planes(frame: Frame) -> Frame:
    """The frame with planes that stay, as its own are gone once its image is made."""
    planes = frame.planes() if frame.planes else None
    assert planes is not None
    return frame.changed(planes=lambda: planes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_is_on_a_gpu_comes_one_frame_later() -> None:
    read, seen = FrameLuma(), [noise(seed) for seed in range(4)]
    got = [read(frame_of(one.cuda(), 0), 2) for one in seen]
    wanted = [seen[0], *seen[:-1]]
    for one, other in zip(got, wanted, strict=True):
        assert one is not None
        assert np.array_equal(one, other.numpy()[::2, ::2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_decoded_frame_s_brightness_needs_no_image() -> None:
    with open_source(DEMO_CLIP, end=2.0, paced=True) as hard, open_source(DEMO_CLIP, end=2.0) as soft:
        hard.gpu = 0
        of_gpu, plain, areas = MotionMap(read=FrameLuma()), MotionMap(), []
        for frame, other in zip(hard, soft, strict=True):
            areas.append((of_gpu.see(frame).area, plain.see(other).area))
            assert not has_image(frame)
    assert hard.decoder == "h264 (cuda)"
    assert np.corrcoef([a for a, _ in areas[2:]], [b for _, b in areas[1:-1]])[0, 1] > 0.9


def has_image(frame: Frame) -> bool:
    try:
        object.__getattribute__(frame, "image")
    except AttributeError:
        return False
    return True

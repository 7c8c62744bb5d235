"""Decoding on a GPU, or not."""

from __future__ import annotations

import itertools

import av
import numpy as np
import pytest
import torch

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.runtime.engine_stream import yuv_image
from saccade.sources import SourceError, open_source
from saccade.sources.gpu import HwAccel, gpu_decoding, primary_context
from saccade.sources.live.decoder import Decoder
from saccade.sources.rgb import RgbConverter


def test_without_a_gpu_the_processor_decodes() -> None:
    assert gpu_decoding("none", 0) is None
    assert gpu_decoding("auto", 99) is None
    with pytest.raises(SourceError, match="no GPU"):
        gpu_decoding("cuda", 99)
    with pytest.raises(OSError), primary_context(99):
        pass


def test_a_paced_file_falls_back_by_itself() -> None:
    with open_source(DEMO_CLIP, paced=True, end=0.5) as source:
        source.gpu = 99
        assert [frame.index for frame in source] == [frame.index for frame in source] == list(range(5))
        assert source.decoder == "h264"


def decoded(hwaccel: HwAccel) -> tuple[str, list[av.VideoFrame]]:
    """The demo clip's first frames as a camera's are decoded, and what has decoded them."""
    with av.open(str(DEMO_CLIP)) as clip:
        stream = clip.streams.video[0]
        decoder = Decoder("h264", stream.codec_context.extradata or b"", hwaccel, gpu=0)
        packets = itertools.islice(clip.demux(stream), 20)
        frames = [frame for packet in packets for frame in decoder.decode(bytes(packet), packet.pts or 0)]
        return decoder.name, frames


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_camera_s_frames_stay_on_the_gpu() -> None:
    name, frames = decoded("cuda")
    assert name == "h264 (cuda)"
    assert {frame.format.name for frame in frames} == {"cuda"}
    wanted = decoded("none")[1]
    assert len(frames) == len(wanted)
    for frame, other in zip(frames, wanted, strict=True):
        assert np.array_equal(RgbConverter().later(frame)(), RgbConverter().later(other)())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_frames_stay_on_the_gpu_and_are_those_of_the_processor() -> None:
    with open_source(DEMO_CLIP, paced=True) as hard, open_source(DEMO_CLIP) as soft:
        hard.gpu = 0
        frames = list(itertools.islice(hard, 40))  # more than a decoder has surfaces
        assert hard.decoder == "h264 (cuda)"
        for frame, wanted in zip(frames, soft, strict=False):
            planes = frame.planes() if frame.planes else None
            assert planes is not None
            assert planes.gpu == 0
            assert np.array_equal(yuv_image(planes).rgb().cpu().numpy(), wanted.image)
            assert np.array_equal(frame.image, wanted.image)

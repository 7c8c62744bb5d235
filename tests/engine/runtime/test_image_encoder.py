"""Images on a GPU: sent at once, or together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from saccade.engine import Engine
from saccade.engine.image import Pixels, YuvImage, as_array
from saccade.engine.models.moondream.config import VisionConfig
from saccade.engine.models.moondream.vision import make_crops, tiling_of
from saccade.engine.runtime.cuda_executor import CudaExecutor
from saccade.engine.runtime.image_encoder import cut_crops
from saccade.engine.runtime.uploads import StagedImage, TiledImage
from tests.support.engine import GOLDEN, noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def test_crops_are_those_that_the_host_cuts() -> None:
    """More images than have a place of their own; one too large for one, one of YUV, and one on the device."""
    planes = [torch.from_numpy(noise(height, 640)[..., 0]) for height in (400, 200, 200)]
    yuv = YuvImage(planes[0], planes[1][:, ::2], planes[2][:, ::2], (104597, 132201, 25675, 53279), full_range=False)
    decoded = replace(yuv, y=yuv.y.cuda(), u=yuv.u.cuda(), v=yuv.v.cuda())
    sizes = [(400, 640), (1080, 1920), (640, 400), (400, 640), (1900, 2000), (360, 640)]
    shown: list[Pixels] = [*(noise(*size, seed) for seed, size in enumerate(sizes)), yuv, decoded]
    with Engine.load(str(GOLDEN), "cuda", "float32") as cuda:
        executor = cuda._executor
        assert isinstance(executor, CudaExecutor)
        for image in (*shown[::-1], *shown):
            prepared = executor.prepare(image)
            assert isinstance(prepared, TiledImage)
            assert (prepared.lease is None) == (image is decoded or image.shape[1] == 2000)
            one = executor.prepare(shown[5])  # a single crop waits for others while an image has a place
            assert isinstance(one, StagedImage if prepared.lease else TiledImage)
            del prepared, one
        for start in (0, 1):
            several = [executor.prepare(image) for image in shown[start:]]
            assert sum(one.lease is not None for one in several if isinstance(one, TiledImage)) == 4
            for one, image in zip(several, shown[start:], strict=True):
                if isinstance(one, StagedImage):  # a single crop waits for the others where there is no place
                    continue
                one.ready.synchronize()
                wanted = executor.model.vision.make_crops(as_array(image))
                assert one.tiling == wanted.tiling
                assert np.array_equal(one.pixels.cpu().numpy(), wanted.pixels[: len(one.pixels)])
                assert len(one.pixels) == (1 if one.tiling == (1, 1) else len(wanted.pixels))
            del several, one


@pytest.mark.parametrize("size", [(360, 640), (640, 360), (100, 90), (20, 45), (378, 378), (720, 1280), (1080, 1920)])
def test_crops_are_those_of_the_cpu_byte_for_byte(size: tuple[int, int]) -> None:
    config = VisionConfig()
    image = noise(*size)
    wanted, tiling = make_crops(image, config)
    assert tiling_of(*size, config) == tiling
    margin = config.overlap_margin * config.enc_patch_size
    got = cut_crops(torch.from_numpy(image).cuda(), tiling, config.crop_size, margin).cpu().numpy()
    np.testing.assert_array_equal(got, wanted[:1] if tiling == (1, 1) else wanted)

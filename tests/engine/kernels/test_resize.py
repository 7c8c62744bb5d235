"""The resize kernel against Pillow, byte for byte: one image, and several of a size together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.engine.kernels import DEVICE, needs_triton

pytestmark = needs_triton


def pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


@pytest.mark.parametrize("size", [(36, 64), (64, 36), (24, 50), (30, 24), (24, 24)])
def test_images_of_a_size_are_resized_together(size: tuple[int, int]) -> None:
    from saccade.engine.kernels.resize import compile_for, resize, resize_all

    dice, side = np.random.default_rng(1), 24
    images = [dice.integers(0, 256, (*size, 3), np.uint8) for _ in range(3)]
    there = [torch.from_numpy(image).to(DEVICE) for image in images]
    places, device = [4, 0, 2], there[0].device
    about = torch.tensor([[one.data_ptr(), at] for one, at in zip(there, places, strict=True)], device=device)
    out = torch.full((5, side, side, 3), 7, dtype=torch.uint8, device=device)
    compile_for(*size, side, side, device)
    resize_all(about, *size, out)
    for image, one, at in zip(images, there, places, strict=True):
        wanted = pillow(image, side, side)
        assert np.array_equal(out[at].cpu().numpy(), wanted)
        assert np.array_equal(resize(one, side, side).cpu().numpy(), wanted)
    assert (out[[1, 3]] == 7).all()

"""The resize kernel against Pillow, byte for byte: one image, and several of a size together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.engine.image import YuvImage
from tests.support.engine.kernels import DEVICE, needs_triton

pytestmark = needs_triton


def pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


def table(rows: list[list[int]]) -> torch.Tensor:
    from saccade.engine.kernels.resize import ABOUT

    return torch.tensor([[*row, *[0] * (ABOUT - len(row))] for row in rows], device=DEVICE)


@pytest.mark.parametrize("size", [(36, 64), (64, 36), (24, 50), (30, 24), (24, 24)])
def test_images_of_a_size_are_resized_together(size: tuple[int, int]) -> None:
    from saccade.engine.kernels.resize import compile_for, resize, resize_all

    dice, side = np.random.default_rng(1), 24
    images = [dice.integers(0, 256, (*size, 3), np.uint8) for _ in range(3)]
    there = [torch.from_numpy(image).to(DEVICE) for image in images]
    places, device = [4, 0, 2], there[0].device
    about = table([[one.data_ptr(), at] for one, at in zip(there, places, strict=True)])
    out = torch.full((5, side, side, 3), 7, dtype=torch.uint8, device=device)
    compile_for(*size, side, side, device)
    resize_all(about, *size, out)
    for image, one, at in zip(images, there, places, strict=True):
        wanted = pillow(image, side, side)
        assert np.array_equal(out[at].cpu().numpy(), wanted)
        assert np.array_equal(resize(one, side, side).cpu().numpy(), wanted)
    assert (out[[1, 3]] == 7).all()


@pytest.mark.parametrize("size", [(36, 64), (64, 36), (24, 50)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_yuv_is_resized_as_the_rgb_that_it_is(size: tuple[int, int], interleaved: bool) -> None:
    from saccade.engine.kernels.resize import compile_for, resize_all

    dice, side, (rows, columns) = np.random.default_rng(2), 24, size
    matrices = [(104597, 132201, 25675, 53279), (117489, 138438, 13975, 34925)]
    images = []
    for number in range(3):
        wide = torch.from_numpy(dice.integers(0, 256, (rows, columns + 16), np.uint8)).to(DEVICE)
        chroma = torch.from_numpy(dice.integers(0, 256, (rows // 2, columns // 2, 2), np.uint8)).to(DEVICE)
        u, v = chroma.unbind(2) if interleaved else chroma.permute(2, 0, 1).contiguous().unbind(0)
        images.append(YuvImage(wide[:, :columns], u, v, matrices[number % 2], number == 1))
    numbers = [
        [one.y.data_ptr(), 2 - at, one.u.data_ptr(), one.v.data_ptr(), one.y.stride(0), *one.u.stride(), *one.factors]
        for at, one in enumerate(images)
    ]
    out = torch.zeros(3, side, side, 3, dtype=torch.uint8, device=DEVICE)
    compile_for(*size, side, side, out.device, yuv=True)
    resize_all(table(numbers), *size, out, yuv=True)
    for at, one in enumerate(images):
        assert np.array_equal(out[2 - at].cpu().numpy(), pillow(one.rgb().cpu().numpy(), side, side))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("yuv", [False, True])
def test_a_size_is_compiled_once_wherever_its_images_are(yuv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from saccade.engine.kernels.resize import ABOUT, compile_for, resize_all

    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about))
    image = torch.zeros(40, 72, 3, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(3, 24, 24, 3, dtype=torch.uint8, device=DEVICE)
    at = image.data_ptr()
    about = torch.tensor([[at, n, at, at, 72, 36, 1, *[0] * (ABOUT - 7)] for n in range(3)], device=DEVICE)
    compile_for(40, 72, 24, 24, out.device, yuv=yuv)
    known = len(compiled)
    for first in range(3):
        resize_all(about[first:], 40, 72, out, yuv=yuv)
    assert len(compiled) == known > 0


def test_coefficients_are_whole_and_add_up() -> None:
    from saccade.engine.kernels.resize import coefficients

    for before, after in ((640, 378), (20, 378), (1920, 1176)):
        first, weights = coefficients(before, after)
        assert first.dtype == weights.dtype == np.int32
        assert np.abs(weights.sum(1) - (1 << 22)).max() <= weights.shape[1]
        flat = Image.fromarray(np.full((4, before, 3), 200, np.uint8)).resize((after, 4), Image.Resampling.LANCZOS)
        assert np.asarray(flat).min() == 200

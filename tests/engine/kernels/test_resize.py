"""The resize kernels against Pillow, byte for byte: one image, and several of any size together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.engine.image import YuvImage
from tests.support.engine.kernels import DEVICE, needs_triton

pytestmark = needs_triton


def pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.LANCZOS))


def resized(images: Sequence[np.ndarray | YuvImage], places: Sequence[int], side: int) -> torch.Tensor:
    """Images that are resized together; outputs that belong to none are 7."""
    from saccade.engine.kernels.resize import FIELDS, resize_all, scaling_of

    fields, held, between = [], list[object](), 0
    for image, place in zip(images, places, strict=True):
        rows, columns, _ = image.shape
        scaling = scaling_of(rows, columns, side, torch.device(DEVICE))
        if isinstance(image, YuvImage):
            planes = [plane.data_ptr() for plane in (image.y, image.u, image.v)]
            layout = [image.y.stride(0), 1, *image.u.stride(), 1, *image.factors]
        else:
            there = torch.from_numpy(image).to(DEVICE)
            planes, layout = [there.data_ptr() + part for part in range(3)], [3 * columns, 3] * 2 + [0] * 7
            held.append(there)
        fields.append([*planes, place, between, *layout, *scaling.fields])
        between += scaling.between
        held.append(scaling)
    out = torch.full((6, side, side, 3), 7, dtype=torch.uint8, device=DEVICE)
    table = torch.tensor([*fields, [0] * FIELDS], device=DEVICE)
    resize_all(table, torch.empty(3 * between, dtype=torch.uint8, device=DEVICE), out)
    return out.cpu()


@pytest.mark.parametrize("interleaved", [False, True])
def test_images_of_any_size_and_format_are_resized_together(interleaved: bool) -> None:
    dice, side = np.random.default_rng(2), 24
    matrices = [(104597, 132201, 25675, 53279), (117489, 138438, 13975, 34925)]
    images: list[np.ndarray | YuvImage] = [dice.integers(0, 256, (*size, 3), np.uint8) for size in ((36, 64), (24, 24))]
    for number, (rows, columns) in enumerate([(64, 36), (24, 50), (36, 64)]):
        wide = torch.from_numpy(dice.integers(0, 256, (rows, columns + 16), np.uint8)).to(DEVICE)
        chroma = torch.from_numpy(dice.integers(0, 256, (rows // 2, columns // 2, 2), np.uint8)).to(DEVICE)
        u, v = chroma.unbind(2) if interleaved else chroma.permute(2, 0, 1).contiguous().unbind(0)
        images.append(YuvImage(wide[:, :columns], u, v, matrices[number % 2], number == 1))
    places = [4, 0, 2, 1, 5]
    out = resized(images, places, side)
    for image, at in zip(images, places, strict=True):
        shown = image.rgb().cpu().numpy() if isinstance(image, YuvImage) else image
        assert np.array_equal(out[at].numpy(), pillow(shown, side, side))
    assert (out[3] == 7).all()


@pytest.mark.parametrize("across", [False, True])
def test_both_orders_of_the_passes_differ_from_pillow_by_rounding_only(
    across: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saccade.engine.kernels import resize

    monkeypatch.setattr(resize, "across_first", lambda *_: across)
    image = np.random.default_rng(4).integers(64, 192, (40, 70, 3), np.uint8)
    out = resized([image], [0], 24)[0].numpy()
    assert np.abs(out.astype(int) - pillow(image, 24, 24)).max() <= 1


@pytest.mark.parametrize("size", [(36, 64), (64, 36), (24, 50), (30, 24)])
def test_an_image_alone_is_resized_as_pillow_does(size: tuple[int, int]) -> None:
    from saccade.engine.kernels.resize import resize

    image = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    assert np.array_equal(resize(torch.from_numpy(image).to(DEVICE), 24, 24).cpu().numpy(), pillow(image, 24, 24))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_the_kernels_are_compiled_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    dice, compiled = np.random.default_rng(3), list[object]()
    resized([dice.integers(0, 256, (36, 64, 3), np.uint8)], [0], 24)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about))
    resized([dice.integers(0, 256, (*size, 3), np.uint8) for size in ((31, 57), (90, 40))], [1, 0], 24)
    assert not compiled


def test_coefficients_are_whole_and_add_up() -> None:
    from saccade.engine.kernels.resize import coefficients

    for before, after in ((640, 378), (20, 378), (1920, 1176)):
        first, weights = coefficients(before, after)
        assert first.dtype == weights.dtype == np.int32
        assert np.abs(weights.sum(1) - (1 << 22)).max() <= weights.shape[1]
        flat = Image.fromarray(np.full((4, before, 3), 200, np.uint8)).resize((after, 4), Image.Resampling.LANCZOS)
        assert np.asarray(flat).min() == 200

from __future__ import annotations

import av
import numpy as np
import pytest
import torch
from PIL import Image

from saccade.engine import Detect, Engine
from saccade.engine.cpu.layers import PackedPicoDet, fast_dtype, fuse
from saccade.engine.models.nano.picodet import PicoDet
from tests.support import REPO
from tests.support.engine.onednn import needs_bfloat16, needs_onednn

SHAPES = [(1, 3, 64, 64), (2, 3, 64, 64), (1, 3, 96, 32), (3, 3, 160, 224)]


@pytest.fixture(scope="module")
def detector() -> PicoDet:
    torch.manual_seed(0)
    return PicoDet(5, 2).eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def crops_of(shape: tuple[int, ...]) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return noise.to(memory_format=torch.channels_last)


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_packed_detector_says_the_same_of_any_crops(detector: PicoDet, shape: tuple[int, ...]) -> None:
    packed, crops = PackedPicoDet(detector, torch.float32), crops_of(shape)
    for _ in range(2):  # the first call lays the weights out
        got, wanted = packed(crops), detector(crops)
        for name in ("features", "classes", "sides", "grid"):
            assert getattr(got, name).shape == getattr(wanted, name).shape
            assert torch.allclose(getattr(got, name), getattr(wanted, name), atol=1e-5), name


@needs_bfloat16
@torch.inference_mode()
def test_in_bfloat16_it_errs_by_rounding_only(detector: PicoDet) -> None:
    crops = crops_of((2, 3, 96, 64))
    got, wanted = PackedPicoDet(detector, torch.bfloat16)(crops), detector(crops)
    for name in ("features", "classes", "sides", "grid"):
        error = (getattr(got, name).float() - getattr(wanted, name)).norm() / getattr(wanted, name).norm()
        assert 1e-5 < error < 2e-2, name


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
def test_a_tower_is_given_it_in_the_wanted_dtype(dtype: torch.dtype) -> None:
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem: torch.nn.Module = PicoDet(5, 2).requires_grad_(False)

    tower = Tower()
    fuse(tower, dtype)
    assert isinstance(tower.stem, PackedPicoDet)
    with torch.inference_mode():
        assert tower.stem(crops_of((1, 3, 64, 64))).classes.dtype is dtype


@needs_onednn
@pytest.mark.parametrize(("dtype", "wanted"), [("float32", torch.float32), (None, fast_dtype())])
def test_who_asks_for_float32_gets_nothing_less(dtype: str | None, wanted: torch.dtype) -> None:
    with Engine.load("nano", "cpu", dtype) as engine:
        stem = engine._loaded.model.vision.stem  # type: ignore[attr-defined]
        assert isinstance(stem, PackedPicoDet)
        assert stem.dtype is wanted
        says = "float32" if wanted is torch.float32 else "float32 with bfloat16 products"
        assert (engine.model.dtype, engine.model.fallbacks) == (says, ())


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), (None, False)])
def test_who_asks_for_float32_gets_pillow_s_crops_too(dtype: str | None, exact: bool) -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    with Engine.load("nano", "cpu", dtype) as engine:
        crop = engine._executor.prepare(image).pixels[0]
    wanted = np.asarray(Image.fromarray(image).resize(crop.shape[:2], Image.Resampling.LANCZOS))
    assert np.abs(crop.astype(int) - wanted).max() <= (0 if exact else 2)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 416), (None, 288)])
def test_a_wide_image_is_seen_in_fewer_rows_unless_exact(dtype: str | None, rows: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 160, 3), np.uint8)
    with Engine.load("nano", "cpu", dtype) as engine:
        pixels = engine._executor.prepare(image).pixels
    wanted = np.asarray(Image.fromarray(image).resize((416, rows), Image.Resampling.LANCZOS))
    assert pixels.shape == (1, rows, 416, 3)
    assert np.abs(pixels[0].astype(int) - wanted).max() <= 2


def test_images_of_several_shapes_share_a_step() -> None:
    """Submitted at once behind a first one, they are prefilled together; each is answered as if it were alone."""
    shapes = (360, 640), (480, 480), (400, 600), (360, 640)
    with av.open(str(REPO / "pipeline" / "assets" / "demo.mp4")) as container:
        frame = list(container.decode(video=0))[30].to_ndarray(format="rgb24")
    images = [np.asarray(Image.fromarray(frame).resize((width, height))) for height, width in shapes]
    with Engine.load("nano", "cpu") as engine:
        alone = [engine.detect(image, "person").boxes for image in images]
        assert all(alone)
        futures = [engine.submit(image, [Detect("person")]) for image in (images[0], *images)]
        together = [future.result().detections.boxes for future in futures[1:]]
    for one, other in zip(alone, together, strict=True):
        assert [box.label for box in one] == [box.label for box in other]
        corners = [[box.pixels(1, 1) for box in boxes] for boxes in (one, other)]
        assert np.allclose(*corners, atol=0.01)

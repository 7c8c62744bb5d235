"""Needs neither av nor a conftest: `pytest --noconftest tests/test_engine_cuda.py` on a machine with a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_support import GOLDEN, noise, square
from numpy.typing import NDArray
from PIL import Image

from engine import Detect, Engine, Point
from engine.golden import check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.fixture(scope="module", autouse=True)
def float32_is_float32() -> Iterator[None]:
    """TF32 has ten bits: that is another model."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    with Engine.load("nano", "cpu") as cpu, Engine.load("nano", "cuda", "float32") as cuda:
        yield cpu, cuda


def pictures() -> list[NDArray[np.uint8]]:
    found = [square(240, 320, (0.3, 0.2, 0.6, 0.9)), noise(200, 300)]
    for path in sorted((GOLDEN / "images").iterdir()):
        with Image.open(path) as picture:
            found.append(np.asarray(picture.convert("RGB")))
    return found


def test_auto_is_cuda_where_there_is_one() -> None:
    with Engine.load("nano") as engine:
        assert engine.model.device.startswith("cuda")


@pytest.mark.parametrize("conf", [0.5, 0.1])
def test_nano_finds_on_cuda_what_it_finds_on_the_cpu(engines: tuple[Engine, Engine], conf: float) -> None:
    cpu, cuda = engines
    assert cpu.model.classes is not None
    tasks = [task(name, 20, conf) for task in (Detect, Point) for name in cpu.model.classes]
    some = 0
    for picture in pictures():
        wanted, got = (engine.submit(picture, tasks).result() for engine in (cpu, cuda))
        assert [box.label for box in got.detections.boxes] == [box.label for box in wanted.detections.boxes]
        for mine, theirs in zip(got.detections.boxes, wanted.detections.boxes, strict=True):
            assert mine.pixels(1, 1) == pytest.approx(theirs.pixels(1, 1), abs=1e-2)
            assert mine.score == pytest.approx(theirs.score, abs=1e-2)
            some += 1
        for spot, other in zip(got.points.points, wanted.points.points, strict=True):
            assert (spot.label, *spot.pixels(1, 1)) == (
                other.label,
                *(pytest.approx(value, abs=1e-2) for value in other.pixels(1, 1)),
            )
    assert some > 0


def test_tensors_on_the_device_are_pictures_too(engines: tuple[Engine, Engine]) -> None:
    _, cuda = engines
    picture = square(240, 320, (0.3, 0.2, 0.6, 0.9))
    assert cuda.detect(torch.from_numpy(picture).cuda(), "tv") == cuda.detect(picture, "tv")


def test_the_golden_boxes_points_and_texts_on_cuda() -> None:
    quantities = {quantity.name: quantity for quantity in check(GOLDEN, "cuda", tolerance=1e-3)}
    for name in ("tiling", "crops", "boxes", "points", "texts", "image embeddings", "hidden states", "logits"):
        assert quantities[name].ok, quantities[name]


def test_half_precision_runs_and_finds_much_the_same(engines: tuple[Engine, Engine]) -> None:
    picture = square(240, 320, (0.3, 0.2, 0.6, 0.9))
    (wanted,) = engines[0].detect(picture, "tv").boxes
    with Engine.load("nano", "cuda", "float16") as half:
        (got,) = half.detect(picture, "tv").boxes
    assert got.pixels(1, 1) == pytest.approx(wanted.pixels(1, 1), abs=2e-2)

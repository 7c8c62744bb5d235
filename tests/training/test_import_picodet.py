from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade.engine.models.nano.picodet import PicoDet
from tests.support import REPO
from tests.support.training import CLASSES, random_start
from training.import_picodet import _MEAN, _SPREAD, COCO, convert

SHARED = Path(REPO).resolve().parent / "shared" / "starts" / "start-picodet-s"


def test_a_detector_takes_its_classes_from_cocos() -> None:
    start = random_start()
    whole, part = PicoDet(80, 1).eval(), PicoDet(len(CLASSES), 2).eval()
    whole.load_state_dict(convert(start, COCO, 1))
    part.load_state_dict(convert(start, CLASSES, 2))
    crops = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        all_of, ours = whole(crops), part(crops)
    rows = [COCO.index(name) for name in CLASSES if name in COCO]
    kept = [i for i, name in enumerate(CLASSES) if name in COCO]
    assert torch.allclose(ours.classes[..., kept], all_of.classes[..., rows], atol=1e-5)
    face, person = CLASSES.index("face"), COCO.index("person")
    assert torch.allclose(ours.classes[..., face], all_of.classes[..., person] - 2, atol=1e-5)
    assert torch.allclose(ours.sides[..., :32], all_of.sides, atol=1e-5)
    assert torch.allclose(ours.sides[..., 32:], all_of.sides, atol=1e-5)


def test_pixels_are_normalized_within_the_first_convolution() -> None:
    start = random_start()
    detector = PicoDet(80, 1).eval()
    detector.load_state_dict(convert(start, COCO, 1))
    pixels = torch.rand(1, 3, 64, 64)
    mean, spread = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _SPREAD))
    weight, bias = start["backbone.stem.weight"], start["backbone.stem.bias"]
    wanted = torch.nn.functional.hardswish(torch.conv2d((pixels - mean) / spread, weight, bias, 2, 1))
    with torch.inference_mode():
        got = detector.first(pixels * 2 - 1)
    assert torch.allclose(got[:, :, 1:-1, 1:-1], wanted[:, :, 1:-1, 1:-1], atol=1e-5)  # borders are padded otherwise


def test_tensors_that_are_not_the_detectors_are_named() -> None:
    start = random_start()
    del start["neck.reduce.p4.bias"]
    with pytest.raises(ValueError, match=r"reduce\.1\.bias"):
        convert(start, CLASSES, 2)
    start = random_start() | {"backbone.stem.weight": torch.zeros(24, 3, 5, 5)}
    with pytest.raises(ValueError, match=r"first\.weight"):
        convert(start, CLASSES, 2)


@pytest.mark.skipif(not SHARED.with_suffix(".check.npz").is_file(), reason="the published start is not beside the repo")
def test_the_published_start_gives_its_published_outputs() -> None:
    check = np.load(SHARED.with_suffix(".check.npz"))
    detector = PicoDet(80, 1).eval()
    start = load_file(SHARED.with_suffix(".safetensors"))
    detector.load_state_dict(convert(start, COCO, 1))
    # Borders are compared as well: the convolution has to see what was checked, padded as it was.
    detector.first.weight = torch.nn.Parameter(start["backbone.stem.weight"])
    detector.first.bias = torch.nn.Parameter(start["backbone.stem.bias"])
    with torch.inference_mode():
        got = detector(torch.from_numpy(check["image"]))
    heads = [torch.from_numpy(check[f"head{i}"]).float().permute(0, 2, 3, 1).flatten(1, 2) for i in range(4)]
    assert (torch.cat([got.classes, got.sides], dim=-1) - torch.cat(heads, dim=1)).abs().max() < 2e-2

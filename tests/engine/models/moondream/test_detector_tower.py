from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from saccade.engine.models.moondream.config import ModelConfigError
from saccade.engine.models.nano.detector_tower import (
    OCTAVES,
    CropDetections,
    DetectorTower,
    Relations,
    octaves,
    places,
    predecessors,
    suppressed,
)
from saccade.engine.models.nano.picodet import BINS, Evidence
from tests.support.engine import one_thread
from tests.support.training import CLASSES, small_config

VISION = small_config().vision
SIDE = VISION.crop_size


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


def tower() -> DetectorTower:
    torch.manual_seed(0)
    made = DetectorTower(VISION).eval().requires_grad_(False)
    made.judge.fc2.weight.zero_()  # sure is what the detector says
    made.judge.fc2.bias.zero_()
    return made


def evidence(*objects: tuple[int, float, tuple[float, float], float]) -> Evidence:
    """What a detector says that sees objects of (class, logit, centre in pixels, half a side in pixels) at stride 8."""
    centres, strides = places(SIDE, SIDE, torch.device("cpu"))
    classes = torch.full((1, len(centres), len(CLASSES)), -9.0)
    sides = torch.full((1, len(centres), 2, 4, BINS), 0.0)
    for label, logit, centre, half in objects:
        at = int(((centres - torch.tensor(centre)).abs().sum(-1) + strides).argmin())
        classes[0, at, label] = logit
        low = int(half / 8)
        part = half / 8 - low
        sides[0, at, int(label == VISION.part_class)] = -30.0
        sides[0, at, int(label == VISION.part_class), :, low] = 0.0
        if part:
            sides[0, at, int(label == VISION.part_class), :, low + 1] = torch.tensor(part / (1 - part)).log()
    return Evidence(torch.randn(1, len(centres), 96), classes, sides.flatten(2), torch.randn(1, 96, 4, 4))


def test_finds_are_surest_first_with_their_boxes() -> None:
    finds = tower().find(evidence((0, 1.0, (36, 36), 16), (3, 2.0, (92, 60), 8), (0, 0.0, (20, 100), 12)), SIDE, SIDE)
    assert finds.labels[0, :3].tolist() == [3, 0, 0]
    assert finds.logits[0, :3].tolist() == pytest.approx([2.0, 1.0, 0.0])
    assert finds.alive[0].tolist() == [True] * 3 + [False] * (VISION.n_places - 3)
    box = torch.tensor([92 - 8, 60 - 8, 92 + 8, 60 + 8]) / SIDE
    assert torch.allclose(finds.boxes[0, 0], box, atol=1e-4)


def test_one_place_may_hold_two_classes_with_boxes_of_their_own() -> None:
    seen = evidence((0, 1.0, (36, 36), 24), (1, 0.5, (36, 36), 8))
    finds = tower().find(seen, SIDE, SIDE)
    assert finds.labels[0, :2].tolist() == [0, 1]
    assert finds.places[0, 0] == finds.places[0, 1]
    widths = (finds.boxes[0, :2, 2] - finds.boxes[0, :2, 0]) * SIDE
    assert widths.tolist() == pytest.approx([48, 16], abs=0.1)


def test_duplicates_of_a_class_are_suppressed_and_others_are_not() -> None:
    boxes = torch.tensor([[[0.1, 0.1, 0.5, 0.5], [0.12, 0.1, 0.5, 0.5], [0.12, 0.1, 0.5, 0.5], [0.4, 0.4, 0.9, 0.9]]])
    gone = suppressed(Relations.of(boxes), torch.tensor([[0, 0, 1, 0]]))
    assert gone.tolist() == [[False, True, False, False]]


def test_what_only_a_suppressed_box_covers_stays() -> None:
    # A chain, each over 0.6 with its neighbours only: the second falls to the first, and so the third stays.
    boxes = torch.tensor([[[0.0, 0.0, 0.4, 0.4], [0.08, 0.0, 0.48, 0.4], [0.16, 0.0, 0.56, 0.4]]])
    assert suppressed(Relations.of(boxes), torch.zeros(1, 3, dtype=torch.int64)).tolist() == [[False, True, False]]


def test_predecessors_are_of_the_same_class_and_alive() -> None:
    labels = torch.tensor([[0, 1, 0, 1, 0, 0]])
    alive = torch.tensor([[True, True, True, False, True, True]])
    empty = torch.zeros(1, 6)
    finds = CropDetections(torch.zeros(1, 6, 4), labels, empty, alive, labels, empty)
    assert predecessors(finds).tolist() == [[-1, -1, 0, 1, 2, 4]]


def test_octaves_tell_a_thousandth_apart() -> None:
    codes = octaves(torch.arange(1024).unsqueeze(1) / 1024)
    assert codes.shape == (1024, 2 * OCTAVES)
    near = codes @ codes.T / OCTAVES
    assert (near.argmax(1) == torch.arange(1024)).all()
    assert near.fill_diagonal_(0).max() < 0.9


def test_tokens_are_one_a_find_and_one_a_cell() -> None:
    model = tower()
    crops = torch.randn(2, 3, SIDE, SIDE)
    tokens = model.features(crops)
    assert tokens.shape == (2, VISION.n_tokens, VISION.proj_out_dim)
    assert torch.allclose(model(crops[:1], (1, 1)), tokens[0], atol=1e-4)
    assert torch.equal(model.project(tokens, tokens), tokens)
    assert model.features(torch.randn(1, 3, 96, SIDE)).shape == (1, VISION.n_tokens, VISION.proj_out_dim)


def test_what_fills_up_says_nothing_of_its_place() -> None:
    model = tower()
    model.pos_emb.zero_()
    seen = evidence((0, 1.0, (36, 36), 16))
    tokens = model.tokens(seen, model.find(seen, SIDE, SIDE))
    assert torch.equal(tokens[0, 1], model.nothing)
    assert not torch.allclose(tokens[0, 0], model.nothing)


def test_no_more_places_than_there_are_pairs_can_be_asked_for() -> None:
    config = small_config()
    text = dataclasses.replace(config.text, prefix_attn=205)
    vision = dataclasses.replace(VISION, n_places=200)
    with pytest.raises(ModelConfigError, match="n_places"):
        dataclasses.replace(config, text=text, vision=vision)._check()


def test_a_larger_crop_gives_as_many_tokens() -> None:
    seen = tower()
    seen.set_crop_size(2 * SIDE)
    seen.quick_crops = True
    pixels = seen.make_crops(np.zeros((90, 160, 3), np.uint8)).pixels
    assert pixels.shape[2] == seen.crop_size == 2 * SIDE
    assert seen.features(seen.normalize(torch.from_numpy(pixels))).shape == (1, VISION.n_tokens, VISION.proj_out_dim)


@pytest.mark.parametrize("size", [96, 417, 1312])
def test_a_crop_of_an_odd_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="imgsz must be a multiple of 32 from 128 to 1280"):
        tower().set_crop_size(size)

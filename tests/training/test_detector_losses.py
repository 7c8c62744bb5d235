from __future__ import annotations

import pytest
import torch

from saccade.engine.models.nano.detector_tower import places
from saccade.engine.models.nano.picodet import BINS, Evidence
from tests.support.training import CLASSES
from training.augment import Batch
from training.detector_losses import assign, detector_losses, generalised_iou, iou

SIDE = 64
CENTRES, STRIDES = places(SIDE, SIDE, torch.device("cpu"))
FACE, CAT, DOG = (CLASSES.index(name) for name in ("face", "cat", "dog"))
KNOWN = torch.tensor([name != "face" for name in CLASSES])
BOX = torch.tensor([16.0, 16.0, 48.0, 48.0])


def evidence(logit: float = -6.0) -> Evidence:
    n = len(CENTRES)
    classes = torch.full((1, n, len(CLASSES)), logit)
    return Evidence(torch.zeros(1, n, 96), classes, torch.zeros(1, n, 2 * 4 * BINS), torch.zeros(1, 96, 2, 2))


def batch(label: int = CAT, sure: bool = True, unknown: int | None = None) -> Batch:
    doubts = torch.zeros(1, len(CLASSES), dtype=torch.bool)
    if unknown is not None:
        doubts[0, unknown] = True
    box = torch.tensor([[[0.5, 0.5, 0.5, 0.5]]])
    return Batch(torch.zeros(1, 3, SIDE, SIDE), box, torch.tensor([[label]]), torch.tensor([[sure]]), doubts)


def losses(seen: Evidence, start: Evidence, views: Batch) -> dict[str, float]:
    return {name: value.item() for name, value in detector_losses(seen, start, views, FACE, KNOWN).items()}


def test_iou_and_its_generalisation_by_hand() -> None:
    other = torch.tensor([32.0, 16.0, 64.0, 48.0])
    assert iou(BOX, other).item() == pytest.approx(1 / 3)
    assert generalised_iou(BOX, other).item() == pytest.approx(1 / 3)
    apart = torch.tensor([48.0, 16.0, 80.0, 48.0])
    assert generalised_iou(BOX, apart).item() == pytest.approx(0.0, abs=1e-6)
    assert generalised_iou(BOX, apart + 32).item() < 0


def test_a_box_is_learned_where_it_is_stated_best() -> None:
    boxes = torch.cat([CENTRES - STRIDES.unsqueeze(1), CENTRES + STRIDES.unsqueeze(1)], dim=1).unsqueeze(0).clone()
    inside = ((CENTRES - 32).abs() < 8).all(1).nonzero()[0].item()
    boxes[0, inside] = BOX
    scores = torch.full((1, len(CENTRES), len(CLASSES)), 0.1)
    found = assign(boxes, scores, BOX.view(1, 1, 4), torch.tensor([[CAT]]), torch.tensor([[True]]), CENTRES, STRIDES)
    assert found.positive[0, inside]
    assert found.quality[0, inside] == pytest.approx(1.0)
    assert found.quality.argmax() == inside
    assert 1 < found.positive.sum() <= 9
    assert ((CENTRES[found.positive[0]] - 32).abs() <= 24).all()


def test_what_is_not_usable_is_learned_nowhere() -> None:
    boxes = torch.zeros(1, len(CENTRES), 4)
    scores = torch.full((1, len(CENTRES), len(CLASSES)), 0.1)
    found = assign(boxes, scores, BOX.view(1, 1, 4), torch.tensor([[CAT]]), torch.tensor([[False]]), CENTRES, STRIDES)
    assert not found.positive.any()
    assert not found.quality.any()


def test_the_start_is_followed_where_the_pack_says_nothing() -> None:
    start, views = evidence(), batch(unknown=DOG)
    start.classes[0, 5, DOG] = 3.0
    follows, forgets = evidence(), evidence()
    follows.classes[0, 5, DOG] = 3.0
    assert losses(follows, start, views)["classes"] < losses(forgets, start, views)["classes"]


def test_the_start_counts_less_where_the_pack_says_there_is_none() -> None:
    start = evidence()
    start.classes[0, 5, DOG] = 3.0
    loud, quiet = evidence(), evidence()
    loud.classes[0, 5, DOG] = 3.0
    quiet.classes[0, 5, DOG] = -0.8  # 31 %
    assert losses(quiet, start, batch())["classes"] < losses(loud, start, batch())["classes"]


@pytest.mark.parametrize(("sure", "changes"), [(True, True), (False, False)])
def test_a_class_the_start_lacks_is_taught_where_it_is_known(sure: bool, changes: bool) -> None:
    views = batch(FACE, sure)
    start, seen, other = evidence(), evidence(), evidence()
    middle = ((CENTRES - 32).abs() < 8).all(1).nonzero()[0].item()
    other.classes[0, middle, FACE] = 1.0
    apart = abs(losses(seen, start, views)["classes"] - losses(other, start, views)["classes"])
    assert (apart > 1e-3) == changes


def test_each_box_of_a_place_is_taught_by_its_own_classes() -> None:
    for label, own in ((CAT, 0), (FACE, 1)):
        seen = evidence()
        seen.sides.requires_grad_()
        found = detector_losses(seen, evidence(), batch(label), FACE, KNOWN)
        (found["boxes"] + found["bins"]).backward()  # type: ignore[no-untyped-call]
        assert seen.sides.grad is not None
        groups = seen.sides.grad.unflatten(-1, (2, 4 * BINS)).abs().sum((0, 1, 3))
        assert groups[own] > 0
        assert groups[1 - own] == 0

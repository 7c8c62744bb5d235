from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.training import BOX, CLASSES, one_square
from training.augment import make_batch
from training.data import Split


def bright(image: torch.Tensor) -> torch.Tensor:
    """(size, size) bool, what is far from the view's usual colour towards bright; colours have been changed."""
    grey = image.mean(0)
    return grey > (grey.max() + grey.median()) / 2


@pytest.mark.parametrize(("mosaic", "far"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_a_bright_square_stays_in_its_box(mosaic: float, far: float) -> None:
    torch.manual_seed(1)
    split, size = one_square((0.35, 0.3, 0.65, 0.7)), 64
    batch = make_batch(split, torch.zeros(96, dtype=torch.int64), (size, size), mosaic, far=far)
    assert batch.images.shape == (96, 3, size, size)
    assert batch.images.abs().max() <= 1.0
    ticks = (torch.arange(size) + 0.5) / size
    agreed, seen = [], 0
    for view in range(96):
        inside = torch.zeros(size, size, dtype=torch.bool)
        for box, name in zip(batch.boxes[view], batch.labels[view], strict=True):
            if name < 0:
                continue
            seen += 1
            assert name == 4
            low, high = box[:2] - box[2:] / 2, box[:2] + box[2:] / 2
            assert low.min() >= -1e-5
            assert high.max() <= 1 + 1e-5
            inside |= ((ticks > low[1]) & (ticks < high[1])).unsqueeze(1) & ((ticks > low[0]) & (ticks < high[0]))
        if inside.any() and not inside.all():
            found = bright(batch.images[view])
            agreed.append((found & inside).sum().item() / max(1, (found | inside).sum().item()))
    assert seen > 78 * (4 if mosaic or far else 1)
    # A view that is all box, covered by a patch, or turned to noise says little; nearly all say much.
    assert np.median(agreed) > 0.85
    assert np.mean(np.array(agreed) > 0.6) > 0.8


def test_a_mirrored_box_is_where_the_mirrored_image_has_it() -> None:
    torch.manual_seed(0)
    batch = make_batch(one_square((0.05, 0.3, 0.35, 0.7)), torch.zeros(200, dtype=torch.int64), (32, 32), 0.0)
    there = batch.labels[:, 0] >= 0
    sides = batch.boxes[there, 0, 0] < 0.5
    assert 0.25 < sides.float().mean() < 0.75
    left = batch.images[there].mean(1)[:, :, :16].mean((1, 2)) > batch.images[there].mean(1)[:, :, 16:].mean((1, 2))
    assert (left == sides).float().mean() > 0.85


def test_what_is_nearly_out_of_view_is_not_sure() -> None:
    torch.manual_seed(0)
    batch = make_batch(one_square((0.02, 0.02, 0.1, 0.2)), torch.zeros(400, dtype=torch.int64), (32, 32), 0.0)
    there = batch.labels >= 0
    assert not (batch.sure & ~there).any()
    assert (batch.boxes[..., 2:].amin(-1)[batch.sure] >= 0.012).all()
    assert 0.3 < there.any(1).float().mean() < 0.95  # some views are past it
    assert 0.01 < (there & ~batch.sure).any(1).float().mean() < 0.5  # some have its edge


def test_a_mosaic_has_the_labels_and_doubts_of_its_four_images(train: Split) -> None:
    torch.manual_seed(0)
    batch = make_batch(train, torch.arange(3).repeat(40), (64, 64), 0.5)
    assert batch.labels.shape == batch.boxes.shape[:2] == batch.sure.shape
    assert batch.labels.shape[1] == 48
    dog = CLASSES.index("dog")
    mosaics = batch.unknown[:60, dog]
    assert torch.equal(batch.unknown[60:, dog], torch.arange(3).repeat(40)[60:] == 0)
    assert mosaics[torch.arange(3).repeat(40)[:60] == 0].all()
    assert mosaics.float().mean() > 0.6
    assert (batch.labels[:60] >= 0).sum(1).max() > 4


def test_keep_keeps_the_largest_boxes() -> None:
    torch.manual_seed(0)
    split = one_square(BOX)
    split.boxes[0, 1], split.labels[0, 1], split.sure[0, 1] = torch.tensor([0.1, 0.1, 0.9, 0.9]), 0, True
    batch = make_batch(split, torch.zeros(50, dtype=torch.int64), (32, 32), 0.0, keep=1)
    assert batch.labels.shape == (50, 1)
    assert (batch.labels == 0).float().mean() > 0.8


def test_views_can_be_wider_than_high() -> None:
    torch.manual_seed(0)
    batch = make_batch(one_square(BOX), torch.zeros(8, dtype=torch.int64), (32, 64), 0.5)
    assert batch.images.shape == (8, 3, 32, 64)


def test_far_views_show_things_half_as_large_or_less() -> None:
    torch.manual_seed(0)
    split = one_square((0.2, 0.2, 0.8, 0.8))
    near, far = (make_batch(split, torch.zeros(64, dtype=torch.int64), (64, 64), 1 - part, far=part) for part in (0, 1))
    sides = [batch.boxes[batch.labels >= 0][:, 2:].amax().item() for batch in (near, far)]
    assert sides[1] < 0.6 / 2 * 1.3 < sides[0]  # windows are stretched by up to e^0.25


def test_parts_of_a_batch_stand_side_by_side() -> None:
    torch.manual_seed(0)
    split = one_square((0.35, 0.3, 0.65, 0.7))
    batch = make_batch(split, torch.zeros(8, dtype=torch.int64), (32, 32), 0.5, far=0.25)
    assert [(labels >= 0).sum().item() for labels in batch.labels[:6]] == [4] * 6
    assert batch.images.shape == (8, 3, 32, 32)

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from saccade.engine.models.moondream.csp_stem import CspStem
from saccade.engine.training.import_stem import add_norms, convert
from saccade.engine.training.regularise import add_drops
from saccade.engine.training.targets import (
    Answerer,
    Prompts,
    answer_losses,
    choose_prompts,
    dense_losses,
    read_back,
    sequence_mask,
    similar_classes,
)
from safetensors.torch import load_file, save_file

from saccade.engine.engine import Engine
from saccade.engine.models.moondream.config import (
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)
from saccade.engine.models.moondream.model import load
from saccade.engine.models.moondream.region import size_bin, size_value
from saccade.engine.training.augment import Batch, make_batch, plain_batch
from saccade.engine.training.data import (
    SIDE,
    SLOTS,
    PackError,
    Split,
    load_split,
    read_classes,
    read_images,
    read_labels,
)
from saccade.engine.training.train import WEIGHTS, balance, build, export, groups, main, rate_at
from tests.support.engine import NANO, label, noise, one_thread, square, write_graph, write_pack

CLASSES = ("person", "face", "car", "bus", "cat", "dog", "backpack", "chair")
CPU = torch.device("cpu")
SMALL = MoondreamConfig(
    text=TextConfig(
        dim=48, ff_dim=64, n_layers=2, vocab_size=32, max_context=160, n_heads=2, n_kv_heads=2, prefix_attn=17
    ),
    vision=VisionConfig(
        enc_dim=48,
        enc_patch_size=16,
        enc_n_layers=1,
        enc_ff_dim=64,
        enc_n_heads=2,
        proj_out_dim=48,
        crop_size=64,
        max_crops=1,
        overlap_margin=0,
        proj_inner_dim=48,
        stem="csp",
    ),
    region=RegionConfig(dim=48, coord_feat_dim=32, size_feat_dim=32, inner_dim=0),
    tokenizer=TokenizerConfig(
        templates={"detect": {"prefix": [7], "suffix": [3]}, "point": {"prefix": [8], "suffix": [3]}}
    ),
    classes=CLASSES,
)
WORDS = torch.arange(10, 10 + len(CLASSES))


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with one_thread():
        yield


BOX = (0.3, 0.4, 0.6, 0.7)
SECOND = (0.7, 0.1, 0.9, 0.3)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(
        tmp_path_factory.mktemp("pack"),
        CLASSES,
        [
            (square(240, 320, BOX), label(1, "train", boxes={"cat": [[*BOX, 0.9, "2"]]}, unknown=["dog"])),
            (
                square(300, 200, SECOND),
                label(
                    2,
                    "train",
                    boxes={"car": [[*SECOND, 1.0, "gt"]], "bus": [[*BOX, 1, "gt"]]},
                    maybe={"car": [[*BOX, 0.3]]},
                ),
            ),
            (noise(416, 416), label(3, "train")),
            (square(240, 320, BOX), label(4, "val", boxes={"person": [[*BOX, 0.9, "gt"], [*SECOND, 0.8, "1"]]})),
        ],
    )


@pytest.fixture(scope="module")
def train(pack: Path) -> Split:
    return load_split(pack, "train", 2)


def one_square(box: tuple[float, float, float, float], width: int = 320, height: int = 240) -> Split:
    """A split of one dark picture with one bright box, straight as tensors."""
    images = torch.full((1, 3, SIDE, SIDE), 114, dtype=torch.uint8)
    images[0, :, :height, :width] = torch.from_numpy(square(height, width, box)).permute(2, 0, 1)
    boxes, labels = torch.zeros(1, SLOTS, 4), torch.full((1, SLOTS), -1)
    boxes[0, 0], labels[0, 0] = torch.tensor(box), 4
    return Split(
        CLASSES,
        images,
        torch.tensor([[width / SIDE, height / SIDE]]),
        boxes,
        labels,
        labels >= 0,
        torch.zeros(1, len(CLASSES), dtype=torch.bool),
    )


# Data


def test_a_split_has_its_pictures_and_labels(train: Split) -> None:
    assert train.classes == CLASSES
    assert train.images.shape == (3, 3, SIDE, SIDE)
    assert train.images.dtype == torch.uint8
    assert train.sizes.mul(SIDE).round().tolist() == [[320, 240], [200, 300], [416, 416]]
    assert train.boxes.shape == (3, SLOTS, 4)
    assert train.boxes[0, 0].tolist() == pytest.approx(BOX)
    assert train.labels[0].tolist() == [4] + [-1] * (SLOTS - 1)
    assert train.labels[1, :4].tolist() == [3, 2, 2, -1]  # the largest first
    assert train.sure[1, :4].tolist() == [True, False, True, False]
    assert train.labels[2].max() == -1
    assert train.unknown.nonzero().tolist() == [[0, CLASSES.index("dog")]]


def test_pictures_lie_upper_left_and_the_rest_is_grey(train: Split) -> None:
    wanted = torch.from_numpy(square(240, 320, BOX)).permute(2, 0, 1)
    assert torch.equal(train.images[0, :, :240, :320], wanted)
    assert (train.images[0, :, 240:] == 114).all()
    assert (train.images[0, :, :, 320:] == 114).all()


def test_splits_are_kept_apart(pack: Path) -> None:
    assert len(load_split(pack, "val", 1).images) == 1
    assert [record["id"] for record in read_labels(pack, "train")] == ["000001", "000002", "000003"]
    with pytest.raises(PackError, match="no split 'test'; it has train, val"):
        read_labels(pack, "test")


def test_pictures_of_several_tars_are_found_by_their_id(pack: Path) -> None:
    found = read_images(pack, read_labels(pack, "train"))
    assert sorted(found) == ["000001", "000002", "000003"]
    with Image.open(io.BytesIO(found["000002"])) as picture:
        assert picture.size == (200, 300)


def test_a_pack_without_its_parts_is_refused(tmp_path: Path, pack: Path) -> None:
    with pytest.raises(PackError, match=r"no classes\.txt"):
        read_classes(tmp_path)
    with pytest.raises(PackError, match=r"no labels\.jsonl\.gz"):
        read_labels(tmp_path, "train")
    with pytest.raises(PackError, match=r"lacks images-01\.tar"):
        read_images(tmp_path, read_labels(pack, "train")[:1])
    ghost = {"id": "999999", "tar": 0}
    with pytest.raises(PackError, match="lacks 1 images, the first of id 999999"):
        read_images(pack, [ghost])


def test_more_boxes_than_slots_keep_the_largest(tmp_path: Path) -> None:
    boxes = [[0.0, 0.0, 0.01 * (i + 1), 0.5, 1.0, "gt"] for i in range(60)]
    folder = write_pack(tmp_path, CLASSES, [(noise(20, 20), label(1, "train", boxes={"cat": boxes}))])
    split = load_split(folder, "train", 1)
    assert split.boxes[0, :, 2].tolist() == pytest.approx([0.01 * (i + 1) for i in reversed(range(12, 60))])


def test_a_class_that_the_pack_does_not_list_is_one_line(tmp_path: Path) -> None:
    folder = write_pack(tmp_path, ["cat"], [(noise(20, 20), label(1, "train", boxes={"yak": [[0, 0, 1, 1, 1, "gt"]]}))])
    with pytest.raises(PackError, match="yak"):
        load_split(folder, "train", 1)


def test_a_pictures_bytes_that_are_none_are_one_line(tmp_path: Path) -> None:
    folder = write_pack(tmp_path, ["cat"], [(noise(20, 20), label(1, "train"))])
    data = (folder / "images-01.tar").read_bytes()
    (folder / "images-01.tar").write_bytes(data[:512] + bytes(64) + data[576:])
    with pytest.raises(PackError, match="000001"):
        load_split(folder, "train", 1)


def test_labels_that_are_no_json_are_one_line(tmp_path: Path) -> None:
    folder = write_pack(tmp_path, ["cat"], [(noise(20, 20), label(1, "train"))])
    with gzip.open(folder / "labels.jsonl.gz", "at", encoding="utf-8") as file:
        file.write("{not json}\n")
    with pytest.raises(PackError, match=r"labels\.jsonl\.gz"):
        read_labels(folder, "train")


# Views


def test_a_plain_batch_is_the_picture_as_it_is(train: Split) -> None:
    batch = plain_batch(train, torch.tensor([0, 1]), 64)
    assert batch.images.shape == (2, 3, 64, 64)
    assert batch.boxes[0, 0].tolist() == pytest.approx([0.45, 0.55, 0.3, 0.3])
    wanted = np.asarray(Image.fromarray(square(240, 320, BOX)).resize((64, 64), Image.Resampling.BOX))
    difference = (batch.images[0].permute(1, 2, 0) + 1) * 127.5 - torch.from_numpy(wanted.copy()).float()
    assert difference.abs().mean() < 4.0
    assert torch.equal(batch.labels, train.labels[[0, 1]])


def bright(image: torch.Tensor) -> torch.Tensor:
    """(size, size) bool, what is far from the view's usual colour towards bright; colours have been changed."""
    grey = image.mean(0)
    return grey > (grey.max() + grey.median()) / 2


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_a_bright_square_stays_in_its_box(mosaic: float) -> None:
    torch.manual_seed(1)
    split, size = one_square((0.35, 0.3, 0.65, 0.7)), 64
    batch = make_batch(split, torch.zeros(160, dtype=torch.int64), size, mosaic)
    assert batch.images.shape == (160, 3, size, size)
    assert batch.images.abs().max() <= 1.0
    ticks = (torch.arange(size) + 0.5) / size
    agreed, seen = [], 0
    for view in range(160):
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
    assert seen > 130 * (4 if mosaic else 1)
    # A view that is all box, covered by a patch, or turned to noise says little; nearly all say much.
    assert np.median(agreed) > 0.85
    assert np.mean(np.array(agreed) > 0.6) > 0.8


def test_a_mirrored_box_is_where_the_mirrored_picture_has_it() -> None:
    torch.manual_seed(0)
    batch = make_batch(one_square((0.05, 0.3, 0.35, 0.7)), torch.zeros(200, dtype=torch.int64), 32, 0.0)
    there = batch.labels[:, 0] >= 0
    sides = batch.boxes[there, 0, 0] < 0.5
    assert 0.25 < sides.float().mean() < 0.75
    left = batch.images[there].mean(1)[:, :, :16].mean((1, 2)) > batch.images[there].mean(1)[:, :, 16:].mean((1, 2))
    assert (left == sides).float().mean() > 0.85


def test_what_is_nearly_out_of_view_is_not_sure() -> None:
    torch.manual_seed(0)
    batch = make_batch(one_square((0.02, 0.02, 0.1, 0.2)), torch.zeros(400, dtype=torch.int64), 32, 0.0)
    there = batch.labels >= 0
    assert not (batch.sure & ~there).any()
    assert (batch.boxes[..., 2:].amin(-1)[batch.sure] >= 0.012).all()
    assert 0.3 < there.any(1).float().mean() < 0.95  # some views are past it
    assert 0.01 < (there & ~batch.sure).any(1).float().mean() < 0.5  # some have its edge


def test_a_mosaic_has_the_labels_and_doubts_of_its_four_pictures(train: Split) -> None:
    torch.manual_seed(0)
    batch = make_batch(train, torch.arange(3).repeat(40), 64, 0.5)
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
    batch = make_batch(split, torch.zeros(50, dtype=torch.int64), 32, 0.0, keep=1)
    assert batch.labels.shape == (50, 1)
    assert (batch.labels == 0).float().mean() > 0.8


# Prompts


def views(labels: list[list[int]], sure: list[list[bool]] | None = None, unknown: list[int] | None = None) -> Batch:
    width = 16
    ids = torch.tensor([row + [-1] * (width - len(row)) for row in labels])
    b = len(labels)
    generator = torch.Generator().manual_seed(0)
    boxes = torch.cat([torch.full((b, width, 2), 0.5), torch.rand(b, width, 2, generator=generator) * 0.5 + 0.1], -1)
    certain = (
        ids >= 0 if sure is None else torch.tensor([row + [False] * (width - len(row)) for row in sure]) & (ids >= 0)
    )
    doubts = torch.zeros(b, len(CLASSES), dtype=torch.bool)
    for name in unknown or []:
        doubts[:, name] = True
    return Batch(torch.zeros(b, 3, 8, 8), boxes, ids, certain, doubts)


SHARES = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.05, 0.05, 0.02, 0.01])
SIMILAR = similar_classes(CLASSES, CPU)


def choose(batch: Batch, n_objects: int = 4) -> Prompts:
    return choose_prompts(batch, SHARES, SIMILAR, 2, 2, n_objects)


def test_similar_classes_are_those_of_one_group() -> None:
    assert SIMILAR[CLASSES.index("car"), CLASSES.index("bus")]
    assert SIMILAR[CLASSES.index("cat"), CLASSES.index("dog")]
    assert not SIMILAR[CLASSES.index("cat"), CLASSES.index("car")]
    assert torch.equal(SIMILAR, SIMILAR.T)


def test_a_pack_of_few_classes_has_no_group_of_some() -> None:
    assert similar_classes(("cat", "unicorn"), CPU).tolist() == [[True, False], [False, False]]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=5))
def test_prompts_are_what_the_view_has_largest_first(seed: int, labels: list[list[int]]) -> None:
    torch.manual_seed(seed)
    batch = views(labels)
    prompts = choose(batch)
    b = len(labels)
    assert prompts.classes.shape == prompts.points.shape == prompts.stop.shape == (b, 4)
    assert prompts.boxes.shape == (b, 4, 4, 4)
    for view, row in enumerate(labels):
        asked = prompts.classes[view].tolist()
        assert len(set(asked)) == 4
        assert len(set(asked) & set(row)) >= min(2, len(set(row)))
        assert len(set(asked) - set(row)) >= min(2, len(CLASSES) - len(set(row)))
        for i, name in enumerate(asked):
            mine = batch.boxes[view][batch.labels[view] == name]
            wanted = sorted((box.tolist() for box in mine), key=lambda box: -box[2] * box[3])[:4]
            assert prompts.boxes[view, i][prompts.valid[view, i]].tolist() == wanted
            assert prompts.valid[view, i].tolist() == [True] * len(wanted) + [False] * (4 - len(wanted))
            assert prompts.stop[view, i] == (1.0 if len(mine) <= 4 else 0.0)
            assert prompts.more[view, i] == 0.0


def test_of_an_unknown_class_nothing_is_learned() -> None:
    torch.manual_seed(0)
    prompts = choose(views([[4, 2], [4, 4]] * 50, unknown=[0, 1, 3, 4, 5]))
    unknown = ~torch.isin(prompts.classes, torch.tensor([2, 6, 7]))
    assert unknown.any()
    assert not prompts.valid[unknown].any()
    assert (prompts.stop[unknown] == 0.0).all()
    assert (prompts.classes == 2).any(1).all()


def test_an_unknown_class_is_not_even_asked_for_while_there_are_others() -> None:
    torch.manual_seed(0)
    assert not (choose(views([[4, 2], [4, 4]] * 50, unknown=[4])).classes == 4).any()


def test_doubtful_boxes_are_no_answers_and_make_the_end_uncertain() -> None:
    torch.manual_seed(0)
    batch = views([[4, 4, 4, 2]] * 50, sure=[[True, False, True, True]] * 50)
    prompts = choose(batch)
    cats = prompts.classes == 4
    assert cats.any(1).all()
    assert (prompts.valid[cats].sum(-1) == 2).all()
    assert (prompts.stop[cats] == 0.5).all()
    assert (prompts.more[cats] == 0.25).all()
    assert (prompts.stop[~cats] == 1.0).all()
    assert (prompts.more[~cats] == 0.0).all()


def test_a_class_with_only_doubtful_boxes_is_no_good_negative() -> None:
    torch.manual_seed(0)
    prompts = choose(views([[4, 2]] * 50, sure=[[False, True]] * 50))
    assert not (prompts.classes == 4).any()


def test_some_prompts_are_points() -> None:
    torch.manual_seed(0)
    share = choose(views([[0, 1]] * 500)).points.float().mean()
    assert 0.08 < share < 0.25


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6))
def test_a_prompt_sees_the_image_and_its_own_past(prefix: int, prompts: int, length: int) -> None:
    mask = sequence_mask(prefix, prompts, length, CPU)
    total = prefix + prompts * length
    assert mask.shape == (total, total)
    for row in range(total):
        group = (row - prefix) // length
        for column in range(total):
            own = row >= prefix and column >= prefix and (column - prefix) // length == group and column <= row
            if row >= prefix:
                assert mask[row, column] == (column < prefix or own)
            else:
                assert mask[row, column] == (column < prefix)


def test_what_is_read_back_without_noise_is_the_nearest_bin() -> None:
    boxes = torch.rand(200, 4) * 0.9 + 0.05
    back = read_back(boxes, 0.0)
    assert torch.equal(back[:, :2], (boxes[:, :2] * 1024).round() / 1024)
    assert torch.equal(back[:, 2:], size_value(size_bin(boxes[:, 2:], 1024), 1024))
    assert torch.equal(read_back(back, 0.0), back)


def test_noise_of_what_is_read_back_is_in_proportion() -> None:
    torch.manual_seed(0)
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.1]]).expand(4000, 4)
    off = (read_back(boxes, 0.04) - boxes).std(0)
    assert off.tolist() == pytest.approx([0.016, 0.004, 0.016, 0.004], rel=0.15)
    far = read_back(torch.tensor([[0.0, 1.0, 1.0, 1e-9]]).expand(500, 4), 0.04)
    assert far.min() >= 0.0
    assert far.max() <= 1.0


# The training forward and its losses


def fresh() -> Answerer:
    torch.manual_seed(0)
    return build(SMALL)


def prompts_of(boxes: torch.Tensor, valid: torch.Tensor, points: torch.Tensor) -> Prompts:
    classes = torch.arange(boxes.shape[1]).expand(len(boxes), -1)
    return Prompts(classes, points, boxes, valid, torch.ones(classes.shape), torch.zeros(classes.shape))


def test_the_training_forward_is_the_models_own(pack: Path) -> None:
    """Hidden states for all prompts at once are those of one prompt after the other, answers read token by token."""
    answerer = fresh().eval().requires_grad_(False)
    model = answerer.model
    images = torch.randn(2, 3, 64, 64)
    boxes = read_back(torch.rand(2, 4, 16, 4) * 0.5 + 0.2, 0.0)
    points = torch.tensor([[False, True, False, True], [True, False, False, True]])
    classes = torch.tensor([[0, 3, 2, 5], [1, 1, 4, 0]])
    hidden, dense = answerer(images, WORDS[classes], points, boxes)
    assert hidden.shape == (2, 4, 48, 48)
    assert dense.shape == (2, 16, len(CLASSES) + 4)
    for view in range(2):
        tokens = model.vision(images[view : view + 1], (1, 1))
        for prompt in range(4):
            point = bool(points[view, prompt])
            ids = torch.tensor([8 if point else 7, int(WORDS[classes[view, prompt]]), 3])
            x = [model.text.embed(torch.tensor([0])), tokens, model.text.embed(ids)]
            for cx, cy, w, h in boxes[view, prompt, :6].tolist():
                x += [model.region.encode_coord(torch.tensor([[value]])) for value in (cx, cy)]
                if not point:
                    x.append(model.region.encode_size(torch.tensor([[w, h]])))
            one = torch.cat(x).unsqueeze(0)
            alone = model.text(one, torch.arange(one.shape[1]).unsqueeze(0))[0, 17 + 2 :]
            assert torch.allclose(hidden[view, prompt, : len(alone)], alone, atol=1e-4)


def test_losses_score_each_choice_once() -> None:
    answerer = fresh().eval().requires_grad_(False)
    boxes = torch.rand(2, 4, 16, 4) * 0.5 + 0.2
    valid = torch.zeros(2, 4, 16, dtype=torch.bool)
    valid[:, 0, :3] = valid[:, 1, :1] = True
    points = torch.tensor([[False, True, False, False]] * 2)
    hidden, _ = answerer(torch.randn(2, 3, 64, 64), WORDS[torch.arange(4).expand(2, -1)], points, boxes)
    prompts = prompts_of(boxes, valid, points)
    losses = answer_losses(answerer, hidden, prompts, room=50)
    assert set(losses) == {"start", "x", "y", "w", "h"}
    assert all(torch.isfinite(value) and value > 0 for value in losses.values())
    # What comes after the last object and its end is no choice.
    other = hidden.clone()
    other[:, 0, 10:] += torch.randn_like(other[:, 0, 10:])
    other[:, 1, 3:] += torch.randn_like(other[:, 1, 3:])
    other[:, 2:, 1:] += torch.randn_like(other[:, 2:, 1:])
    again = answer_losses(answerer, other, prompts, room=50)
    for name, value in losses.items():
        assert torch.allclose(value, again[name], atol=1e-5), name
    # What comes before it is one.
    for step, name in ((0, "start"), (9, "start"), (0, "x"), (7, "y"), (2, "w")):
        other = hidden.clone()
        other[:, 0, step] += torch.randn_like(other[:, 0, step])
        assert not torch.allclose(losses[name], answer_losses(answerer, other, prompts, room=50)[name], atol=1e-5)


def test_an_end_that_teaches_nothing_does_not() -> None:
    answerer = fresh().eval().requires_grad_(False)
    boxes, valid = torch.rand(1, 4, 16, 4) * 0.5 + 0.2, torch.zeros(1, 4, 16, dtype=torch.bool)
    points = torch.zeros(1, 4, dtype=torch.bool)
    hidden, _ = answerer(torch.randn(1, 3, 64, 64), WORDS[torch.arange(4).expand(1, -1)], points, boxes)
    prompts = dataclasses.replace(prompts_of(boxes, valid, points), stop=torch.zeros(1, 4))
    losses = answer_losses(answerer, hidden, prompts, room=20)
    assert all(value == 0.0 for value in losses.values())


def test_perfect_answers_cost_little() -> None:
    """Heads that say the target's own bins: the divergences are near zero, while wrong bins cost much."""
    answerer = fresh().eval().requires_grad_(False)
    boxes = torch.tensor([0.5, 0.5, 0.25, 0.25]).expand(1, 4, 16, 4).clone()
    valid = torch.zeros(1, 4, 16, dtype=torch.bool)
    valid[:, :, 0] = True
    points = torch.zeros(1, 4, dtype=torch.bool)
    hidden = torch.zeros(1, 4, 48, 48)
    region, bins = answerer.model.region, torch.arange(1024)

    def losses(coordinate: float, size: float) -> dict[str, torch.Tensor]:
        blur = 0.25 * 1024 * 0.04
        region.coord_decoder.bias.copy_(-0.5 * ((bins - coordinate * 1024) / blur) ** 2)
        side = -0.5 * ((bins - (torch.tensor(size).log2() + 10) / 10 * 1023) / 6.0) ** 2
        region.size_decoder.bias.copy_(torch.cat([side, side]))
        return answer_losses(answerer, hidden, prompts_of(boxes, valid, points), room=20)

    right, wrong = losses(0.5, 0.25), losses(0.4, 0.35)
    for name in ("x", "y", "w", "h"):
        assert right[name] < 1e-3
        assert wrong[name] > 1.0


def test_the_dense_head_is_taught_where_boxes_are_and_not_where_it_is_unknown() -> None:
    batch = views([[4], [2]], unknown=[5])
    batch.boxes[:] = torch.tensor([0.4, 0.6, 0.3, 0.3])
    quiet = torch.full((2, 16, len(CLASSES) + 4), -8.0)

    def heat(change: tuple[int, int, int, float] | None = None) -> float:
        dense = quiet.clone()
        if change:
            view, token, name, value = change
            dense[view, token, name] = value
        return dense_losses(dense, batch, len(CLASSES))["heat"].item()

    centre = 2 * 4 + 1  # row 2, column 1 of 4 × 4
    assert heat((0, centre, 4, 8.0)) < heat() - 1.0
    assert heat((0, 0, 4, 8.0)) > heat() + 1.0
    assert heat((0, 0, 5, 8.0)) == pytest.approx(heat())  # unknown
    assert heat((1, centre, 4, 8.0)) > heat() + 1.0  # the other picture has no cat


def test_doubtful_boxes_are_left_alone_by_the_dense_head() -> None:
    batch = views([[4]], sure=[[False]])
    batch.boxes[:] = torch.tensor([0.4, 0.6, 0.3, 0.3])
    quiet = torch.full((1, 16, len(CLASSES) + 4), -8.0)
    loud = quiet.clone()
    loud[0, 2 * 4 + 1, 4] = 8.0
    without, there = (dense_losses(dense, batch, len(CLASSES)) for dense in (quiet, loud))
    assert there["heat"].item() == pytest.approx(without["heat"].item())
    assert there["box"] == without["box"] == 0.0


def test_thirty_steps_on_four_pictures_lower_every_loss() -> None:
    answerer = fresh().train()
    places = [(0.1, 0.1, 0.5, 0.5), (0.5, 0.1, 0.9, 0.5), (0.1, 0.5, 0.5, 0.9), (0.5, 0.5, 0.9, 0.9)]
    parts = [one_square(place) for place in places]
    split = Split(
        CLASSES, *(torch.cat([getattr(one, name) for one in parts]) for name in ("images", "sizes", "boxes", "labels")),
        torch.cat([one.sure for one in parts]), torch.cat([one.unknown for one in parts]),
    )  # fmt: skip
    optimiser = torch.optim.AdamW(groups(answerer, 3e-3, 0.3, 0.0))
    for group in optimiser.param_groups:
        group["lr"] = group["peak"]
    batch = plain_batch(split, torch.arange(4), 64)
    _, shares = balance(split)
    history: list[dict[str, float]] = []
    for _ in range(30):
        prompts = choose_prompts(batch, shares, SIMILAR, 2, 2, 16)
        hidden, dense = answerer(batch.images, WORDS[prompts.classes], prompts.points, read_back(prompts.boxes, 0.02))
        losses = answer_losses(answerer, hidden, prompts, room=4 * 12) | dense_losses(dense, batch, len(CLASSES))
        assert set(losses) == set(WEIGHTS)
        assert all(torch.isfinite(value) for value in losses.values())
        optimiser.zero_grad()
        torch.stack([WEIGHTS[name] * value for name, value in losses.items()]).sum().backward()
        unused = [name for name, parameter in answerer.named_parameters() if parameter.grad is None]
        assert set(unused) <= {"model.region.coord_features", "model.region.size_features"}, unused
        torch.nn.utils.clip_grad_norm_(answerer.parameters(), 2.0)
        optimiser.step()
        history.append({name: value.item() for name, value in losses.items()})
    for name in WEIGHTS:
        before, after = (np.mean([step[name] for step in part]) for part in (history[:3], history[-3:]))
        assert after < before, name
    total = [sum(WEIGHTS[name] * value for name, value in step.items()) for step in history]
    assert total[-1] < 0.6 * total[0]


# Optimisation, norms, and what is written


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [rate_at(i / 1000, 0.02) for i in range(1001)]
    assert rates[0] == 0.0
    assert rates[20] == max(rates) == 1.0
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    answerer = fresh()
    found = groups(answerer, 1e-3, 0.3, 0.1)
    ids = [id(parameter) for group in found for parameter in group["params"]]
    assert sorted(ids) == sorted(id(parameter) for parameter in answerer.parameters())
    for group in found:
        assert group["peak"] in (pytest.approx(1e-3), pytest.approx(3e-4))
        if group["weight_decay"]:
            assert all(parameter.ndim >= 2 for parameter in group["params"])
    by_id = {id(parameter): group for group in found for parameter in group["params"]}
    model = answerer.model
    assert by_id[id(model.vision.stem.first.conv.weight)]["peak"] == pytest.approx(3e-4)
    assert by_id[id(model.vision.stem.fine.weight)]["peak"] == pytest.approx(1e-3)
    assert by_id[id(model.text.wte)]["weight_decay"] == 0.0


def test_rare_classes_are_drawn_more(train: Split) -> None:
    weights, shares = balance(train)
    assert weights.shape == (3,)
    assert shares.shape == (len(CLASSES),)
    assert shares[CLASSES.index("cat")] == pytest.approx(1 / 3)
    assert shares[CLASSES.index("person")] == pytest.approx(1e-4)
    assert weights[2] == pytest.approx(0.7)  # nothing on it
    assert weights[0] >= weights[2]


def test_what_is_exported_is_loaded_by_the_engine(tmp_path: Path) -> None:
    answerer = fresh().eval().requires_grad_(False)
    stem = answerer.model.vision.stem
    assert isinstance(stem, CspStem)
    add_norms(stem, torch.randn(4, 3, 64, 64))
    for module in stem.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.bias, -0.3, 0.3)
    export(answerer.model, tmp_path / "model.safetensors")
    values = dataclasses.asdict(SMALL)
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    model = load(tmp_path, CPU, torch.float32)
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        wanted, got = answerer.model.vision(image, (1, 1)), model.vision(image, (1, 1))
    assert torch.allclose(got, wanted, atol=0.05 * wanted.abs().max().item())
    assert (tmp_path / "model.safetensors").stat().st_size < 2.2 * sum(p.numel() for p in model.parameters())


def test_drops_are_for_training_only() -> None:
    answerer = fresh()
    images = torch.randn(2, 3, 64, 64)
    model = answerer.model.eval()
    with torch.no_grad():
        before = model.vision(images[:1], (1, 1))
        add_drops(model, 0.5)
        assert torch.equal(model.vision(images[:1], (1, 1)), before)
        model.train()
        model.vision.stem.eval()
        outputs = [model.vision.blocks[0](torch.ones(64, 16, 48)) for _ in range(2)]
    changed = (outputs[0] - outputs[1]).abs().amax((1, 2)) > 1e-6
    assert 0.5 < changed.float().mean() < 1.0  # two branches, each left out half of the time: 3 of 4 pairs differ


def test_dropped_branches_are_made_up_for_on_average() -> None:
    answerer = fresh()
    model = answerer.model.eval()
    x = torch.randn(1, 16, 48)
    with torch.no_grad():
        wanted = model.text.blocks[0].mlp(x)
        add_drops(model, 0.3)
        model.train()
        got = model.text.blocks[0].mlp(x.expand(4000, -1, -1)).mean(0)
    assert torch.allclose(got, wanted[0], atol=0.05 * wanted.abs().max().item())


def test_a_run_leaves_a_model_and_goes_on(tmp_path: Path, pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, start, out = tmp_path / "shape", tmp_path / "start.safetensors", tmp_path / "out"
    shape.mkdir()
    text = dataclasses.replace(SMALL.text, vocab_size=64)  # nano's own words
    values = dataclasses.asdict(dataclasses.replace(SMALL, text=text))
    (shape / "config.json").write_text(json.dumps(values), encoding="utf-8")
    shutil.copyfile(NANO / "tokenizer.json", shape / "tokenizer.json")
    write_graph(tmp_path)
    save_file(convert(tmp_path / "graph.json"), start)
    given = f"--data {pack} --config {shape / 'config.json'} --stem {start} --budget 1000 --stop-after 0 --batch 4"
    main([*given.split(), "--out", str(out)])
    assert '"step": 10,' in capsys.readouterr().out
    with Engine.load(str(out), "cpu") as engine:
        assert engine.detect(square(240, 320, BOX), "cat", conf=0.0).boxes
    main([*given.split(), "--out", str(tmp_path / "more"), "--resume", str(out)])
    assert '"step": 20,' in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "more"))
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.vision.stem.fine.weight"], after["model.vision.stem.fine.weight"])


def test_nanos_own_config_can_be_trained() -> None:
    config = MoondreamConfig.from_file(NANO / "config.json")
    assert config.classes is not None
    answerer = build(config)
    assert answerer.length + config.text.prefix_attn <= config.text.max_context
    assert similar_classes(config.classes, CPU).shape == (31, 31)

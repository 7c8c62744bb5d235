from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.engine import label, noise, square, write_pack
from tests.support.training import BOX, CLASSES
from training.data import (
    SIDE,
    SLOTS,
    PackError,
    Split,
    load_split,
    read_classes,
    read_images,
    read_labels,
)


def test_a_split_has_its_images_and_labels(train: Split) -> None:
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


def test_images_lie_upper_left_and_the_rest_is_grey(train: Split) -> None:
    wanted = torch.from_numpy(square(240, 320, BOX)).permute(2, 0, 1)
    assert torch.equal(train.images[0, :, :240, :320], wanted)
    assert (train.images[0, :, 240:] == 114).all()
    assert (train.images[0, :, :, 320:] == 114).all()


def test_splits_are_kept_apart(pack: Path) -> None:
    assert len(load_split(pack, "val", 1).images) == 1
    assert [record["id"] for record in read_labels(pack, "train")] == ["000001", "000002", "000003"]
    with pytest.raises(PackError, match="no split 'test'; it has train, val"):
        read_labels(pack, "test")


def test_images_of_several_tars_are_found_by_their_id(pack: Path) -> None:
    found = read_images(pack, read_labels(pack, "train"))
    assert sorted(found) == ["000001", "000002", "000003"]
    with Image.open(io.BytesIO(found["000002"])) as image:
        assert image.size == (200, 300)


def test_a_pack_without_its_parts_is_refused(tmp_path: Path, pack: Path) -> None:
    with pytest.raises(PackError, match=r"no classes\.txt"):
        read_classes(tmp_path)
    with pytest.raises(PackError, match=r"no labels\.jsonl\.gz"):
        read_labels(tmp_path, "train")
    with pytest.raises(PackError, match=r"has no images-01\.tar"):
        read_images(tmp_path, read_labels(pack, "train")[:1])
    ghost = {"id": "999999", "tar": 0}
    with pytest.raises(PackError, match=r"1 images are missing in .*, such as ID 999999"):
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


def test_an_images_bytes_that_are_none_are_one_line(tmp_path: Path) -> None:
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

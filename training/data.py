"""Reads a dataset folder (labelled images for detection) as tensors.

A dataset folder contains `images-NN.tar`, `labels.jsonl.gz` and `classes.txt`.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SIDE = 416  # longest side of an image in the pack, pixels
SLOTS = 48  # most boxes kept of one image; the largest win (99.7 % of the images have fewer)


class PackError(ValueError):
    """Raised if a folder is not a valid dataset folder."""


@dataclass(slots=True)
class Split:
    """One split of a dataset, such as 'train', with N images.

    Attributes:
        classes: class names. A class ID is an index into this tuple.
        images: (N, 3, SIDE, SIDE) uint8. Each image is in the upper left corner; the rest is grey.
        sizes: (N, 2) float32, width and height of the image as fractions of SIDE.
        boxes: (N, SLOTS, 4) float32, x1 y1 x2 y2 as fractions of the image; zeros for padding.
        labels: (N, SLOTS) int64 class IDs, -1 for padding.
        sure: (N, SLOTS) bool, False for boxes with an uncertain label. The losses ignore these boxes.
        unknown: (N, classes) bool, True if objects of the class are not labelled in the image.
    """

    classes: tuple[str, ...]
    images: torch.Tensor
    sizes: torch.Tensor
    boxes: torch.Tensor
    labels: torch.Tensor
    sure: torch.Tensor
    unknown: torch.Tensor

    def to(self, device: torch.device) -> Split:
        """Return the dataset split with its tensors on `device`."""
        tensors = (self.images, self.sizes, self.boxes, self.labels, self.sure, self.unknown)
        return Split(self.classes, *(tensor.to(device) for tensor in tensors))


def read_classes(folder: Path) -> tuple[str, ...]:
    """Return the class names of a dataset folder.

    Raises:
        PackError: if the folder is not a dataset folder.
    """
    path = folder / "classes.txt"
    if not path.is_file():
        raise PackError(f"{folder} is not a dataset folder: it has no classes.txt")
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def read_labels(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the label records of a dataset split, as they are in the file.

    Raises:
        PackError: if the folder is not a dataset folder, or if it has no such split.
    """
    path = folder / "labels.jsonl.gz"
    if not path.is_file():
        raise PackError(f"{folder} is not a dataset folder: it has no labels.jsonl.gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        chosen = [record for record in records if record["split"] == split]
        splits = ", ".join(sorted({record["split"] for record in records}))
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise PackError(f"{path} is not a valid label file: {type(error).__name__}: {error}") from error
    if not chosen:
        raise PackError(f"{folder} has no split '{split}'; it has {splits}")
    return chosen


def read_images(folder: Path, records: list[dict[str, Any]]) -> dict[str, bytes]:
    """Return the encoded images of the given label records, by image ID.

    Raises:
        PackError: if a tar file or an image is missing.
    """
    wanted: dict[str, set[str]] = {}
    for record in records:
        wanted.setdefault(_tar_name(record["tar"]), set()).add(str(record["id"]))
    found: dict[str, bytes] = {}
    for tar_name, ids in wanted.items():
        path = folder / tar_name
        if not path.is_file():
            raise PackError(f"{folder} has no {tar_name}")
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    stem = Path(member.name).stem
                    if stem in ids and (file := tar.extractfile(member)) is not None:
                        found[stem] = file.read()
        except (tarfile.TarError, OSError) as error:
            raise PackError(f"{path} is truncated or not a tar file") from error
    if missing := [str(record["id"]) for record in records if str(record["id"]) not in found]:
        raise PackError(f"{len(missing)} images are missing in {folder}, such as ID {missing[0]}")
    return found


def open_image(encoded: dict[str, bytes], name: str) -> Image.Image:
    """Return a decoded image in RGB.

    Args:
        encoded: JPEG or PNG data of all images, by image ID; see `read_images`.
        name: ID of the image to decode.

    Raises:
        PackError: if the image is corrupt.
    """
    try:
        return Image.open(io.BytesIO(encoded[name])).convert("RGB")
    except OSError as error:
        raise PackError(f"image {name} cannot be decoded") from error


def load_split(folder: Path, split: str, workers: int, limit: int | None = None) -> Split:
    """Read and decode the images of a dataset split with `workers` threads. `limit` is the maximum number of images.

    Raises:
        PackError: if the folder is not a complete dataset folder.
    """
    classes = read_classes(folder)
    records = read_labels(folder, split)[:limit]
    encoded = read_images(folder, records)
    n = len(records)
    images = torch.full((n, 3, SIDE, SIDE), 114, dtype=torch.uint8)
    sizes = torch.zeros(n, 2)
    boxes = torch.zeros(n, SLOTS, 4)
    labels = torch.full((n, SLOTS), -1, dtype=torch.int64)
    sure = torch.zeros(n, SLOTS, dtype=torch.bool)
    unknown = torch.zeros(n, len(classes), dtype=torch.bool)
    ids = {name: i for i, name in enumerate(classes)}

    def decode(i: int) -> None:
        image = open_image(encoded, str(records[i]["id"]))
        image.thumbnail((SIDE, SIDE))
        images[i, :, : image.height, : image.width] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        sizes[i] = torch.tensor([image.width / SIDE, image.height / SIDE])

    for i, record in enumerate(records):
        named = {*record["boxes"], *record["maybe"], *record["unknown"]}
        if strange := named - ids.keys():
            raise PackError(f"label '{min(strange)}' of image {record['id']} is missing in classes.txt")
        rows = [(*box[:4], ids[name], True) for name, group in record["boxes"].items() for box in group]
        rows += [(*box[:4], ids[name], False) for name, group in record["maybe"].items() for box in group]
        rows.sort(key=lambda row: (row[2] - row[0]) * (row[3] - row[1]), reverse=True)
        for slot, row in enumerate(rows[:SLOTS]):
            boxes[i, slot] = torch.tensor(row[:4])
            labels[i, slot], sure[i, slot] = row[4], row[5]
        for name in record["unknown"]:
            unknown[i, ids[name]] = True
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(decode, range(n)))
    return Split(classes, images, sizes, boxes, labels, sure, unknown)


def _tar_name(value: Any) -> str:
    name = str(value)
    return name if name.endswith(".tar") else f"images-{int(name):02d}.tar"

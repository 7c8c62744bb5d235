"""Evaluates a model on a dataset folder: AP, precision, recall and specificity for each class.

    python -m training.score DATASET --model FOLDER

An image on which a class is not labelled (`unknown`) is not used for this class. Boxes with an uncertain label
(`maybe`) are ignored. Requires pycocotools.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.engine.api import Engine
from saccade.engine.errors import EngineError
from saccade.engine.results import Box, ResultFuture
from saccade.engine.tasks import Detect
from training.data import PackError, open_image, read_classes, read_images, read_labels

LOW_CONF = 0.05  # precision-recall curves start here; precision, recall and empty answers are at `DEFAULT_CONF`
DEFAULT_CONF = 0.5
MAX_OBJECTS = 40
AHEAD = 4  # images that are asked about while one is waited for


@dataclass(slots=True, frozen=True)
class ClassScore:
    """Scores of one class on one split. Rates are from 0 to 1, or None if they are undefined.

    Attributes:
        name: name of the class.
        boxes: number of labelled boxes.
        images: number of images on which the class was evaluated.
        ap50: average precision at an IoU of 0.5 (COCO's 101-point interpolation).
        ap: mean of the average precision at IoUs from 0.50 to 0.95.
        precision: precision at a score threshold of 0.5 and an IoU of 0.5.
        recall: recall at a score threshold of 0.5 and an IoU of 0.5.
        empty: specificity: among images without the class, the fraction without a detection above a score of 0.5.
    """

    name: str
    boxes: int
    images: int
    ap50: float | None
    ap: float | None
    precision: float | None
    recall: float | None
    empty: float | None


@dataclass(slots=True, frozen=True)
class Evaluation:
    """Scores of all classes, and means over the classes with labelled boxes.

    Attributes:
        empty: specificity over all classes and images.
    """

    classes: tuple[ClassScore, ...]
    images: int
    ap50: float | None
    ap: float | None
    empty: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as a dict that can be written as JSON."""
        return asdict(self)


@dataclass(slots=True, frozen=True)
class _Sheet:
    """Labelled and detected boxes of one class in one image, as x1 y1 x2 y2 in pixels."""

    sure: list[list[float]]
    maybe: list[list[float]]
    found: list[Box]
    width: int
    height: int


def evaluate(
    engine: Engine,
    folder: Path,
    split: str = "val",
    limit: int | None = None,
    progress: Callable[[int, int], None] = print,
    tiles: int = 1,
) -> Evaluation:
    """Detect objects in the images of a dataset split, and score the detections.

    Args:
        engine: engine with the model to evaluate.
        folder: dataset folder (classes.txt, labels.jsonl.gz, images-NN.tar).
        split: name of the split, such as 'train' or 'val'.
        limit: maximum number of images.
        progress: callback (done, total) after each image.
        tiles: number of tiles per side into which each image is cut; 1 uses only the whole image.

    Raises:
        EngineError: if the folder is not a dataset folder, or if pycocotools is missing.
    """
    _coco()
    try:
        known = engine.model.classes
        classes = [name for name in read_classes(folder) if known is None or name in known]
        records = read_labels(folder, split)[:limit]
        images = read_images(folder, records)
    except PackError as error:
        raise EngineError(str(error)) from error
    sheets: dict[str, list[_Sheet]] = {name: [] for name in classes}
    waiting: deque[tuple[dict[str, Any], list[str], ResultFuture]] = deque()
    ahead = iter(records)
    for done in range(1, len(records) + 1):
        for record in itertools.islice(ahead, AHEAD - len(waiting)):  # the answers of several images share steps
            try:
                image = np.asarray(open_image(images, str(record["id"])))
            except PackError as error:
                raise EngineError(str(error)) from error
            asked = [name for name in classes if name not in record["unknown"]]
            tasks = [Detect(name, MAX_OBJECTS, LOW_CONF) for name in asked]
            waiting.append((record, asked, engine.submit(image, tasks, tiles)))
        record, asked, future = waiting.popleft()
        result = future.result()
        width, height = result.detections.width, result.detections.height
        scale = np.array([width, height, width, height])
        for name in asked:
            sure = [
                list(box[:4] * scale) for box in np.array(record["boxes"].get(name, []), dtype=object).reshape(-1, 6)
            ]
            maybe = [
                list(box[:4] * scale) for box in np.array(record["maybe"].get(name, []), dtype=object).reshape(-1, 5)
            ]
            found = [box for box in result.detections.boxes if box.label == name]
            sheets[name].append(_Sheet(sure, maybe, found, width, height))
        progress(done, len(records))
    scores = tuple(_score(name, sheets[name]) for name in classes)
    absent = [sheet for group in sheets.values() for sheet in group if not sheet.sure and not sheet.maybe]
    return Evaluation(
        classes=scores,
        images=len(records),
        ap50=_mean(score.ap50 for score in scores),
        ap=_mean(score.ap for score in scores),
        empty=_empty_rate(absent),
    )


def _score(name: str, sheets: Sequence[_Sheet]) -> ClassScore:
    boxes = sum(len(sheet.sure) for sheet in sheets)
    ap50 = ap = precision = recall = None
    if boxes:
        run = _match(sheets)
        curves = run.eval["precision"][:, :, 0, 0, 2]  # (IoU, recall level): all areas, most detections
        ap50, ap = float(curves[0].mean()), float(curves.mean())
        right = wrong = 0
        for image in run.evalImgs:
            if image is None or image["aRng"] != run.params.areaRng[0]:
                continue
            counts = (np.array(image["dtScores"]) > DEFAULT_CONF) & ~image["dtIgnore"][0].astype(bool)
            hits = image["dtMatches"][0] > 0
            right += int((counts & hits).sum())
            wrong += int((counts & ~hits).sum())
        precision = right / (right + wrong) if right + wrong else None
        recall = right / boxes
    empty = _empty_rate([sheet for sheet in sheets if not sheet.sure and not sheet.maybe])
    return ClassScore(name, boxes, len(sheets), ap50, ap, precision, recall, empty)


def _match(sheets: Sequence[_Sheet]) -> Any:
    """Match the detections of one class with its labels by COCO's rules. Uncertain labels count as crowd regions."""
    coco_api, coco_eval = _coco()
    labels: list[dict[str, Any]] = []
    finds: list[dict[str, Any]] = []
    for image, sheet in enumerate(sheets, 1):
        for crowd, group in ((0, sheet.sure), (1, sheet.maybe)):
            for x1, y1, x2, y2 in group:
                box = [x1, y1, x2 - x1, y2 - y1]
                labels.append(
                    {"id": len(labels) + 1, "image_id": image, "category_id": 1, "bbox": box, "iscrowd": crowd}
                    | {"area": box[2] * box[3], "ignore": 0}
                )
        for found in sheet.found:
            x1, y1, x2, y2 = found.pixels(sheet.width, sheet.height)
            finds.append(
                {"image_id": image, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1], "score": found.score}
            )
    truth = coco_api()
    truth.dataset = {
        "info": {},
        "images": [{"id": image} for image in range(1, len(sheets) + 1)],
        "annotations": labels,
        "categories": [{"id": 1}],
    }
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
        truth.createIndex()
        run = coco_eval(truth, truth.loadRes(finds) if finds else coco_api(), "bbox")
        if not finds:
            run.cocoDt.dataset = truth.dataset | {"annotations": []}
            run.cocoDt.createIndex()
        run.evaluate()
        run.accumulate()
    return run


def _coco() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise EngineError("scoring needs pycocotools: pip install pycocotools") from error
    return COCO, COCOeval


def _empty_rate(absent: Sequence[_Sheet]) -> float | None:
    return _mean(float(not any(box.score > DEFAULT_CONF for box in sheet.found)) for sheet in absent)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def table_of(scores: Evaluation) -> str:
    """Return a text table of the scores in percent, with one row per class and a row of means."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    def row(name: str, boxes: object, *rates: object) -> str:
        return f"{name:<16}{boxes:>8}" + "".join(f"{rate:>11}" for rate in rates)

    lines = [row("class", "boxes", "AP50", "AP50:95", "precision", "recall", "empty")]
    for one in scores.classes:
        rates = (one.ap50, one.ap, one.precision, one.recall, one.empty)
        lines.append(row(one.name, one.boxes, *map(percent, rates)))
    boxes = sum(one.boxes for one in scores.classes)
    lines.append(row("all", boxes, percent(scores.ap50), percent(scores.ap), "", "", percent(scores.empty)))
    return "\n".join([*lines, f"{scores.images} images; in percent; precision, recall and empty at conf 0.5"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `training.score`, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.score", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="dataset folder")
    parser.add_argument("--split", default="val", help="split of the data to use (default: val)")
    parser.add_argument("--limit", type=int, help="use only the first N images")
    parser.add_argument("--model", default="nano", help="name, folder or hub id (default: nano)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or fp8")
    parser.add_argument("--imgsz", type=int, help="input size of nano in pixels")
    parser.add_argument(
        "--tiles", type=int, default=1, help="process N x N overlapping tiles of each image, as in `saccade run`"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(argv)

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    try:
        with Engine.load(given.model, given.device, given.dtype, imgsz=given.imgsz) as engine:
            scores = evaluate(engine, given.data, given.split, given.limit, show, given.tiles)
    except (EngineError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(scores.to_dict(), indent=2) if given.json else table_of(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares answers of the engine with the stored answers of a reference implementation (golden folder).

The engine processes all prompts on an image concurrently.

The reference ends a list of objects if the end token is more likely than the coordinate token of another object. The
engine also ends the list if the score of the next object is below 0.5. The report counts shorter lists as `stopped
sooner`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.engine.api import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.model_loader import ModelInfo
from saccade.engine.models.protocol import LoadedModel
from saccade.engine.results import Reasoning, Result, ResultFuture, Text
from saccade.engine.tasks import Caption, Detect, Point, Query, TextTask
from saccade.engine.tasks.task import Task

MAX_OBJECTS, MAX_TOKENS = 6, 24
ANYTHING, ANY_NUMBER = math.inf, sys.float_info.max
"""Tolerances of quantities that are only reported; ANY_NUMBER still rejects NaN and infinity."""


@dataclass(slots=True)
class Quantity:
    """Result of comparing a quantity, such as boxes or logits: tolerance, number of differences, largest difference."""

    name: str
    tolerance: float
    compared: int = 0
    differing: int = 0
    worst: float = 0.0
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether all differences are within the tolerance. NaN counts as an infinite difference."""
        return self.worst <= self.tolerance

    def add(self, difference: float, where: str) -> None:
        """Record the difference between a value and its stored reference. `where` names the value in the report."""
        self.compared += 1
        self.differing += difference != 0
        if math.isnan(difference):
            difference = math.inf
        if difference > self.worst:
            self.worst, self.where = difference, where


@dataclass(slots=True, frozen=True)
class _Call:
    """One request, and the answer of the reference implementation: a text or a list of objects."""

    where: str
    task: Task
    ids: list[int] | None
    answer: Any
    reasoning: Any = None
    blank: bool = False


def compare_engine(loaded: LoadedModel, folder: Path, cases: list[dict[str, Any]], exact: bool) -> list[Quantity]:
    """Compare answers of the engine with the stored answers of a reference implementation.

    Args:
        loaded: the model.
        folder: golden folder, with the model, the images and cases.json.
        cases: the parsed cases.json.
        exact: whether answers must be equal. Otherwise differences are only reported.

    Raises:
        LookupError: if a case does not have the expected fields.
        TypeError: if a field of a case has a wrong type.
    """
    close, equal = (1e-6, 0.0) if exact else (ANYTHING, ANYTHING)  # the reference computes corners in Python's doubles
    ids, boxes, points, texts, reasoning, grounding = (
        Quantity("prompt ids", 0.0),
        Quantity("engine boxes", close),
        Quantity("engine points", close),
        Quantity("engine texts", equal),
        Quantity("reasoning texts", equal),
        Quantity("reasoning points", close),
    )
    sooner, bos = Quantity("stopped sooner", ANYTHING), loaded.model.limits.bos_id
    info = ModelInfo.of(loaded, folder.name, folder, None)
    with Engine(loaded, info, config=EngineConfig(depth=2)) as engine:
        results = (pair for case in cases for pair in _results(engine, _batches(folder, case)))
        for calls, result in results:
            for call in calls:
                if call.ids is not None:
                    asked = [*([bos] if call.blank else []), *call.task.prompt(loaded.prompts)]
                    ids.add(0.0 if asked == call.ids else math.inf, call.where)
                if isinstance(call.answer, str):
                    (text,) = (one for one in result.texts if one.prompt == _title(call.task))
                    texts.add(0.0 if text.text == call.answer else math.inf, call.where)
                    if call.reasoning is not None:
                        _compare_reasoning(text, reasoning, grounding, call)
                else:
                    quantity = boxes if isinstance(call.task, Detect) else points
                    _compare_objects(quantity, sooner, _numbers(result, call.task), call)
    compared = [one for one in (ids, boxes, points, texts, reasoning, grounding) if one.compared]
    return compared + ([sooner] if sooner.differing else [])


def _results(
    engine: Engine, batches: list[tuple[NDArray[np.uint8] | None, list[_Call]]]
) -> Iterator[tuple[list[_Call], Result]]:
    """Yield the requests and the result of each batch of a case.

    The first batch with the image prefills it. The other batches share a second prefill: one per batch took 10 s
    instead of 3 s for the tests' Moondream 2.
    """
    futures: list[ResultFuture] = []
    prefilled, encoded = False, None
    with ExitStack() as stack:
        for image, calls in batches:
            if image is not None and prefilled and encoded is None:
                encoded = stack.enter_context(engine.encode(image))
            futures.append(engine.submit(image if image is None else encoded or image, [call.task for call in calls]))
            prefilled |= image is not None
        for (_, calls), future in zip(batches, futures, strict=True):
            yield calls, future.result()


def _compare_reasoning(text: Text, texts: Quantity, grounding: Quantity, call: _Call) -> None:
    mine = text.reasoning or Reasoning("")
    texts.add(0.0 if mine.text == call.reasoning["text"] else math.inf, call.where)
    wanted = [(one["start_idx"], one["end_idx"], len(one["points"])) for one in call.reasoning["grounding"]]
    if [(one.start, one.end, len(one.points)) for one in mine.grounding] != wanted:
        grounding.add(math.inf, call.where)
        return
    for ours, theirs in zip(mine.grounding, call.reasoning["grounding"], strict=True):
        for a, b in zip(ours.points, theirs["points"], strict=True):
            grounding.add(max(abs(a[0] - b[0]), abs(a[1] - b[1])), call.where)


def _compare_objects(quantity: Quantity, sooner: Quantity, got: list[list[float]], call: _Call) -> None:
    wanted = [[min(1.0, max(0.0, float(number))) for number in one.values()] for one in call.answer]
    short = len(got) < len(wanted)
    if len(got) > len(wanted) or (short and call.ids is None):
        quantity.add(math.inf, call.where)
        return
    sooner.add(float(short), call.where)
    for mine, theirs in zip(got, wanted, strict=False):
        for a, b in zip(mine, theirs, strict=True):
            quantity.add(abs(a - b), call.where)


def _numbers(result: Result, task: Task) -> list[list[float]]:
    if isinstance(task, Detect):
        boxes = (box for box in result.detections.boxes if box.label == task.label)
        return [[box.x1, box.y1, box.x2, box.y2] for box in boxes]
    return [[spot.x, spot.y] for spot in result.points.points if spot.label == task.asked]


def _title(task: Task) -> str:
    assert isinstance(task, TextTask)
    return task.title


def _batches(folder: Path, case: dict[str, Any]) -> list[tuple[NDArray[np.uint8] | None, list[_Call]]]:
    """Group the requests of a case in cases.json into batches. No request occurs twice in a batch.

    Requests with an image and requests without an image are in separate batches.
    """
    name = str(case["image"])
    image = read_image(folder / name)
    batches: list[tuple[bool, dict[tuple[str, str], _Call]]] = []
    for call in _calls(name, case):
        title = call.task.title if isinstance(call.task, TextTask) else call.task.asked
        key = (call.task.skill, title)
        batch = next((one for blank, one in batches if blank == call.blank and key not in one), None)
        if batch is None:
            batch = {}
            batches.append((call.blank, batch))
        batch[key] = call
    return [(None if blank else image, list(batch.values())) for blank, batch in batches]


def _calls(name: str, case: dict[str, Any]) -> Iterator[_Call]:
    if "calls" in case:
        yield from (_reference_call(name, call) for call in case["calls"])
        return
    for skill, task in (("detect", Detect), ("point", Point)):
        for label, by_bias in case[skill].items():
            ids = case["prompts"][skill][label] if "prompts" in case else None
            for bias, objects in by_bias.items():
                conf = 1 / (1 + math.exp(-float(bias)))
                yield _Call(f"{name} {skill} '{label}' at {bias}", task(label, MAX_OBJECTS, conf), ids, objects)
    prompts = case.get("prompts", {"query": {}, "caption": {}})
    for question, answer in case.get("queries", {"how many?": {"text": case["query"]}}).items():
        ids = prompts["query"].get(question)
        yield _Call(f"{name} query '{question}'", Query(question, MAX_TOKENS), ids, str(answer["text"]))
    for length, answer in case.get("captions", {"short": {"text": case["caption_short"]}}).items():
        ids = prompts["caption"].get(length)
        yield _Call(f"{name} caption '{length}'", Caption(length, MAX_TOKENS), ids, str(answer["text"]))


def _reference_call(name: str, call: dict[str, Any]) -> _Call:
    kind, result = str(call["kind"]), call["result"]
    where = f"{name} {kind} '{call.get('question') or call.get('object') or call.get('length')}'"
    ids = [int(one) for one in call["prompts"][0]["ids"]]
    if kind == "query":
        refs = tuple(tuple(ref) for ref in call.get("spatial_refs") or ())
        task = Query(call["question"], MAX_TOKENS, reasoning=bool(call.get("reasoning")), refs=refs)
        return _Call(where, task, ids, str(result["answer"]), result.get("reasoning"), "image" in call)
    if kind == "caption":
        return _Call(where, Caption(call["length"], MAX_TOKENS), ids, str(result["caption"]))
    if kind == "detect":
        return _Call(where, Detect(call["object"], int(call["max_objects"])), ids, result["objects"])
    return _Call(where, Point(call["object"], int(call["max_objects"])), ids, result["points"])


def read_image(path: Path) -> NDArray[np.uint8]:
    """Read an image file as (height, width, 3) uint8 RGB.

    Raises:
        OSError: if the file cannot be read.
    """
    with Image.open(path) as file:
        return np.asarray(file.convert("RGB"))

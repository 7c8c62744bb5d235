"""Compares normalizations of the hidden states before a model's region heads.

Published implementations use different normalizations. With the wrong normalization, detected boxes are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.engine.golden.reference import Generator
from saccade.engine.models.protocol import LoadedModel, ReadableHeads
from saccade.engine.results import Box
from saccade.engine.tasks.objects import DecodedObject

_MOST = 10  # maximum boxes per answer


@dataclass(slots=True, frozen=True)
class Reading:
    """Detections of a model with one normalization of the hidden states before its region heads.

    Attributes:
        name: name of the normalization, one of `ReadableHeads.readings`.
        found: number of detected boxes.
        overlap: mean of the best IoU of each ground-truth box with a detected box.
    """

    name: str
    found: int
    overlap: float


def compare_readings(
    loaded: LoadedModel, image: NDArray[np.uint8], label: str, wanted: Sequence[Box], conf: float = 0.5
) -> list[Reading]:
    """Detect objects once with each normalization of the hidden states, and compare the boxes with the ground truth.

    Return one result per normalization, or [] if the model supports only one normalization.

    Args:
        loaded: the model. Its current normalization is restored afterwards.
        image: (height, width, 3) uint8 RGB.
        label: label of the objects.
        wanted: ground-truth boxes, at least one.
        conf: minimum score of a box, from 0 to 1.
    """
    heads = loaded.model.region
    if not isinstance(heads, ReadableHeads) or len(heads.readings) < 2:
        return []
    generator, (usual, *others) = Generator(loaded.model, loaded.prompts.eos_id), heads.readings
    prefix = generator.prefix(generator.image_tokens(image))
    readings = []
    try:
        for name in (usual, *others):
            heads.read_as(name)
            state = generator.prefill(prefix, [loaded.prompts.objects("detect", label)], 3 * _MOST)
            (found,) = generator.objects(state, True, [_MOST], [conf])
            best = [max((_overlap(box, one) for one in found), default=0.0) for box in wanted]
            readings.append(Reading(name, len(found), sum(best) / len(best)))
    finally:
        heads.read_as(usual)
    return readings


def _overlap(box: Box, one: DecodedObject) -> float:
    """Return the intersection over union (IoU) of two boxes."""
    left, top = max(box.x1, one.x - one.width / 2), max(box.y1, one.y - one.height / 2)
    right, bottom = min(box.x2, one.x + one.width / 2), min(box.y2, one.y + one.height / 2)
    common = max(0.0, right - left) * max(0.0, bottom - top)
    whole = (box.x2 - box.x1) * (box.y2 - box.y1) + one.width * one.height - common
    return common / whole if whole > 0 else 0.0

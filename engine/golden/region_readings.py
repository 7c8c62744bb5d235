"""Which of several readings of a model's region heads finds what another model finds.

Where public sources disagree on what the heads are to be given, its weights decide: only one of them puts boxes where
things are. Knows models and boxes, nothing of command lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.engine.golden.reference import Generator
from saccade.engine.models.protocol import LoadedModel, ReadableHeads
from saccade.engine.results import Box
from saccade.engine.tasks.output_state import DecodedObject

_MOST = 10  # boxes of an answer


@dataclass(slots=True, frozen=True)
class Reading:
    """What a model finds with its heads read in one way.

    Attributes:
        name: one of `ReadableHeads.readings`.
        found: how many boxes.
        overlap: mean over the boxes wanted of the best intersection over union with one that was found.
    """

    name: str
    found: int
    overlap: float


def compare_readings(
    loaded: LoadedModel, image: NDArray[np.uint8], label: str, wanted: Sequence[Box], conf: float = 0.5
) -> list[Reading]:
    """Ask a model for objects of a name in an image, in every reading that it has; none if there is but one.

    Args:
        loaded: the model, which reads as before afterwards.
        image: (height, width, 3) uint8 RGB.
        label: what to ask for.
        wanted: where it is, at least one box.
        conf: least score of a box.
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
    """Intersection over union."""
    left, top = max(box.x1, one.x - one.width / 2), max(box.y1, one.y - one.height / 2)
    right, bottom = min(box.x2, one.x + one.width / 2), min(box.y2, one.y + one.height / 2)
    common = max(0.0, right - left) * max(0.0, bottom - top)
    whole = (box.x2 - box.x1) * (box.y2 - box.y1) + one.width * one.height - common
    return common / whole if whole > 0 else 0.0

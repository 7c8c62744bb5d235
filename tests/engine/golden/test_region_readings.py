from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from saccade.engine.golden.check_engine import read_image
from saccade.engine.golden.region_readings import compare_readings
from saccade.engine.models import registry
from saccade.engine.models.protocol import ReadableHeads
from saccade.engine.results import Box
from tests.support.engine import GOLDEN, GOLDEN_3, one_thread

CONF = 1 / (1 + math.exp(0.31))  # of the bias that the stored objects are of
CPU = torch.device("cpu")


def boxes(objects: list[dict[str, float]]) -> list[Box]:
    return [Box("person", 1.0, one["x_min"], one["y_min"], one["x_max"], one["y_max"]) for one in objects]


def test_each_reading_finds_what_the_reference_finds_with_it() -> None:
    loaded = registry.load(GOLDEN_3, CPU, torch.float32)
    case = json.loads((GOLDEN_3 / "cases.json").read_text())[0]
    image = read_image(GOLDEN_3 / str(case["image"]))
    stored = {"post_ln_ln": case["detect"], **{name: case["other_region"][name]["detect"] for name in ("raw", "ln")}}
    name, wanted = "red car", {reading: boxes(found["red car"]["-0.31"]) for reading, found in stored.items()}
    with one_thread():
        for reading, where in wanted.items():
            found = {one.name: one for one in compare_readings(loaded, image, name, where, CONF)}
            for other, one in found.items():
                assert (one.overlap > 0.999) == (other == reading), (reading, other)
    assert all(wanted.values())
    assert isinstance(loaded.model.region, ReadableHeads)
    assert loaded.model.region.readings[0] == "post_ln_ln"


def test_a_model_with_one_reading_has_nothing_to_choose() -> None:
    loaded = registry.load(GOLDEN, CPU, torch.float32)
    image = read_image(Path(GOLDEN) / "images" / "0.png")
    assert compare_readings(loaded, image, "person", [Box("person", 1.0, 0.1, 0.1, 0.5, 0.5)]) == []

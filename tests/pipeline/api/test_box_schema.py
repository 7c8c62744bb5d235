from __future__ import annotations

from typing import Any

import pytest

from saccade.engine.results import Box, Detections, Points, Result, Spot
from saccade.pipeline.api.box_schema import BoxSchema

RESULT = Result(
    Detections((Box("cat", 0.75, 0.1, 0.2, 0.5, 0.6),), 200, 100), Points((Spot("cat", 0.5, 0.25, 0.5),), 200, 100)
)
NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}


def array(**properties: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "object", "properties": properties}}


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (array(label={}, box={"type": "array", "items": NUMBER}), [{"label": "cat", "box": [0.1, 0.2, 0.5, 0.6]}]),
        (array(bbox_2d={"type": "array", "items": INTEGER}), [{"bbox_2d": [20, 20, 100, 60]}]),
        (
            array(x1=INTEGER, y1=INTEGER, x2=INTEGER, y2=INTEGER, score=NUMBER),
            [{"x1": 20, "y1": 20, "x2": 100, "y2": 60, "score": 0.75}],
        ),
        (array(x=NUMBER, y=NUMBER), [{"x": 0.25, "y": 0.5}]),
        (
            {
                "type": "object",
                "properties": {"objects": {"$ref": "#/$defs/all"}},
                "$defs": {"all": array(name={"enum": ["cat", "dog"]}, point={"type": "array", "items": INTEGER})},
            },
            {"objects": [{"name": "cat", "point": [50, 50]}]},
        ),
    ],
)
def test_what_is_found_is_written_as_the_schema_has_it(schema: dict[str, Any], answer: Any) -> None:
    assert BoxSchema.of(schema).answer(RESULT) == answer


def test_labels_are_those_of_the_enum() -> None:
    box = {"type": "array", "items": NUMBER}
    assert BoxSchema.of(array(label={"enum": ["cat", "dog"]}, bbox=box)).labels == ["cat", "dog"]
    assert BoxSchema.of(array(label={"const": "cat"}, bbox=box)).labels == ["cat"]
    assert BoxSchema.of(array(label={"type": "string"}, bbox=box)).labels == []


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": "object", "properties": {"answer": {"type": "string"}}},
        array(),
        array(label={}),
        array(x1=NUMBER, y1=NUMBER),
        array(label={"enum": "cat"}, box={}),
        array(label={"enum": [1]}, box={}),
        {**array(box={}, colour={}), "items": {**array(box={}, colour={})["items"], "required": ["colour"]}},
        {"type": "array", "items": {"$ref": "#/$defs/nothing"}},
    ],
)
def test_other_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"schema|found|enum|not supported"):
        BoxSchema.of(schema)

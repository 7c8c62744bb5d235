"""What a score means: how answers are judged and counted."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from saccade.engine.results import Box
from training.reliability import WAYS, Counted, drawing_of, judge, table_of

PERSON = (0.2, 0.2, 0.4, 0.6)


def found(score: float, *box: float) -> Box:
    return Box("person", score, *box)


@pytest.mark.parametrize(
    ("boxes", "wanted"),
    [
        ([found(0.9, *PERSON)], [(0.9, True)]),
        ([found(0.4, *PERSON), found(0.9, *PERSON)], [(0.9, True), (0.4, False)]),  # the second one is a duplicate
        ([found(0.9, 0.2, 0.2, 0.22, 0.22)], [(0.9, False)]),
        ([found(0.9, 0.62, 0.62, 0.78, 0.78)], []),  # on a doubtful box
    ],
)
def test_an_answer_is_right_once_for_each_labelled_box(boxes: list[Box], wanted: list[tuple[float, bool]]) -> None:
    assert judge(boxes, [PERSON], [(0.6, 0.6, 0.8, 0.8)]) == wanted


def test_the_error_is_the_distance_of_scores_from_what_is_right() -> None:
    one = Counted()
    for number in range(10):
        one.note(0.75, right=number < 5)
    assert one.error == pytest.approx(0.25)
    assert Counted().error == 0.0


def test_scores_at_the_ends_have_a_bin() -> None:
    one = Counted()
    for score in (0.0, 0.05, 1.0):
        one.note(score, right=True)
    assert one.answers.tolist() == [2, *[0] * 8, 1]


def test_the_table_and_the_drawing_have_each_way() -> None:
    counted = {way: Counted() for way in WAYS}
    for one in counted.values():
        for _ in range(20):
            one.note(0.95, right=True)
    assert [line.split("  ")[0] for line in table_of(counted).splitlines()[1:]] == list(WAYS)
    ET.fromstring(drawing_of(counted))

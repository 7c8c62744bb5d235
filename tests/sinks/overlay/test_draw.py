"""What is drawn, where, and in which colour, read back from the pixels."""

from __future__ import annotations

import subprocess
import sys

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.results import Box, Detections, Outline, Points, Result, Spot, Text, Timings
from saccade.sinks import color_of, draw
from saccade.sinks.overlay import PALETTE
from tests.support import REPO

SIZES = [(640, 360), (1920, 1080), (360, 640), (64, 48), (16, 16), (1, 1)]


def result(boxes: tuple[Box, ...] = (), spots: tuple[Spot, ...] = (), texts: tuple[Text, ...] = ()) -> Result:
    return Result(Detections(boxes, 1, 1), Points(spots, 1, 1), texts)


def near(image: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Where the image has that colour."""
    return np.abs(image.astype(int) - color).max(axis=2) <= 6


EVERYTHING = result(
    (
        Box("person", 0.93, 0.1, 0.2, 0.4, 0.9),
        Box("car", 0.5, 0.0, 0.0, 1.0, 1.0),
        Box("dog", 0.4, -0.2, 0.9, 0.1, 1.3),
    ),
    (Spot("cup", 0.7, 0.6, 0.5), Spot("cup", 0.7, 1.0, 0.0)),
    (Text("What is this?", "A long answer. " * 60),),
)


@pytest.mark.parametrize("size", SIZES)
def test_the_given_image_is_not_changed(size: tuple[int, int]) -> None:
    image = np.full((size[1], size[0], 3), 90, np.uint8)
    image.flags.writeable = False
    drawn = draw(image, EVERYTHING, 12.3)
    assert drawn.shape == image.shape
    assert drawn.dtype == np.uint8
    assert (image == 90).all()
    assert not (drawn == image).all()


def test_an_empty_result_leaves_the_image_as_it_is() -> None:
    image = np.random.default_rng(0).integers(0, 255, (90, 160, 3), dtype=np.uint8)
    assert (draw(image, result()) == image).all()


@pytest.mark.parametrize("size", [(640, 360), (1920, 1080), (361, 641)])
def test_a_box_is_drawn_where_it_is_in_its_colour(size: tuple[int, int]) -> None:
    width, height = size
    box = Box("person", 0.93, 0.25, 0.3, 0.75, 0.8)
    drawn = draw(np.full((height, width, 3), 128, np.uint8), result((box,)))
    line = near(drawn, color_of("person"))
    x1, y1, x2, y2 = (round(v) for v in box.pixels(width, height))
    middle_x, middle_y = width // 2, height // 2
    for x in (x1, x2):
        assert line[middle_y, x - 1 : x + 2].any()
    assert line[y2 - 1 : y2 + 2, middle_x].any()
    assert (
        drawn[y1 + height // 6 : y2 - height // 20, x1 + width // 20 : x2 - width // 20] == 128
    ).all()  # inside is clear
    assert line[:y1, x1:middle_x].any()  # the label sits above


def test_a_box_over_the_whole_image_shows_on_every_side() -> None:
    drawn = draw(np.zeros((360, 640, 3), np.uint8), result((Box("person", 0.9, 0.0, 0.0, 1.0, 1.0),)))
    line = near(drawn, color_of("person"))
    for side in (line[180, :4], line[180, -4:], line[:4, 320], line[-4:, 320]):
        assert side.any()


@pytest.mark.parametrize("background", [0, 128, 255])
def test_points_and_labels_stand_out_from_any_background(background: int) -> None:
    drawn = draw(np.full((360, 640, 3), background, np.uint8), result(spots=(Spot("cup", 0.7, 0.5, 0.5),)))
    assert near(drawn, color_of("cup"))[180, 320]
    around = drawn[170:191, 310:331].astype(int).sum(axis=2)
    assert around.max() > 600  # a light ring
    assert around.min() < 200  # a dark casing


def label_area(image: np.ndarray, color: tuple[int, int, int]) -> int:
    """Pixels of the label of that colour: what is left when all thin lines are taken off."""
    return int(cv2.erode(near(image, color).astype(np.uint8), np.ones((4, 4), np.uint8)).sum())


def test_labels_of_neighbours_do_not_cover_each_other() -> None:
    background = np.full((360, 640, 3), 128, np.uint8)
    boxes = tuple(Box(name, 0.9, 0.3, 0.4 + 0.01 * n, 0.7, 0.8) for n, name in enumerate(("person", "car", "cat")))
    together = draw(background, result(boxes))
    for box in boxes:
        alone = label_area(draw(background, result((box,))), color_of(box.label))
        assert alone > 100
        # Where a label joins a line of its colour, a little more is left.
        assert label_area(together, color_of(box.label)) >= 0.6 * alone


def rows_of(count: int, size: tuple[int, int], person_px: int) -> tuple[Box, ...]:
    """A crowd in rows, so close that there is hardly any room between them."""
    width, height = size
    w, h = 0.4 * person_px / width, person_px / height
    across = max(1, int(0.95 / (1.4 * w)))
    return tuple(
        Box("person", 0.9, x, y, x + w, y + h, track_id=n)
        for n in range(count)
        for x, y in [(0.02 + n % across * 1.4 * w, 0.1 + n // across * 1.3 * h)]
    )


@pytest.mark.parametrize(
    ("size", "person_px", "count"), [((640, 360), 45, 25), ((640, 480), 60, 20), ((3840, 2160), 70, 60)]
)
def test_labels_hide_no_small_object(size: tuple[int, int], person_px: int, count: int) -> None:
    boxes = rows_of(count, size, person_px)
    drawn = draw(np.full((size[1], size[0], 3), 128, np.uint8), result(boxes))
    hidden = []
    for box in boxes:
        x1, y1, x2, y2 = (round(v) for v in box.pixels(*size))
        inner = drawn[y1 + 6 : y2 - 6, x1 + 6 : x2 - 6]
        hidden.append(float((inner != 128).any(axis=2).mean()))
    assert max(hidden) < 0.05


def test_a_small_object_has_a_short_label_and_a_thin_box() -> None:
    background = np.full((480, 640, 3), 128, np.uint8)
    usual, small = Box("person", 0.9, 0.4, 0.2, 0.7, 0.9), Box("person", 0.9, 0.4, 0.5, 0.44, 0.62)
    areas = [label_area(draw(background, result((box,))), color_of("person")) for box in (usual, small)]
    assert 0 < areas[1] < 0.6 * areas[0]


def test_an_outline_is_filled_with_a_hole_in_it() -> None:
    square = "M 0 0 L 1 0 L 1 1 L 0 1 Z M 0.3 0.3 L 0.7 0.3 L 0.7 0.7 L 0.3 0.7 Z"
    parts = [Outline("cat", square, (0.2, 0.2, 0.8, 0.8), True), Outline("dog", "M 0 0", (0.0, 0.0, 0.1, 0.1), False)]
    drawn = draw(np.zeros((360, 640, 3), np.uint8), Result.of(parts, 640, 360, Timings()))
    middle, ring, outside = drawn[180, 320], drawn[180, 170], drawn[350, 20]
    assert ring.tolist() == [round(0.35 * value) for value in color_of("cat")]
    assert not middle.any()
    assert not outside.any()
    far = Outline("cat", "M -9 -9 L 9 -9 L 9 9 Z", (0.0, 0.0, 1.0, 1.0), True)
    assert draw(np.zeros((36, 64, 3), np.uint8), Result.of([far], 64, 36, Timings())).any()


def test_latency_and_answers_are_in_their_corners() -> None:
    image = np.full((360, 640, 3), 200, np.uint8)
    changed = (draw(image, result(), 18.4) != 200).any(axis=2)
    assert changed[:40, :100].any()
    assert not changed[40:].any()
    changed = (draw(image, result(texts=(Text("How many?", "Two."),))) != 200).any(axis=2)
    assert changed[300:].any()
    assert not changed[:300].any()


def test_colours_are_the_same_in_every_process() -> None:
    names = ["person", "face", "bicycle", "car", "motorcycle", "bus", "truck", "cat", "dog", "bird", "horse", "größe"]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from saccade import sinks; "
        "print([*map(sinks.color_of, sys.argv[2:])])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(REPO), *names], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([color_of(n) for n in names])
    assert color_of("Person") == color_of("person")
    assert len({color_of(n) for n in names[:11]}) == 11


def test_dark_text_reads_on_every_colour() -> None:
    for color in PALETTE:
        linear = [(c / 255) ** 2.2 for c in color]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert (luminance + 0.05) / 0.06 > 4.5  # WCAG's contrast for text, against near black


any_number = st.floats(-2, 3, allow_nan=False)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(Box, st.text(max_size=20), st.floats(0, 1), any_number, any_number, any_number, any_number),
        max_size=6,
    ),
    st.lists(st.builds(Spot, st.text(max_size=20), st.floats(0, 1), any_number, any_number), max_size=4),
    st.lists(st.builds(Text, st.text(max_size=300), st.text(max_size=300)), max_size=2),
    st.sampled_from(SIZES[2:]),
)
def test_anything_can_be_drawn(boxes: list[Box], spots: list[Spot], texts: list[Text], size: tuple[int, int]) -> None:
    image = np.zeros((size[1], size[0], 3), np.uint8)
    assert draw(image, result(tuple(boxes), tuple(spots), tuple(texts)), 5.0).shape == image.shape

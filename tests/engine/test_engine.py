from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from saccade.engine import (
    Caption,
    Detect,
    Engine,
    EngineError,
    Point,
    Query,
    Task,
    UnknownClassError,
    UnknownModelError,
    UnsupportedTaskError,
    Window,
)
from saccade.engine.image import YuvImage
from saccade.engine.tasks.task import windows
from tests.support import REPO
from tests.support.engine import GOLDEN, SCREEN, noise, same, square

WAIT_S = 60  # far beyond what any of these needs; only so that a deadlock fails instead of hanging
LOW = 0.003


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with Engine.load("nano", "cpu") as engine:
        yield engine


@pytest.fixture
def tiny(folder: Path) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def busy() -> NDArray[np.uint8]:
    """A image on which nano, asked with a low conf, sees many things."""
    with Image.open(GOLDEN / "images" / "0.png") as image:
        return np.asarray(image.convert("RGB"))


# What it finds


def test_nano_finds_the_person_of_the_demo_clip(nano: Engine) -> None:
    with av.open(str(REPO / "pipeline" / "assets" / "demo.mp4")) as container:
        image = next(container.decode(video=0)).to_ndarray(format="rgb24")
    (best, *_) = sorted(nano.detect(image, "people").boxes, key=lambda box: -box.score)
    assert best.label == "person"
    assert 0.5 < best.score <= 1.0
    x1, y1, x2, y2 = best.pixels(image.shape[1], image.shape[0])
    assert x1 < 0.585 * image.shape[1] < x2  # the middle of the one who is there
    assert y1 < 0.47 * image.shape[0] < y2
    (spot, *_) = sorted(nano.point(image, "person").points, key=lambda point: -point.score)
    assert x1 < spot.x * image.shape[1] < x2
    assert y1 < spot.y * image.shape[0] < y2


def test_boxes_lie_in_the_image_and_scores_are_above_conf(nano: Engine, busy: NDArray[np.uint8]) -> None:
    assert nano.model.classes is not None
    result = nano.submit(busy, [Detect(name, 20, LOW) for name in nano.model.classes]).result(WAIT_S)
    assert len(result.detections) > 20
    for box in result.detections.boxes:
        assert 0.0 <= box.x1 <= box.x2 <= 1.0
        assert 0.0 <= box.y1 <= box.y2 <= 1.0
        assert LOW <= box.score <= 1.0
    assert (result.detections.width, result.detections.height) == (busy.shape[1], busy.shape[0])


@pytest.mark.parametrize("label", ["person", "car"])
def test_a_higher_conf_gives_a_prefix_of_a_lower_ones_answer(nano: Engine, busy: NDArray[np.uint8], label: str) -> None:
    answers = [nano.detect(busy, label, conf=conf).boxes for conf in (0.9, 0.5, 0.3, 0.1, LOW, 0.0)]
    assert len(answers[-2]) > 1
    for fewer, more in itertools.pairwise(answers):
        assert fewer == more[: len(fewer)]


@pytest.mark.parametrize("limit", [0, 1, 5, 50])
def test_no_more_than_max_objects(nano: Engine, busy: NDArray[np.uint8], limit: int) -> None:
    boxes = nano.detect(busy, "person", max_objects=limit, conf=0.0).boxes
    assert min(limit, 1) <= len(boxes) <= limit  # a box that is stated again counts once
    more = nano.detect(busy, "person", max_objects=50, conf=0.0).boxes[: len(boxes)]
    assert [box.pixels(1, 1) for box in boxes] == [box.pixels(1, 1) for box in more]
    assert [box.score for box in boxes] == pytest.approx([box.score for box in more], abs=1e-4)
    assert len(nano.point(busy, "person", max_objects=limit, conf=0.0)) == limit


def test_results_come_in_the_order_of_their_tasks(nano: Engine, busy: NDArray[np.uint8]) -> None:
    tasks = [Point("car", 2, 0.0), Detect("dog", 1, 0.0), Point("person", 1, 0.0), Detect("cat", 2, 0.0)]
    result = nano.submit(busy, tasks).result(WAIT_S)
    assert [box.label for box in result.detections.boxes] == ["dog", "cat", "cat"]
    assert [spot.label for spot in result.points.points] == ["car", "car", "person"]
    assert result.texts == ()


def test_what_one_task_finds_does_not_depend_on_the_others(nano: Engine, busy: NDArray[np.uint8]) -> None:
    tasks = [Detect("person", 9, LOW), Point("car", 4, LOW), Detect("tv", 50, 0.3), Detect("person", 2, 0.0)]
    together = nano.submit(busy, tasks).result(WAIT_S)
    alone = [nano.submit(busy, [task]).result(WAIT_S) for task in tasks]
    boxes = [box for one in alone for box in one.detections.boxes]
    assert len(boxes) > 3
    for mine, theirs in zip(together.detections.boxes, boxes, strict=True):
        assert mine.label == theirs.label
        assert (mine.x1, mine.y1, mine.x2, mine.y2) == (theirs.x1, theirs.y1, theirs.x2, theirs.y2)
        assert mine.score == pytest.approx(theirs.score, abs=1e-4)
    spots = [spot for one in alone for spot in one.points.points]
    assert [(spot.label, spot.x, spot.y) for spot in together.points.points] == [
        (spot.label, spot.x, spot.y) for spot in spots
    ]


def test_the_same_question_twice_has_the_same_answer(nano: Engine, busy: NDArray[np.uint8]) -> None:
    first, second = (nano.submit(busy, [Detect("person", 50, LOW)] * 2).result(WAIT_S) for _ in range(2))
    assert same(first, second)


def test_lists_and_synonyms_are_several_prompts(nano: Engine, busy: NDArray[np.uint8]) -> None:
    both = nano.detect(busy, "tv or person", conf=LOW)
    assert {box.label for box in both.boxes} == {"tv", "person"}
    assert nano.detect(busy, "people", conf=LOW) == nano.detect(busy, "person", conf=LOW)


def test_nothing_asked_is_nothing_found(nano: Engine, busy: NDArray[np.uint8]) -> None:
    result = nano.submit(busy, []).result(WAIT_S)
    assert len(result.detections) == len(result.points) == len(result.texts) == 0


def test_timings_are_there(nano: Engine, busy: NDArray[np.uint8]) -> None:
    timings = nano.submit(busy, [Detect("person")]).result(WAIT_S).timings
    assert timings.prefill_ms > 0
    assert timings.decode_ms > 0
    assert timings.queue_ms >= 0


# Images


@pytest.mark.parametrize(
    "change",
    [
        torch.from_numpy,
        lambda image: torch.from_numpy(image).permute(1, 0, 2).contiguous().permute(1, 0, 2),
        np.asfortranarray,
        lambda image: image[::-1][::-1],
        lambda image: np.concatenate([image, image], axis=1)[:, : image.shape[1]],
    ],
)
def test_tensors_and_views_are_the_array_they_show(nano: Engine, change: Any) -> None:
    image = square(60, 80, SCREEN)
    tasks = [Detect("tv", 5, LOW), Point("person", 2, 0.0)]
    assert same(nano.submit(change(image), tasks).result(WAIT_S), nano.submit(image, tasks).result(WAIT_S))


def test_a_read_only_image_is_accepted(nano: Engine) -> None:
    image = noise(40, 40)
    image.flags.writeable = False
    nano.detect(image, "person")


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 500, 3), (700, 2, 3), (257, 255, 3)])
def test_any_size_will_do(nano: Engine, shape: tuple[int, int, int]) -> None:
    result = nano.detect(np.zeros(shape, np.uint8), "person", max_objects=1, conf=0.0)
    assert len(result) == 1
    assert (result.height, result.width) == shape[:2]


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((8, 8, 3)),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 8, 3), np.int64),
        np.zeros((8, 8, 3), bool),
        np.zeros((8, 8), np.uint8),
        np.zeros((8, 8, 1), np.uint8),
        np.zeros((8, 8, 4), np.uint8),
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((1, 8, 8, 3), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros((8, 0, 3), np.uint8),
        np.zeros((0,), np.uint8),
        torch.zeros(8, 8, 3),
        torch.zeros(8, 8, 3, dtype=torch.bfloat16),
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        "photo.jpg",
    ],
    ids=lambda image: f"{type(image).__name__} {getattr(image, 'shape', '')} {getattr(image, 'dtype', '')}",
)
def test_what_is_not_an_image_is_refused_at_once(nano: Engine, image: Any) -> None:
    with pytest.raises(ValueError, match="uint8 RGB") as caught:
        nano.submit(image, [Detect("person")])
    assert "\n" not in str(caught.value)


# Models, devices, skills, names


def test_nano_describes_itself(nano: Engine) -> None:
    info = nano.model
    assert (info.name, info.device, info.fallbacks) == ("nano", "cpu", ())
    assert info.dtype in ("float32", "float32 with bfloat16 products")  # as this CPU has them or not
    assert info.skills == ("detect", "point")
    assert info.classes is not None
    assert len(info.classes) == 31
    assert 2e6 < info.parameters < 4e6


def test_nanos_tokenizer_has_a_word_for_every_class(nano: Engine) -> None:
    from saccade.engine.models.moondream.prompts import FileTokenizer

    assert nano.model.classes is not None
    codec = FileTokenizer(nano.model.folder / "tokenizer.json")
    ids = [codec.encode(f" {name}") for name in nano.model.classes]
    assert all(len(one) == 1 and one[0] >= 10 for one in ids)
    assert len({one[0] for one in ids}) == len(ids)


@pytest.mark.parametrize("name", ["nanoo", "", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_an_unknown_model_is_one_line(name: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        Engine.load(name, "cpu")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("device", ["tpu", "", "cuda:99", "mps", "cpu:cpu", "CUDA 0"])
def test_an_unknown_device_is_one_line(device: str) -> None:
    with pytest.raises(EngineError, match="device") as caught:
        Engine.load("nano", device)
    assert len(str(caught.value).splitlines()) == 1


def test_the_size_of_images_is_fixed_but_for_nano() -> None:
    with pytest.raises(EngineError, match="has a fixed image size: remove imgsz"):
        Engine.load(str(GOLDEN), "cpu", imgsz=512)


def test_an_unknown_dtype_is_one_line() -> None:
    with pytest.raises(EngineError, match=r"unknown dtype 'int8': give one of float32"):
        Engine.load("nano", "cpu", "int8")


def test_a_cpu_refuses_keys_and_values_in_fp8() -> None:
    with pytest.raises(
        EngineError, match="kv_dtype fp8 needs an NVIDIA GPU of generation Ada or later; omit it on cpu"
    ):
        Engine.load("nano", "cpu", kv_dtype="fp8")
    with pytest.raises(EngineError, match="unknown kv_dtype 'int8'; use fp8 or omit it"):
        Engine.load("nano", "cpu", kv_dtype="int8")


def test_sizes_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    for wrong in ({"depth": 3}, {"adapter_rank": 0}, {"adapter_slots": -1}):
        with pytest.raises(ValueError, match=r"got (3|0|-1)"):
            Engine.load(str(tmp_path / "nothing"), "cpu", **wrong)


@pytest.mark.parametrize("task", [Query("how many?"), Caption(), Caption("short")])
def test_nano_refuses_questions_and_captions(nano: Engine, task: Task) -> None:
    with pytest.raises(UnsupportedTaskError, match=r"nano can detect and point, not (query|caption)"):
        nano.submit(noise(8, 8), [Detect("person"), task])


def test_plain_calls_refuse_them_too(nano: Engine) -> None:
    with pytest.raises(UnsupportedTaskError):
        nano.query(noise(8, 8), "how many?")
    with pytest.raises(UnsupportedTaskError):
        nano.caption(noise(8, 8))


def test_an_unknown_class_is_refused_with_the_known_ones(nano: Engine) -> None:
    for ask in (nano.detect, nano.point, lambda image, label: nano.submit(image, [Point(label)])):
        with pytest.raises(UnknownClassError, match="'zebra' is not a class of nano") as caught:
            ask(noise(8, 8), "zebra")
        assert nano.model.classes is not None
        assert all(name in str(caught.value) for name in nano.model.classes)


@pytest.mark.parametrize("label", ["people", "Person", "truck or bus"])
def test_a_label_that_is_not_resolved_is_refused_or_resolved(nano: Engine, busy: NDArray[np.uint8], label: str) -> None:
    """It may be refused or understood; its words are not tokens, and asking for '<eos>' finds nonsense."""
    try:
        future = nano.submit(busy, [Detect(label, 5, LOW)])
    except UnknownClassError:
        return
    wanted = nano.submit(busy, [Detect(name, 5, LOW) for name in nano.resolve([label])]).result(WAIT_S)
    got = future.result(WAIT_S)
    assert [(box.x1, box.y1) for box in got.detections.boxes] == [(box.x1, box.y1) for box in wanted.detections.boxes]


def test_an_image_may_be_as_a_decoder_gives_it(nano: Engine) -> None:
    y, u, v = (torch.from_numpy(noise(side, side)[..., 0].copy()) for side in (64, 32, 32))
    image = YuvImage(y, u, v, (104597, 132201, 25675, 53279), full_range=False)
    for tiles in (1, 2):
        rgb, given, later = (
            nano.submit(one, [Detect("tv", conf=LOW)], tiles).result().detections
            for one in (image.rgb(), image, lambda: image)
        )
        assert rgb == given == later


def test_an_open_vocabulary_takes_words_as_they_are(tiny: Engine) -> None:
    assert tiny.model.classes is None
    assert tiny.resolve([" red car ", "truck or bus", "red car"]) == ["red car", "truck or bus"]
    (box,) = tiny.detect(noise(16, 16), "red car", max_objects=1, conf=0.0).boxes
    assert box.label == "red car"


def test_texts_come_in_order_and_no_longer_than_asked(tiny: Engine) -> None:
    image = noise(30, 30)
    tasks = [Caption("short", 5), Detect("x", 1, 0.0), Query("how many?", 3), Query("how many?", 0), Caption("long", 4)]
    result = tiny.submit(image, tasks).result(WAIT_S)
    assert [text.prompt for text in result.texts] == ["caption: short", "how many?", "how many?", "caption: long"]
    assert all(text.text.count("<") <= limit for text, limit in zip(result.texts, (5, 3, 0, 4), strict=True))
    assert tiny.query(image, "how many?", 3) == result.texts[1]
    assert tiny.caption(image, "short", 5) == result.texts[0]
    assert len(result.detections) == 1


def test_a_question_longer_than_the_context_is_one_clear_line(tiny: Engine) -> None:
    with pytest.raises(EngineError, match="long") as caught:
        tiny.query(noise(16, 16), "why? " * 40)
    assert len(str(caught.value).splitlines()) == 1


# Tiles


def test_windows_find_what_is_too_small_in_the_whole_image() -> None:
    """The picture of a person in a corner of a large one; what is found there has its place in the large one."""
    with Engine.load("nano") as engine:
        there, first = cv2.VideoCapture(str(REPO / "pipeline/assets/demo.mp4")).read()
        assert there
        person = cv2.resize(first[:, :, ::-1], (640, 360))
        (whole,) = [box for box in engine.detect(person, "person").boxes if box.score > 0.9][:1]
        large = np.full((1440, 2560, 3), 128, np.uint8)
        large[1000:1120, 2000:2213] = cv2.resize(person, (213, 120), interpolation=cv2.INTER_AREA)
        where = [Window(1900, 920, 416, 276)]
        plain = engine.submit(large, [Detect("person")]).result(WAIT_S).detections.boxes
        closer = engine.submit(large, [Detect("person")], windows=where).result(WAIT_S).detections.boxes
        later = engine.submit(lambda: large, [Detect("person")], windows=where, stream="camera").result(WAIT_S)
        assert not [box for box in plain if box.x1 > 0.7]
        (found,) = closer
        assert (found.x1, found.y1) == pytest.approx(
            ((2000 + 213 * whole.x1) / 2560, (1000 + 120 * whole.y1) / 1440), abs=0.01
        )
        assert later.detections.boxes == closer
        with engine.encode(large) as encoded, pytest.raises(ValueError, match="tiles and windows need the pixels"):
            engine.submit(encoded, [Detect("person")], windows=where)


@pytest.mark.parametrize("model", ["nano", "tiny"])
def test_tiles_given_as_windows_are_answered_as_tiles(model: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(model)  # one that sees an image as one crop, and one with several
    image, task = noise(500, 800), Detect("person", 4, 0.0)
    tiles = engine.submit(image, [task], 2).result(WAIT_S)
    given = windows(800, 500, 2)[1:]
    assert len(given) == 4
    assert same(engine.submit(image, [task], windows=given).result(WAIT_S), tiles)
    assert same(engine.submit(lambda: image, [task], windows=given, stream="camera").result(WAIT_S), tiles)


def test_windows_of_planes_are_cut_from_them_without_a_copy(nano: Engine) -> None:
    planes = [
        torch.from_numpy(noise(height, width)[..., 0].copy()) for height, width in ((360, 640), (180, 320), (180, 320))
    ]
    image = YuvImage(planes[0], planes[1], planes[2], (104597, 132201, 25675, 53279), full_range=False)
    part = image.part(101, 51, 201, 101)
    assert part.shape == (100, 200, 3)
    assert part.y.data_ptr() == image.y[50:, 100:].data_ptr()
    assert torch.equal(part.rgb(), image.rgb()[50:150, 100:300])
    tasks, where = [Detect("person", 3, 0.0)], [Window(100, 50, 200, 100)]
    of_planes = nano.submit(image, tasks, windows=where).result(WAIT_S)
    assert same(of_planes, nano.submit(image.rgb().numpy(), tasks, windows=where).result(WAIT_S))


@pytest.mark.parametrize("tiles", [0, -1])
def test_tiles_are_one_or_more(nano: Engine, tiles: int) -> None:
    with pytest.raises(ValueError, match="tiles"):
        nano.submit(noise(8, 8), [Detect("person")], tiles)


def test_tiles_add_small_objects_of_detect_only(nano: Engine, busy: NDArray[np.uint8]) -> None:
    tasks = [Detect("person", 3, LOW), Point("car", 2, 0.0), Detect("tv", 50, LOW)]
    plain, one, many = (nano.submit(busy, tasks, **more).result(WAIT_S) for more in ({}, {"tiles": 1}, {"tiles": 2}))
    assert same(plain, one)
    assert same(replace(many, detections=plain.detections), plain)
    assert [box.label for box in many.detections.boxes][:3] == ["person"] * 3
    assert sum(box.label == "person" for box in many.detections.boxes) == 3
    for box in many.detections.boxes:
        assert 0.0 <= box.x1 <= box.x2 <= 1.0
        assert 0.0 <= box.y1 <= box.y2 <= 1.0
    for label in ("person", "tv"):
        scores = [box.score for box in many.detections.boxes if box.label == label]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 300, 3)])
def test_tiles_of_tiny_images_are_accepted(nano: Engine, shape: tuple[int, int, int]) -> None:
    assert nano.submit(np.zeros(shape, np.uint8), [Detect("person", 1, 0.0)], 3).result(WAIT_S).detections.boxes


# Futures and threads


def test_two_engines_live_side_by_side(nano: Engine, tiny: Engine, busy: NDArray[np.uint8]) -> None:
    futures = [engine.submit(busy, [Detect("person", 2, 0.0)]) for engine in (nano, tiny) for _ in range(2)]
    answers = [future.result(WAIT_S) for future in futures]
    assert same(answers[0], answers[1])
    assert same(answers[2], answers[3])
    assert not same(answers[0], answers[2])


def test_half_precision_finds_much_the_same(nano: Engine) -> None:
    image = square(240, 320, SCREEN)
    (wanted,) = nano.detect(image, "tv").boxes
    with Engine.load("nano", "cpu", "float16") as half:
        assert half.model.dtype == "float16"
        (got,) = half.detect(image, "tv").boxes
    for side in ("x1", "y1", "x2", "y2"):
        assert getattr(got, side) == pytest.approx(getattr(wanted, side), abs=0.02)

"""Another architecture and another task, each in one file, through the whole program from a folder on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from saccade.engine import Box, Caption, Detect, Engine, EngineError, Point, Query, UnsupportedTaskError
from saccade.engine.golden.reference import Generator
from saccade.engine.model_loader import open_model
from saccade.engine.models.registry import register_architecture
from saccade.engine.tasks import TASKS, register_task
from saccade.engine.tasks.objects import DecodedObject
from saccade.pipeline.cli.main import app
from saccade.sinks import draw, make_record
from saccade.sinks.overlay import register_drawing
from tests.support.count_task import Count, Counted, draw_counts
from tests.support.engine import TINY, noise, random_model, write_model
from tests.support.sinks.results import FRAME, LATENCY
from tests.support.toy_model import EOS, load_toy, write_toy

WAIT_S = 60
IMAGES = [noise(30, 40, 1), noise(200, 90, 2), noise(12, 12, 3)]


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", params=[1, 2], ids=["blocking", "pipelined"])
def toy(toy_folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(str(toy_folder), "cpu", depth=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(toy_folder: Path) -> Generator:
    loaded, _, _ = open_model(str(toy_folder), "cpu", None)
    return Generator(loaded.model, EOS)


def objects(plain: Generator, image: np.ndarray, ids: list[int], sized: bool, most: int) -> list[DecodedObject]:
    prefix = plain.prefix(plain.image_tokens(image))
    return plain.objects(plain.prefill(prefix, [ids], most * (3 if sized else 2)), sized, [most], [0.0])[0]


def corners(one: DecodedObject) -> tuple[float, ...]:
    half_w, half_h = one.width / 2, one.height / 2
    sides = one.x - half_w, one.y - half_h, one.x + half_w, one.y + half_h
    return tuple(min(1.0, max(0.0, side)) for side in sides)


def tokens(plain: Generator, image: np.ndarray, ids: list[int], most: int) -> str:
    state = plain.prefill(plain.prefix(plain.image_tokens(image)), [ids], most)
    found = [token for token, _ in zip(plain.tokens(state), range(most), strict=False)]
    return "".join(f"<{token}>" for token in found)


# Another architecture


def test_another_architecture_answers_as_the_plain_loop(toy: Engine, toy_folder: Path, plain: Generator) -> None:
    prompts = open_model(str(toy_folder), "cpu", None)[0].prompts
    tasks = [Detect("cup", 5, 0.0), Point("a dog", 4, 0.0), Query("why?", 12), Detect("x", 2, 0.0)]
    for image, result in zip(
        IMAGES, [one.result(WAIT_S) for one in [toy.submit(image, tasks) for image in IMAGES]], strict=True
    ):
        boxes = [
            corners(one)
            for label, most in (("cup", 5), ("x", 2))
            for one in objects(plain, image, prompts.objects("detect", label), True, most)
        ]
        assert [(box.x1, box.y1, box.x2, box.y2) for box in result.detections.boxes] == boxes
        spots = objects(plain, image, prompts.objects("point", "a dog"), False, 4)
        assert [(spot.x, spot.y) for spot in result.points.points] == [(one.x, one.y) for one in spots]
        assert len(boxes) > 2
        assert len(spots) == 4
        assert result.texts[0].text == tokens(plain, image, prompts.query("why?"), 12) != ""
    assert len({toy.query(image, "why?", 12).text for image in IMAGES}) == 3, "the image makes a difference"


def test_another_architecture_describes_itself(toy: Engine, toy_folder: Path) -> None:
    assert (toy.model.skills, toy.model.classes) == (("detect", "point", "query"), None)
    assert toy.limits.prefix_length == 10
    with pytest.raises(UnsupportedTaskError, match="not caption"):
        toy.submit(IMAGES[0], [Caption()])
    with pytest.raises(EngineError, match="long"):
        toy.query(IMAGES[0], "?" * 90)


def test_an_architecture_has_one_name(toy_folder: Path) -> None:
    register_architecture("toy", load_toy)
    with pytest.raises(ValueError, match="'toy' is already"):
        register_architecture("toy", lambda folder, device, dtype: load_toy(folder, device, dtype))


def recorded(folder: Path, model: Path, *options: str) -> dict[str, Any]:
    """The record that the program writes of an image."""
    Image.fromarray(IMAGES[0]).save(folder / "image.png")
    command = [
        "run",
        str(folder / "image.png"),
        "--model",
        str(model),
        "--device",
        "cpu",
        "--jsonl",
        str(folder / "out"),
    ]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads((folder / "out").read_text(encoding="utf-8"))
    return record


def test_the_program_runs_another_architecture(toy: Engine, toy_folder: Path, tmp_path: Path) -> None:
    record = recorded(tmp_path, toy_folder, "--query", "why?", "--point", "cup", "--conf", "0")
    assert record["answers"] == [{"prompt": "why?", "text": toy.query(IMAGES[0], "why?").text}]
    assert {spot["label"] for spot in record["points"]} == {"cup"}


# Another task


@pytest.fixture
def counting() -> Iterator[None]:
    register_task(Count)
    yield
    del TASKS["count"]


@pytest.fixture
def counter(counting: None, tmp_path: Path) -> Iterator[Engine]:
    """A model of Moondream's architecture that has a template for the task."""
    templates = {**TINY.tokenizer.templates, "count": {"prefix": [1, 40, 2], "suffix": [3]}}
    config = replace(TINY, tokenizer=replace(TINY.tokenizer, templates=templates))
    with Engine.load(str(write_model(tmp_path / "counter", config, random_model(TINY))), "cpu") as engine:
        yield engine


def test_another_task_is_answered_beside_the_others(counter: Engine) -> None:
    assert "count" in counter.model.skills
    result = counter.submit(IMAGES[0], [Count("cup", 3), Detect("cup", 2, 0.0), Count("dog"), Count("cat", 0)]).result(
        WAIT_S
    )
    assert result.extras == {"count": (Counted("cup", 3), Counted("dog", 4), Counted("cat", 0))}
    assert [type(box) for box in result.detections.boxes] == [Box, Box]
    record = make_record(FRAME, result, LATENCY)
    pixels = FRAME.width * FRAME.height
    assert record["count"] == [
        {"label": label, "number": number, "per_megapixel": 1e6 * number / pixels}
        for label, number in (("cup", 3), ("dog", 4), ("cat", 0))
    ]


def test_another_task_is_drawn_by_what_is_registered_for_it(counter: Engine) -> None:
    register_drawing("count", draw_counts)
    with pytest.raises(ValueError, match="already registered for 'count'"):
        register_drawing("count", lambda image, parts, scale: None)
    image = np.zeros((40, 60, 3), np.uint8)
    drawn = draw(image, counter.submit(image, [Count("cup", 3)]).result(WAIT_S))
    assert drawn[:3].min() == 255
    assert not drawn[3:].any()
    assert not image.any()


def test_another_task_is_asked_for_on_the_command_line(counting: None, toy_folder: Path, tmp_path: Path) -> None:
    record = recorded(tmp_path, toy_folder, "--task", "count=cup", "--task", "count=dog")
    assert [one["label"] for one in record["count"]] == ["cup", "dog"]


def test_two_tasks_of_one_skill_are_refused(counting: None) -> None:
    register_task(Count)
    with pytest.raises(ValueError, match="'count' is already"):
        register_task(type("Other", (Count,), {}))

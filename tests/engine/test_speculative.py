"""A stream's last answer as the draft of the next: the same answers as without, in fewer steps."""

from __future__ import annotations

import gc
import pickle
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from saccade.engine import Caption, Detect, Engine, Point, Query, Result, StreamSettings, Task
from saccade.engine.models.protocol import Phase
from saccade.engine.tasks.task import DraftMemory
from saccade.sources import open_source
from tests.support import REPO
from tests.support.engine import GOLDEN, noise

WAIT_S = 60
CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
ALL = StreamSettings(newest=False)
TASKS: list[Task] = [
    Detect("x", 6, 0.0),
    Detect("y", 9, 0.1),
    Point("x", 5, 0.0),
    Query("how many?", 12),
    Caption("short", max_tokens=9),
]


@pytest.fixture(params=[1, 2])
def tiny(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(str(folder), "cpu", depth=request.param) as engine:
        engine.configure_stream("door", ALL)
        yield engine


def places(result: Result) -> object:
    """Everything but scores, which depend on what shares a product by a rounding."""
    boxes = [(box.label, box.x1, box.y1, box.x2, box.y2) for box in result.detections.boxes]
    return boxes, [(spot.label, spot.x, spot.y) for spot in result.points.points], result.texts


def counted(
    engine: Engine, images: Sequence[NDArray[np.uint8]], tasks: Sequence[Task], key: str | None
) -> tuple[list[Result], int]:
    """Their results, and the decode steps for them."""
    before = engine.counters()["steps_decode_total"]
    results = [engine.submit(image, tasks, stream=key).result(WAIT_S) for image in images]
    return results, int(engine.counters()["steps_decode_total"] - before)


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_that_has_not_changed_is_one_step(tiny: Engine, task: Task) -> None:
    image = noise(16, 16)
    (plain,), steps = counted(tiny, [image], [task], None)
    (first,), as_many = counted(tiny, [image], [task], "door")
    assert as_many == steps > 2
    again, few = counted(tiny, [image] * 3, [task], "door")
    assert {str(places(one)) for one in (plain, first, *again)} == {str(places(plain))}
    assert few <= 3  # the step ahead of the host, at depth 2
    counters = tiny.counters()
    assert counters["draft_values_accepted_total"] == counters["draft_values_total"] > 0
    assert counters["draft_steps_saved_total"] >= 3 * (steps - 1)


def test_answers_that_change_are_those_of_plain_decoding(tiny: Engine) -> None:
    """Noise gives answers that have nothing in common; an image that is nearly the last one, nearly its answers."""
    dice = np.random.default_rng(3)
    images = [noise(16, 16, seed) for seed in range(4)]
    for _ in range(8):
        near = images[-1].copy()
        near[dice.integers(16), dice.integers(16)] = dice.integers(256, size=3)
        images += [near, near]
    plain, steps = counted(tiny, images, TASKS, None)
    drafted, fewer = counted(tiny, images, TASKS, "door")
    for number, (wanted, got) in enumerate(zip(plain, drafted, strict=True)):
        assert places(got) == places(wanted), number
    assert fewer < steps


def test_a_result_begins_the_answers_of_the_next_image(tiny: Engine) -> None:
    images = [noise(40, 60, seed // 2) for seed in range(6)]
    plain, steps = counted(tiny, images, TASKS, None)
    begun = tiny.counters()["steps_decode_total"]
    last: Result | None = None
    for wanted, image in zip(plain, images, strict=True):
        last = tiny.submit(image, TASKS, previous=last).result(WAIT_S)
        assert places(last) == places(wanted)
        last = pickle.loads(pickle.dumps(last))  # it holds nothing of the engine
    assert tiny.counters()["steps_decode_total"] - begun < 0.8 * steps
    fed = tiny.counters()["draft_values_total"]
    unlike = tiny.submit(images[0], [Detect("x", 6, 0.0)], 2, previous=last).result(
        WAIT_S
    )  # of the windows nothing is known
    assert places(unlike) == places(tiny.submit(images[0], [Detect("x", 6, 0.0)], 2).result(WAIT_S))
    assert tiny.counters()["draft_values_total"] > fed
    with pytest.raises(ValueError, match="previous must be the Result"):
        tiny.submit(images[0], TASKS, previous=tiny.submit(images[0], TASKS))  # type: ignore[arg-type]


def test_without_drafts_results_keep_none(folder: Path) -> None:
    with Engine.load(str(folder), "cpu", drafts=False) as engine:
        first = engine.submit(noise(16, 16), TASKS).result(WAIT_S)
        again = engine.submit(noise(16, 16), TASKS, previous=first).result(WAIT_S)
        assert places(again) == places(first)
        assert (first.drafts, engine.counters()["draft_values_total"]) == ({}, 0)


def test_prompts_of_other_tiles_and_streams_are_not_mixed_up(tiny: Engine) -> None:
    images = [noise(40, 60, seed) for seed in range(2)]
    task = Detect("x", 4, 0.0)
    for image in (*images, *images):
        for key, tiles in (("door", 2), ("yard", 1), (None, 1)):
            wanted = tiny.submit(image, [task], tiles).result(WAIT_S)
            assert places(tiny.submit(image, [task], tiles, stream=key).result(WAIT_S)) == places(wanted)


def test_an_adapter_that_is_unloaded_is_gone(folder: Path, tiny: Engine) -> None:
    """The memory of a stream keeps no weights alive, nor do slots that nobody holds."""
    generator, adapter = torch.Generator().manual_seed(0), folder / "adapter.safetensors"
    qkv = tiny._loaded.model.text.get_submodule("blocks.0.attn.qkv").weight.shape  # type: ignore[attr-defined]
    pair = {
        "A": torch.randn(2, qkv[1], generator=generator) * 0.2,
        "B": torch.randn(qkv[0], 2, generator=generator) * 0.2,
    }
    save_file({f"text.blocks.0.attn.qkv.{name}": matrix for name, matrix in pair.items()}, adapter)
    tiny.load_adapter("shop", adapter)
    held = weakref.ref(tiny._adapters["shop"])
    for _ in range(2):
        tiny.submit(noise(16, 16), [Detect("x", 3, 0.0)], stream="door", adapter="shop").result(WAIT_S)
    tiny.unload_adapter("shop")
    tiny.submit(noise(16, 16), [Detect("x", 3, 0.0)], stream="door").result(WAIT_S)  # behind what the last one held
    latest = time.monotonic() + WAIT_S
    while held() is not None and time.monotonic() < latest:
        gc.collect()
    assert held() is None


def test_drawn_text_and_choices_are_not_drafted(tiny: Engine) -> None:
    image = noise(16, 16)
    tasks = [Query("?", 9, temperature=1.0, seed=3), Query("?", choices=("yes", "no"))]
    for _ in range(3):
        tiny.submit(image, tasks, stream="door").result(WAIT_S)
    assert tiny.counters()["draft_values_total"] == 0


def test_a_prompt_whose_drafts_fail_pauses() -> None:
    memory, value = DraftMemory(), (Phase.Y, 0.5, 0.0)
    drafted = []
    for _ in range(400):
        draft = memory.draft()
        drafted.append(bool(draft))
        memory.learn([value], False if draft else None, 64)
    assert drafted[:3] == [False, True, True]  # nothing to draft from, and a failure is no reason yet
    assert 5 < sum(drafted) < 15
    while not (draft := memory.draft()):
        memory.learn([value], None, 64)
    memory.learn([value], True, 64)
    assert memory.draft()


def test_golden_answers_stay_exact_when_drafted() -> None:
    with Engine.load(str(GOLDEN), "cpu", "float32") as engine:
        engine.configure_stream("door", ALL)
        images = [noise(60, 80, seed // 2) for seed in range(4)]
        tasks: list[Task] = [Detect("dog", 6, 0.0), Point("cat", 4, 0.0), Query("what is it?", 14)]
        plain, _ = counted(engine, images, tasks, None)
        drafted, _ = counted(engine, images, tasks, "door")
        assert [places(one) for one in drafted] == [places(one) for one in plain]


def test_nano_drafts_from_what_its_detector_finds() -> None:
    """On images by themselves, of which nothing is known: at most one step after the prompts', whatever there is."""
    with open_source(CLIP, end=2.0, vid_stride=3) as source:
        images = [frame.image for frame in source]
    images.append(np.tile(images[-1][::4, ::4], (3, 3, 1)))
    tasks: list[Task] = [
        Detect("person", conf=0.2),
        Point("person", conf=0.2),
        Detect("chair"),
        Detect("car", conf=0.05),
    ]
    with Engine.load("nano", "cpu", drafts=False) as engine:
        plain, steps = counted(engine, images, tasks, None)
        assert engine.counters()["draft_values_total"] == 0
    with Engine.load("nano", "cpu") as engine:
        drafted, fewer = counted(engine, images, tasks, None)
        with engine.encode(images[-1]) as kept:  # what was found is not kept with the prefix
            again = engine.submit(kept, tasks).result(WAIT_S)
    assert [places(one) for one in drafted] == [places(one) for one in plain]
    assert places(again) == places(plain[-1])
    assert len(plain[-1].detections) > 6
    assert fewer <= len(images) < 0.3 * steps

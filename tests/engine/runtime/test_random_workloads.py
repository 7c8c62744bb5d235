"""Random workloads through the whole engine, on a real model with slow streams: the answers are those of one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import saccade.engine.model_loader as start_module
import saccade.engine.runtime.cpu_executor as executor_module
from saccade.engine import Caption, DeadlineError, Detect, Engine, Point, Query, Result, Task
from saccade.engine.config import EngineConfig
from saccade.engine.errors import RequestTooLargeError
from saccade.engine.model_loader import open_model
from saccade.engine.runtime.cpu_executor import CpuExecutor
from saccade.engine.runtime.executor import StepOutputs
from tests.support.engine import TINY, noise, one_thread, random_model, write_model
from tests.support.engine.stand_in import SlotGuard, SlowStream

WAIT_S = 60
IMAGES = [noise(20, 30, 1), noise(16, 16, 2), noise(50, 20, 3), None]
TASKS: list[Task] = [
    Detect("x", 3, 0.0),
    Detect("y", 9, 0.4),
    Point("x", 4, 0.1),
    Query("why?", 12),
    Query("why?", 12, temperature=1.2, seed=5),
    Query("how?", 8, temperature=0.8, top_p=0.7, seed=6, stop="3"),
    Query("is it?", choices=("yes", "no", "not at all")),
    Query("is it so?", choices=("red", "green"), temperature=9.0, seed=7),
    Query("why so?", 5, reasoning=True),
    Query("why that?", 4, reasoning=True, temperature=1.5, seed=8),
    Query("what is it?", 5, refs=((0.25, 0.75), (0.1, 0.2, 0.5, 0.6))),
    Caption("short", 6),
]
ADAPTERS = ["", "red", "green"]


class Guarded(CpuExecutor):
    """Refuses what disturbs a slot whose values are on their way to the host."""

    def __init__(self, model: Any, config: EngineConfig, n_pages: int, **options: Any) -> None:
        super().__init__(model, config, n_pages, **options)
        self._guard, self._number = SlotGuard(), [0] * config.depth

    def launch(self, slot: int, step: Any) -> None:
        self._number[slot] = self._guard.launch(slot)
        super().launch(slot, step)

    def finalize(self, slot: int, step: Any) -> None:
        if step.writes_text:
            self._guard.finalize(self._number[slot])
        super().finalize(slot, step)

    def read(self, slot: int, step: Any) -> list[tuple[float, float, float]]:
        values = super().read(slot, step)
        self._guard.copied(slot)
        self._guard.read(slot)
        return values

    def _sample(self, slot: StepOutputs, *rest: Any) -> None:
        self._guard.write(slot.number, self._number[slot.number])
        super()._sample(slot, *rest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it two adapters for all of its blocks."""
    model = random_model(TINY)
    folder = write_model(tmp_path_factory.mktemp("tiny"), TINY, model)
    for seed, name in enumerate(ADAPTERS[1:]):
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
            for number in range(TINY.text.n_layers):
                place = f"text.blocks.{number}.{part}"
                out, inner = model.get_submodule(place).weight.shape
                pairs[f"{place}.A"] = torch.randn(3, inner, generator=generator) * 0.2
                pairs[f"{place}.B"] = torch.randn(out, 3, generator=generator) * 0.2
        save_file(pairs, folder / name)
    return folder


def content(result: Result) -> object:
    """Everything but scores, which differ by rounding with what shares a batch."""
    boxes = [(box.label, *box.pixels(1, 1)) for box in result.detections.boxes]
    return boxes, [(spot.label, spot.x, spot.y) for spot in result.points.points], result.texts


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[dict[tuple[int, int, int], object]]:
    """What each task on each image with each adapter gets, one after the other."""
    with one_thread(), Engine.load(str(folder), "cpu", depth=1) as plain:
        for name in ADAPTERS[1:]:
            plain.load_adapter(name, folder / name)
        yield {
            (i, t, a): content(plain.submit(image, [task], adapter=adapter or None).result(WAIT_S))
            for i, image in enumerate(IMAGES)
            for t, task in enumerate(TASKS)
            if image is not None or not task.needs_image
            for a, adapter in enumerate(ADAPTERS)
        }


@pytest.fixture(scope="module", params=[(1, 16), (2, 16), (2, 60)], ids=str)
def slow(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine of some depth and pages, with one adapter slot, whose streams begin late now and then."""
    depth, pages = request.param
    dice = random.Random(depth)
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setattr(executor_module, "CpuStream", lambda name: SlowStream(name, dice, 2e-3))
        patch.setattr(start_module, "CpuExecutor", Guarded)
        loaded, info, vocabulary = open_model(str(folder), "cpu", None)
        config = EngineConfig(depth=depth, page_size=8, n_pages=pages, adapter_slots=1)
        with Engine(loaded, info, vocabulary, config) as slow:
            for name in ADAPTERS[1:]:
                slow.load_adapter(name, folder / name)
            yield slow


requests = st.lists(
    st.tuples(
        st.integers(0, len(IMAGES) - 1),
        st.lists(st.integers(0, len(TASKS) - 1), min_size=1, max_size=4),
        st.sampled_from([0, 0, 1, 2]),
        st.sampled_from([None, None, None, None, "cancel", "deadline", "late"]),
        st.sampled_from([0.0, 0.0, 0.0, 0.005]),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(asked=requests)
def test_any_workload_is_answered_as_one_by_one(
    slow: Engine, alone: dict[tuple[int, int, int], Any], asked: list[tuple[int, list[int], int, str | None, float]]
) -> None:
    futures = []
    for image, tasks, adapter, fate, after_s in asked:
        time.sleep(after_s)
        limit = {"deadline": 0.02, "late": 0.0}.get(fate or "")
        tasks[:] = [task for task in tasks if (image, task, adapter) in alone]
        chosen = [TASKS[task] for task in tasks]
        futures.append(slow.submit(IMAGES[image], chosen, deadline_s=limit, adapter=ADAPTERS[adapter] or None))
        if fate == "cancel":
            time.sleep(0.004)
            futures[-1].cancel()
    for (image, tasks, adapter, fate, _), future in zip(asked, futures, strict=True):
        try:
            result = future.result(WAIT_S)
        except CancelledError:
            assert fate == "cancel"
        except DeadlineError:
            assert fate in ("deadline", "late")
        except RequestTooLargeError:
            assert len(tasks) > 1
        else:
            wanted = [alone[image, task, adapter] for task in tasks]
            assert content(result) == (
                [box for one in wanted for box in one[0]],
                [spot for one in wanted for spot in one[1]],
                tuple(text for one in wanted for text in one[2]),
            )
    latest = time.monotonic() + WAIT_S
    while not slow._loop._scheduler.at_rest:
        assert time.monotonic() < latest
        time.sleep(0.001)

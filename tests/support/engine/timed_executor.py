"""An engine whose model only takes time: the host's work of a frame, without a device's. Threads and locks are real.

`TimedExecutor` does with a step what the executor for CUDA does in Python, and takes as long as a device would, asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.core.request import Step, StepKind
from saccade.engine.model_loader import step_loop
from saccade.engine.models.protocol import Model, Phase
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.runtime.step_inputs import DecodeInputs, PrefillInputs, with_scores
from saccade.engine.tasks.task import MAX_SCORED, Sampled, Window
from tests.support.engine.untimed import Untimed

Cost = Callable[[StepKind, int], float]
"""Seconds of a step, by its kind and its images or rows."""
_PAGES, _PREPARERS = 4096, 4


class TimedExecutor(Untimed):
    """`executor.Executor` that samples the same objects for every prompt.

    Args:
        model: whose sizes it takes.
        config: the engine's.
        cost: what a step takes.
        objects: of an answer.
    """

    def __init__(self, model: Model, config: EngineConfig, cost: Cost, objects: int) -> None:
        limits, depth, rows, cpu = model.limits, config.depth, config.max_sequences, torch.device("cpu")
        prefix_pages = -(-limits.prefix_length // config.page_size)
        width = prefix_pages + -(-(limits.max_context - limits.prefix_length) // config.page_size)
        self._steps = DecodeInputs(depth, cpu, rows, limits.prefix_length)
        self._prefills = PrefillInputs(depth, cpu, rows, 8, 512, prefix_pages, width, limits.prefix_length)
        self._cost, self._objects = cost, objects
        self._host, self._scores = torch.zeros(depth, rows, 3), torch.zeros(depth, rows, MAX_SCORED)
        self._firsts = self._host[..., 0].numpy()
        self._free_at = 0.0
        self._ends = [0.0] * depth

    def prepare(self, image: NDArray[np.uint8], window: Window | None = None) -> NDArray[np.uint8]:
        """Copy an image, as the upload does."""
        return image.copy()

    def launch(self, slot: int, step: Step[Any]) -> None:
        count = len(step.sequences)
        if step.kind is StepKind.PREFILL:
            self._prefills.fill(slot, step)
        self._steps.fill(slot, step.sequences, next(size for size in (1, 2, 4, 8, 16, 32, 64) if size >= count))
        takes = self._cost(step.kind, len(step.imaged) if step.kind is StepKind.PREFILL else count)
        self._free_at = self._ends[slot] = max(time.monotonic(), self._free_at) + takes

    def finalize(self, slot: int, step: Step[Any]) -> None:
        """Sample objects until there are enough."""
        most = 3 * self._objects
        self._firsts[slot, : len(step.sequences)] = [
            row.rule.allowed[0]
            if row.rule.allowed
            else -9.0
            if row.phase is Phase.X_OR_EOS and row.sequence.decodes >= most
            else 0.5
            for row in step.sequences
        ]

    def has_run(self, slot: int) -> bool:
        return time.monotonic() >= self._ends[slot]

    def wait(self, slot: int, step: Step[Any]) -> None:
        wait_s = self._ends[slot] - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)

    def read(self, slot: int, step: Step[Any]) -> list[Sampled]:
        return with_scores(self._host[slot], self._scores[slot], step)


@contextmanager
def timed_engine(cost: Cost, objects: int, config: EngineConfig | None = None) -> Iterator[Engine]:
    """nano's engine on such an executor."""

    def start(model: Model, config: EngineConfig, **_: object) -> tuple[Executor[Any], StepLoop[Any]]:
        executor = TimedExecutor(model, config, cost, objects)
        return executor, step_loop(executor, model, config, _PAGES, _PREPARERS, from_images=False)

    with Engine.load("nano", "cpu") as loaded, mock.patch("saccade.engine.api.start", start):
        info, vocabulary = loaded.model, loaded._vocabulary
        with Engine(loaded._loaded, info, vocabulary, config or EngineConfig(drafts=False)) as engine:
            yield engine

"""What an engine remembers by design stays within the bounds of its configuration, and is among its counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.engine import Detect, Engine, StreamSettings
from saccade.engine.config import EngineConfig
from saccade.engine.cpu import layers
from saccade.engine.cpu.layers import Replay
from saccade.engine.errors import Fallbacks
from saccade.engine.model_loader import ModelInfo
from saccade.engine.models import registry
from tests.support.engine import TINY

IMAGE = np.zeros((48, 64, 3), np.uint8)
CONFIG = EngineConfig(depth=1, n_pages=400, known_tasks=8, remembered_prompts=4, passing_streams=6)


@pytest.fixture
def engine() -> Iterator[Engine]:
    loaded = registry.load_random("moondream-2-random", torch.device("cpu"), torch.float32, TINY, 0)
    with Engine(loaded, ModelInfo.of(loaded, "tiny", Path(), None), None, CONFIG) as made:
        yield made


def test_tasks_streams_and_drafts_without_end(engine: Engine) -> None:
    for number in range(40):
        engine.submit(IMAGE, [Detect(f"thing {number}", 1, conf=0.0)], stream=f"stream {number}").result(60)
        counters = engine.counters()
        assert counters["tasks_known"] <= CONFIG.known_tasks
        assert counters["streams_known"] <= CONFIG.passing_streams + 3  # those of None and of this request, too
    engine.configure_stream("camera", StreamSettings())
    for number in range(20):
        engine.submit(IMAGE, [Detect(f"thing {number}", 1, conf=0.0)], stream="camera").result(60)
        memory = engine._loop._scheduler.admission.stream("camera").memory
        assert len(memory) <= CONFIG.remembered_prompts
    assert 0 < engine.counters()["drafts_kept"] <= CONFIG.remembered_prompts * (CONFIG.passing_streams + 3)
    assert len(engine._maker.known) <= CONFIG.known_tasks
    engine.forget_stream("camera")
    assert engine.counters()["cuda_graphs"] == 0


def test_shapes_without_end_are_neither_recorded_nor_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_MOST_COUNTED", 16)
    play = Replay(lambda x: (x + 1,), object(), Fallbacks())
    for size in range(1, 200):
        (found,) = play(torch.ones(size))
        assert found.tolist() == [2.0] * size
        assert len(play._calls) <= 16

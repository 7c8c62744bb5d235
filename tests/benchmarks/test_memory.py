"""The load of the watch over an engine's memory: it asks for everything that the model can do."""

from __future__ import annotations

import pytest

from benchmarks import memory
from benchmarks.memory import Held, MemoryBench, MixedLoad
from saccade.engine.golden.random_model import random_engine
from tests.support.engine import TINY


def test_everything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SIZES", ((64, 64), (320, 240)))
    monkeypatch.setattr(memory, "_TOKENS", 4)
    with random_engine("cpu", config=TINY, depth=2, n_pages=2000) as engine:
        load = MixedLoad(engine, 0)
        for _ in range(80):
            load.step()
        load.finish()
        assert engine.counters()["pages_used"] < 50  # of prefixes that are kept
    assert {"detect", "point", "query", "caption", "encode", "stream"} <= set(load.tasks)
    assert load.done > 30


def test_slopes_leave_out_the_warm_up() -> None:
    rows = [Held(15.0 * n, 10.0 if n < 12 else 50.0, 0.0, n / 4, 0, 0, 0) for n in range(40)]
    bench = MemoryBench("nano", "cpu", rows, {})
    allocated, rss = bench.slope("allocated_mb"), bench.slope("rss_mb")
    assert allocated is not None
    assert rss is not None
    assert allocated.per_minute == pytest.approx(0)
    assert rss.per_minute == pytest.approx(1)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.pipeline import _figures
from saccade.engine import ModelInfo
from saccade.pipeline.errors import ConfigError
from tests.support.command import run_saccade

MODEL = ModelInfo("nano", Path(), 1, None, ("detect",), "cpu", "bfloat16")


def test_what_a_frame_costs_besides_the_model_is_measured() -> None:
    done = run_saccade("pipeline", "--vid-stride", 3, "--seconds", 8, "--json", module="benchmarks")
    assert (done.returncode, done.stderr) == (0, "")
    timed = json.loads(done.stdout)
    assert (timed["model"], timed["device"], timed["dtype"].split()[0]) == ("nano", "cpu", "float32")
    assert timed["frames"] >= 3
    assert timed["fps"] == pytest.approx(10 / 3)
    assert 0 < timed["median_ms"] <= timed["p99_ms"]
    assert timed["model_ms"] > timed["before_ms"] >= 0


def test_the_times_are_taken_apart() -> None:
    latency = {"queue": 1.0, "prefill": 20.0, "decode_tokens": 10.0}
    notice = (0.0, {"streams": []})
    came = [notice, *((n + 0.034, {"frame": n, "latency_ms": latency}) for n in range(20))]
    timed = _figures(MODEL, 1, came, {n: float(n) for n in range(20)})
    assert timed.frames == 10
    assert timed.dtype == "bfloat16"
    assert (timed.model_ms, timed.before_ms) == (30.0, 1.0)
    assert timed.after_ms == pytest.approx(3.0)
    assert timed.median_ms == pytest.approx(4.0)


def test_too_few_frames_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--vid-stride 2"):
        _figures(MODEL, 30, [], {})

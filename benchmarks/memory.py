"""Measures the memory use of an engine while it processes requests with different prompts and image sizes.

Run it with `python -m benchmarks.memory MODEL DEVICE DTYPE SECONDS`.
"""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.slope import Slope, slope_of
from saccade.engine import Caption, Detect, Engine, EngineError, Point, Query, Segment, StreamSettings
from saccade.engine.golden.random_model import random_engine
from saccade.engine.models.registry import RANDOM

_SIZES = ((64, 64), (320, 240), (640, 360), (640, 480), (500, 900), (1280, 720), (1920, 1080), (3840, 2160))
_WORDS = ("person", "dog", "traffic light", "red car", "cup", "umbrella", "bicycle", "face")
_UNDER_WAY = 24
_TOKENS = 40  # of a text, at most
_STREAMS = 12
_WARM_S = 180.0
_KEPT = 3  # encoded images at a time
_LONG_S = 120.0


@dataclass(slots=True, frozen=True)
class Held:
    """One reading of memory use and request counts, `seconds` after the start.

    Attributes:
        allocated_mb, reserved_mb: device memory that PyTorch has allocated and reserved, in MB.
        rss_mb: resident main memory of the process, in MB.
        pages: number of KV cache pages in use.
        done: number of answered requests.
        failed: number of requests that were rejected, timed out, or replaced by a newer frame.
    """

    seconds: float
    allocated_mb: float
    reserved_mb: float
    rss_mb: float
    pages: float
    done: int
    failed: int


@dataclass(slots=True, frozen=True)
class MemoryBench:
    """Memory use of an engine over time."""

    model: str
    device: str
    rows: list[Held]
    tasks: dict[str, int]

    def slope(self, name: str) -> Slope | None:
        """Return the slope of a memory value after the warm-up, or None if there are fewer than 3 measurements."""
        warm = min(_WARM_S, self.rows[-1].seconds / 3)
        steady = [row for row in self.rows if row.seconds >= warm]
        return slope_of([row.seconds / 60 for row in steady], [getattr(row, name) for row in steady])

    def as_json(self) -> str:
        """Return all readings of memory use as a JSON object."""
        return json.dumps(asdict(self), indent=1)

    def as_text(self) -> str:
        """Return text that states the memory growth per minute, and the number of requests for each task."""
        slopes = [f"{name} {self.slope(name) or '-'}" for name in ("allocated_mb", "reserved_mb", "rss_mb")]
        asked = ", ".join(f"{name} {count}" for name, count in sorted(self.tasks.items()))
        return f"{self.model} on {self.device}: slope a minute: {'; '.join(slopes)}\nasked: {asked}"


class MixedLoad:
    """Submits random requests of all tasks to an engine.

    Args:
        engine: engine that answers the requests.
        seed: seed of the random image sizes and prompts.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._chance = engine, random.Random(seed)
        dice = np.random.default_rng(seed)
        self._images = [dice.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in _SIZES]
        self._waiting: deque[Future[Any]] = deque()
        self._kept: deque[Any] = deque()
        self.tasks: Counter[str] = Counter()
        self.done = self.failed = 0

    def step(self) -> None:
        """Submit a random request. If too many requests are running, first wait for the oldest."""
        chance = self._chance
        image = chance.choice(self._images)
        try:
            kind = chance.random()
            if kind < 0.03 and "query" in self._engine.model.skills:
                self._stream(image)
            elif kind < 0.06:
                self._keep(image)
            elif kind < 0.3:
                name = f"stream {chance.randrange(_STREAMS)}"
                if chance.random() < 0.1:
                    self._engine.configure_stream(name, StreamSettings(weight=chance.choice((1.0, 2.0))))
                elif chance.random() < 0.05:
                    self._engine.forget_stream(name)
                self._waiting.append(self._engine.submit(image, self._some(), stream=name))
            elif self._kept and kind < 0.4:
                self._waiting.append(self._engine.submit(chance.choice(self._kept), self._some()))
            else:
                tiles = 2 if chance.random() < 0.1 else 1
                deadline = chance.choice((None, None, None, 0.05))
                self._waiting.append(self._engine.submit(image, self._some(), tiles, deadline_s=deadline))
        except EngineError:
            self.failed += 1
        if len(self._waiting) > chance.randint(1, _UNDER_WAY):
            self._wait()

    def finish(self) -> None:
        """Wait until all submitted requests are answered."""
        while self._waiting:
            self._wait()
        while self._kept:
            self._kept.popleft().close()

    def _wait(self) -> None:
        try:
            self._waiting.popleft().result(_LONG_S)
            self.done += 1
        except EngineError:
            self.failed += 1

    def _some(self) -> list[Any]:
        return [self._one() for _ in range(self._chance.choice((1, 1, 1, 2, 4)))]

    def _one(self) -> Any:
        chance, skills = self._chance, self._engine.model.skills
        words = self._engine.model.classes or _WORDS
        skill = chance.choice([name for name in skills if name != "gaze"])
        self.tasks[skill] += 1
        objects, word = chance.choice((1, 5, 50)), chance.choice(words)
        if skill == "detect":
            return Detect(word, objects, conf=chance.choice((0.0, 0.5)))
        if skill == "point":
            return Point(word, objects)
        if skill == "segment":
            return Segment(word, max_tokens=_TOKENS)
        if skill == "caption":
            return Caption("short", _TOKENS)
        question = f"What does the {word} number {chance.randrange(10**6)} do?"
        choices = ("yes", "no") if chance.random() < 0.3 else ()
        return Query(question, _TOKENS, choices=choices) if choices else Query(question, _TOKENS)

    def _stream(self, image: Any) -> None:
        with self._engine.stream(image, Query("What is there?", _TOKENS)) as pieces:
            for number, _ in enumerate(pieces):
                if number > 5:
                    break  # the client has gone
        self.tasks["stream"] += 1

    def _keep(self, image: Any) -> None:
        self._kept.append(self._engine.encode(image))
        self.tasks["encode"] += 1
        if len(self._kept) > _KEPT:
            self._kept.popleft().close()


def watch_memory(
    model: str, device: str, *, dtype: str | None = None, seconds: float = 600.0, every_s: float = 15.0, seed: int = 0
) -> MemoryBench:
    """Load an engine, submit random requests, and measure the engine's memory use.

    Args:
        model: name or folder of a model, or a model with random weights such as `moondream-2-random`.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        dtype: name of the dtype, or None for the device's default.
        seconds: duration in seconds.
        every_s: seconds between two printed measurements.
        seed: seed of the random image sizes and prompts.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    load = random_engine(device, dtype, name=model) if model in RANDOM else Engine.load(model, device, dtype)
    with load as engine:
        return watch_engine(engine, seconds=seconds, every_s=every_s, seed=seed)


def watch_engine(engine: Engine, *, seconds: float, every_s: float, seed: int = 0) -> MemoryBench:
    """Submit random requests to an engine, and measure the engine's memory use every `every_s` seconds."""
    asked, begun = MixedLoad(engine, seed), time.monotonic()
    rows: list[Held] = []
    print(f"{engine.model.name} on {engine.model.device}: {', '.join(engine.model.skills)}", flush=True)
    print(f"{'s':>6}{'allocated':>11}{'reserved':>10}{'RSS MB':>9}{'pages':>7}{'done':>8}{'failed':>8}", flush=True)
    while (now := time.monotonic() - begun) < seconds:
        asked.step()
        if now >= len(rows) * every_s:
            rows.append(_read(engine, now, asked))
            one = rows[-1]
            print(
                f"{one.seconds:>6.0f}{one.allocated_mb:>11.1f}{one.reserved_mb:>10.1f}{one.rss_mb:>9.1f}"
                f"{one.pages:>7.0f}{one.done:>8}{one.failed:>8}",
                flush=True,
            )
    asked.finish()
    return MemoryBench(engine.model.name, engine.model.device, rows, dict(asked.tasks))


def _read(engine: Engine, now: float, asked: MixedLoad) -> Held:
    import torch

    gc.collect()
    allocated = reserved = 0.0
    if (gpu := engine.model.gpu) is not None:
        allocated, reserved = torch.cuda.memory_allocated(gpu) / 1e6, torch.cuda.memory_reserved(gpu) / 1e6
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    rss = int(found[1]) * 1.024e-3 if found else 0.0
    return Held(now, allocated, reserved, rss, engine.counters().get("pages_used", 0.0), asked.done, asked.failed)


if __name__ == "__main__":
    name, place, dtype, length = (sys.argv[1:] + ["nano", "auto", "-", "600"][len(sys.argv) - 1 :])[:4]
    result = watch_memory(name, place, dtype=None if dtype == "-" else dtype, seconds=float(length))
    print(result.as_text())

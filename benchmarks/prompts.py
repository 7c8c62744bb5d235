"""`python -m benchmarks prompts`: compares all prompts on one image with each prompt on its own image: time and memory.

Prompts on the same image share its prefill and its KV cache pages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from saccade.engine.tasks import Detect
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import Measurement, images_of
from saccade.pipeline.bench.load_generator import OPEN_LABELS, open_engine
from saccade.sources import RgbImage

if TYPE_CHECKING:
    from saccade.engine import Engine

_OBJECTS = 3  # each prompt finds as many, whatever there is, so that only the images make a difference
_LONG_S = 120.0

Asked = list[tuple[RgbImage, list[Detect]]]


@dataclass(slots=True, frozen=True)
class PromptsRow:
    """Time and memory for a number of prompts, in two cases: all on one image, and each on its own image.

    Attributes:
        prompts: number of prompts.
        together_ms, apart_ms: median time from submission to the last answer, with one image and with separate images.
        together_pages, apart_pages: maximum number of KV cache pages in use, with one image and with separate images.
    """

    prompts: int
    together_ms: float
    apart_ms: float
    together_pages: int
    apart_pages: int


@dataclass(slots=True, frozen=True)
class PromptsBench(Measurement):
    """Time and memory for all prompts on one image and for each on its own image, one row per number of prompts."""

    model: str
    device: str
    dtype: str
    rows: list[PromptsRow]

    def as_text(self) -> str:
        """Return the time and memory for each number of prompts as a text table."""
        lines = [
            f"{self.model} on {self.device} in {self.dtype}; {_OBJECTS} objects a prompt; ms to all answers, "
            "most pages in use",
            f"{'prompts':>8}{'one image':>20}{'an image each':>20}",
        ]
        for row in self.rows:
            together = f"{row.together_ms:.1f} ms {row.together_pages:>5} p"
            apart = f"{row.apart_ms:.1f} ms {row.apart_pages:>5} p"
            lines.append(f"{row.prompts:>8}{together:>20}{apart:>20}")
        return "\n".join(lines)


def time_prompts(
    name: str,
    device: str,
    prompts: Sequence[int],
    *,
    dtype: str | None = None,
    size: tuple[int, int] = (640, 360),
    rounds: int = 10,
) -> PromptsBench:
    """Measure time and memory in two cases: all prompts on one image, and each prompt on its own image.

    Args:
        name: name, folder or Hugging Face Hub ID of a model, or `moondream-2-random`.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        prompts: how many prompts to submit; each number is measured separately.
        dtype: name of the dtype, or None for the device's default.
        size: width and height of the images in pixels.
        rounds: number of repetitions.

    Raises:
        EngineError: if the model, device or dtype does not exist.
    """
    image = images_of(str(DEMO_CLIP), *size)[0]
    with open_engine(name, device, dtype=dtype) as engine:
        rows = [measure_prompts(engine, image, count, rounds) for count in prompts]
        return PromptsBench(engine.model.name, engine.model.device, engine.model.dtype, rows)


def measure_prompts(engine: Engine, image: RgbImage, count: int, rounds: int) -> PromptsRow:
    """Measure time and memory of `count` prompts in two cases: all on one image, and each on its own image."""
    labels = islice(cycle(engine.model.classes or OPEN_LABELS), count)
    tasks = [Detect(label, _OBJECTS, 0.0) for label in labels]
    together: Asked = [(image, tasks)]
    apart: Asked = [(image, [task]) for task in tasks]
    both = [[_once(engine, asked) for asked in (together, apart)] for _ in range(1 + rounds)][1:]  # the first warms up
    return PromptsRow(
        prompts=count,
        together_ms=statistics.median(1e3 * one[0][0] for one in both),
        apart_ms=statistics.median(1e3 * one[1][0] for one in both),
        together_pages=max(one[0][1] for one in both),
        apart_pages=max(one[1][1] for one in both),
    )


def _once(engine: Engine, asked: Asked) -> tuple[float, int]:
    """Submit images, each with its prompts, and wait for the answers.

    Return the total time in seconds, and the maximum number of KV cache pages in use.
    """
    total = engine.counters()["pages_capacity"]
    with engine.tracing() as trace:
        started = time.perf_counter()
        answers = [engine.submit(image, tasks) for image, tasks in asked]
        for answer in answers:
            answer.result(_LONG_S)
        took = time.perf_counter() - started
    return took, round(total - min(one.value for one in trace.counts() if one.name == "free pages"))

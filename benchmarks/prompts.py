"""`python -m benchmarks prompts`: several prompts on one image, beside the same prompts on images of their own.

The prompts of an image share its prefill and its pages.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from saccade.engine.tasks import Detect
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import images_of
from saccade.pipeline.bench.load_generator import OPEN_LABELS, open_engine
from saccade.sources import RgbImage

if TYPE_CHECKING:
    from saccade.engine import Engine

_OBJECTS = 3  # each prompt finds as many, whatever there is, so that only the images make a difference
_LONG_S = 120.0

Asked = list[tuple[RgbImage, list[Detect]]]


@dataclass(slots=True, frozen=True)
class PromptsRow:
    """Some prompts on one image, and apart.

    Attributes:
        prompts: how many.
        together_ms, apart_ms: medians from handing over to the last answer, on one image and on one each.
        together_pages, apart_pages: most pages in use meanwhile.
    """

    prompts: int
    together_ms: float
    apart_ms: float
    together_pages: int
    apart_pages: int


@dataclass(slots=True, frozen=True)
class PromptsBench:
    """Rows by number of prompts; the model, and the device it ran on."""

    model: str
    device: str
    dtype: str
    rows: list[PromptsRow]

    def as_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """A table."""
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
    """Measure both ways in turn, `rounds` times each.

    Args:
        name: as `Engine.load` takes it, or `saccade.engine.golden.random_model.MOONDREAM_2`.
        device: as `Engine.load` takes it.
        prompts: how many, for each row.
        dtype: as `Engine.load` takes it.
        size: width and height of the image in pixels.
        rounds: how often.

    Raises:
        EngineError: if there is no such model, device or dtype.
    """
    image = images_of(str(DEMO_CLIP), *size)[0]
    with open_engine(name, device, dtype=dtype) as engine:
        rows = [measure_prompts(engine, image, count, rounds) for count in prompts]
        return PromptsBench(engine.model.name, engine.model.device, engine.model.dtype, rows)


def measure_prompts(engine: Engine, image: RgbImage, count: int, rounds: int) -> PromptsRow:
    """Measure one number of prompts."""
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
    """Seconds to the last answer, and most pages in use."""
    total = engine.counters()["pages_capacity"]
    with engine.tracing() as trace:
        started = time.perf_counter()
        answers = [engine.submit(image, tasks) for image, tasks in asked]
        for answer in answers:
            answer.result(_LONG_S)
        took = time.perf_counter() - started
    return took, round(total - min(one.value for one in trace.counts() if one.name == "free pages"))

"""`python -m benchmarks questions`: measures how questions to the model increase the latency of detections.

The same simulated cameras run twice on one engine: first without questions, then with a fixed rate of questions about
image crops.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from saccade.engine.errors import DeadlineError, EngineError
from saccade.pipeline.bench.cameras.measure import run_cameras, shown_images
from saccade.pipeline.bench.cameras.report import CamerasBench
from saccade.pipeline.bench.load_generator import open_engine
from saccade.pipeline.events.asking import ModelAskEngine
from saccade.sources import RgbImage

if TYPE_CHECKING:
    from saccade.engine import Engine

_QUESTION = "Is there really a person?"
_CHOICES = ("yes", "no")
_DEADLINE_S = 2.0  # the default of `ask_deadline`
_CROP = 0.4, 0.8  # fractions of the image's width and height
_END_S = 10.0


@dataclass(slots=True, frozen=True)
class QuestionsBench:
    """Frame latencies of simulated cameras, without and with questions to the model.

    Attributes:
        without: results of the cameras without questions.
        beside: results of the cameras with questions.
        asked: number of questions.
        late: number of questions that missed the deadline of 2 s.
        failed: number of questions that failed for another reason.
        p50_ms, p95_ms: median and 95th percentile of the time from a question to its answer.
    """

    without: CamerasBench
    beside: CamerasBench
    asked: int
    late: int
    failed: int
    p50_ms: float
    p95_ms: float

    @property
    def moved(self) -> float:
        """Relative increase of the 99th-percentile frame latency due to questions; 0.1 means 10 % higher."""
        return self.beside.result_p99_ms / self.without.result_p99_ms - 1

    def as_json(self) -> str:
        """Return the results as a JSON object, without those of the individual cameras."""
        parts = asdict(replace(self, without=replace(self.without, rows=()), beside=replace(self.beside, rows=())))
        return json.dumps({**parts, "moved": self.moved}, indent=2)

    def as_text(self) -> str:
        """Return the latencies without and with questions as text for the terminal."""

        def line(name: str, seen: CamerasBench) -> str:
            return (
                f"{name:>18}: {seen.fps:6.1f} frames/s, age at the result p50 {seen.result_p50_ms:.0f} ms, "
                f"p99 {seen.result_p99_ms:.0f}; deadlines met {100 * seen.deadlines_met:.1f} %"
            )

        return "\n".join(
            [
                f"{self.without.model} on {self.without.device} in {self.without.dtype}: "
                f"{self.without.offered_fps:.0f} frames/s offered",
                line("without questions", self.without),
                line("with questions", self.beside),
                f"p99 moved by {100 * self.moved:+.1f} %; {self.asked} questions, answered after p50 "
                f"{self.p50_ms:.0f} ms, p95 {self.p95_ms:.0f}; late {self.late}, failed {self.failed}",
            ]
        )


def time_questions(
    model: str,
    device: str,
    streams: int,
    fps: tuple[float, float],
    per_second: float,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    seconds: float = 20.0,
    deadline_ms: float | None = 250.0,
    objects: int | None = None,
    size: tuple[int, int] = (640, 360),
) -> QuestionsBench:
    """Measure the frame latencies of simulated cameras, first without and then with questions to the model.

    The model gets `per_second` questions per second. For the other arguments, see `time_cameras`.

    Raises:
        EngineError: if the model cannot be loaded or does not support questions.
    """
    images, large, task = shown_images(size, objects)
    with open_engine(model, device, dtype=dtype, kv_dtype=kv_dtype) as engine:
        if "query" not in engine.model.skills:
            raise EngineError(f"{engine.model.name} does not answer questions; use --model moondream-2-random")
        with _Asking(engine, images, per_second) as warm:
            time.sleep(min(1.0, 2 / per_second))
        del warm
        cameras = (engine, images, large, task, streams, fps, seconds, deadline_ms, None, (1.0,))
        without = run_cameras(*cameras)
        with _Asking(engine, images, per_second) as asking:
            beside = run_cameras(*cameras)
        return QuestionsBench(without, beside, asking.asked, asking.late, asking.failed, *asking.percentiles())


class _Asking:
    """Submits questions to the model at random times (Poisson process), until the `with` block ends."""

    def __init__(self, engine: Engine, images: Sequence[RgbImage], per_second: float) -> None:
        self._engine, self._images, self._per_second = ModelAskEngine(engine), images, per_second
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="bench questions", daemon=True)
        self._open = 0
        self._times: list[float] = []
        self.asked = self.late = self.failed = 0

    def percentiles(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the answer times, in milliseconds; NaN without answers."""
        times = self._times or [float("nan")]
        return float(np.percentile(times, 50)), float(np.percentile(times, 95))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        latest = time.monotonic() + _END_S
        while self._open and time.monotonic() < latest:
            time.sleep(0.01)

    def _work(self) -> None:
        dice = random.Random(0)
        while not self._stop.wait(dice.expovariate(self._per_second)):
            image = self._images[self.asked % len(self._images)]
            height, width = round(image.shape[0] * _CROP[1]), round(image.shape[1] * _CROP[0])
            left = dice.randrange(image.shape[1] - width)
            crop = np.ascontiguousarray(image[:height, left : left + width])
            began = time.monotonic()
            with self._lock:
                self.asked, self._open = self.asked + 1, self._open + 1
            answered = self._engine.ask(crop, _QUESTION, _CHOICES, _DEADLINE_S)
            answered.add_done_callback(lambda future, began=began: self._take(future, began))  # type: ignore[misc]

    def _take(self, future: Future[Any], began: float) -> None:
        took, error = time.monotonic() - began, future.exception()
        with self._lock:
            self._open -= 1
            if error is None:
                self._times.append(1e3 * took)
            elif isinstance(error, DeadlineError):
                self.late += 1
            else:
                self.failed += 1

"""A closed-loop load generator for several benchmarks, and the measurement of engine steps.

Each simulated stream submits its next image when it has received the answer for its previous image.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice, product
from typing import TYPE_CHECKING

import cv2
import numpy as np

from saccade.engine.errors import EngineError
from saccade.engine.results import Result
from saccade.engine.runtime.monitor import Span, Trace
from saccade.engine.tasks import Detect
from saccade.engine.tasks.task import Window
from saccade.pipeline.runtime.stream import for_life
from saccade.sources import RgbImage

if TYPE_CHECKING:
    from saccade.engine import Engine

MAX_OBJECTS = 50
OPEN_LABELS = ("person", "face", "dog", "chair", "bicycle", "traffic light", "umbrella", "cup")
_CLOSED_LABELS = 2  # for a model with fixed classes: the demo clip shows persons and faces
_TILES = 4  # mosaics of 1 × 1 to 4 × 4 images of the clip, so that the number of objects varies
_FULL = 0.75  # a batch above this fraction of the streams counts as full, because it is padded to the full size
_WARM_UP = 0.2  # fraction of the measured time; also one answer per stream, because all streams start at once
_LONG_S = 120.0

Job = tuple[RgbImage, Detect]


class RandomWindows:
    """Chooses zoom windows at random positions of an image, to simulate `--saccades`.

    Args:
        engine: the engine.
        count: number of zoom windows per image.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._count = engine, count
        self._dice = random.Random(0)
        self._sizes: dict[tuple[int, ...], tuple[int, int]] = {}

    def of(self, image: RgbImage) -> list[Window]:
        """Return zoom windows at random positions.

        The list is empty if the image is not larger than the model's input.
        """
        height, width = image.shape[:2]
        if not self._count:
            return []
        if image.shape not in self._sizes:
            self._sizes[image.shape] = self._engine.input_size(width, height)
        across, down = self._sizes[image.shape]
        if across >= width or down >= height:
            return []
        return [
            Window(
                2 * self._dice.randint(0, (width - across) // 2),
                2 * self._dice.randint(0, (height - down) // 2),
                across,
                down,
            )
            for _ in range(self._count)
        ]


@dataclass(slots=True, frozen=True)
class StepTimes:
    """The times of one batch step of the engine, in seconds.

    Attributes:
        decode: True for a decode step, False for a prefill.
        rows: number of sequences in the step.
        end: time at which the step ended, by `time.perf_counter`.
        period: time from the end of the previous step to the end of this step.
        forward: time of the forward pass.
        sampling: time of sampling; 0 if the CUDA graph of the forward pass includes sampling.
        host: CPU time of the step on the host, without waiting.
    """

    decode: bool
    rows: int
    end: float
    period: float
    forward: float
    sampling: float
    host: float


@dataclass(slots=True)
class Measured:
    """The measured steps of a blocking (depth 1) or pipelined (depth 2) engine.

    Attributes:
        steps: steps that ended during the measurement.
        answers: number of answers.
        rows: number of sequences, summed over all decode steps.
        zombies: number of sequences that were decoded after their end, summed over all decode steps.
        elapsed: duration of the measurement, in seconds.
    """

    steps: list[StepTimes] = field(default_factory=list)
    answers: int = 0
    rows: int = 0
    zombies: int = 0
    elapsed: float = 0.0

    @property
    def zombie_share(self) -> float:
        """The fraction of sequences in decode steps that were decoded after their end, from 0 to 1."""
        return self.zombies / self.rows

    @property
    def useful_steps(self) -> float:
        """The mean number of decode steps per answer, without steps after the end of the answer."""
        return (self.rows - self.zombies) / self.answers

    @property
    def decode(self) -> list[StepTimes]:
        """The measured decode steps, without prefills."""
        return [step for step in self.steps if step.decode]

    @property
    def mean_rows(self) -> float:
        """The mean batch size (number of sequences) of a decode step."""
        return statistics.mean(step.rows for step in self.decode)

    @property
    def period(self) -> float:
        """The mean time of a decode step, from the end of the previous step to the end of this step, in seconds."""
        return statistics.mean(step.period for step in self.decode)

    @property
    def useful_rate(self) -> float:
        """The decode throughput, in sequences per second. Sequences that are decoded after their end do not count."""
        prefilling = sum(step.period for step in self.steps if not step.decode)
        return (self.rows - self.zombies) / (self.elapsed - prefilling)

    @property
    def prefill_s(self) -> float:
        """The mean prefill time of one image, in seconds."""
        steps = [step for step in self.steps if not step.decode]
        return sum(step.period for step in steps) / sum(step.rows for step in steps)

    @property
    def per_answer_s(self) -> float:
        """The engine time per answer, in seconds: the prefill time, plus the decode time divided by the batch size."""
        return self.prefill_s + self.useful_steps * self.period / self.mean_rows / (1 - self.zombie_share)

    def full(self, streams: int) -> list[StepTimes]:
        """Return the decode steps with an almost full batch. If there are none, return all decode steps."""
        return [step for step in self.decode if step.rows > _FULL * streams] or self.decode


def open_engine(
    name: str,
    device: str,
    depth: int | None = None,
    dtype: str | None = None,
    *,
    drafts: bool | None = None,
    kv_dtype: str | None = None,
    imgsz: int | None = None,
) -> Engine:
    """Load a model, or create a model with random weights. The arguments are the same as for `Engine.load`.

    By default, speculative decoding is on for a trained model and off for random weights.

    Raises:
        EngineError: if the model, device or dtype does not exist.
    """
    from saccade.engine import Engine
    from saccade.engine.golden.random_model import random_engine
    from saccade.engine.models.registry import RANDOM

    if name in RANDOM:
        if imgsz is not None:
            raise EngineError(f"{name} has a fixed input size: remove --imgsz, which only the model nano supports")
        return for_life(
            lambda: random_engine(device, dtype, depth or 2, name=name, drafts=bool(drafts), kv_dtype=kv_dtype)
        )
    return for_life(
        lambda: Engine.load(
            name, device, dtype, depth=depth, drafts=drafts is not False, kv_dtype=kv_dtype, imgsz=imgsz
        )
    )


def dtypes_of(engine: Engine) -> str:
    """Return the data type of a model, and the data type of its KV cache if it differs."""
    kept = engine.config.kv_dtype
    return engine.model.dtype if kept is None else f"{engine.model.dtype} with keys and values in {kept}"


def mosaics(images: Sequence[RgbImage]) -> list[RgbImage]:
    """Return one mosaic per image: a square grid of 1 to 16 downscaled images. A mosaic has the size of one image."""
    height, width = images[0].shape[:2]
    made = []
    for number in range(len(images)):
        n = 1 + number % _TILES
        source = islice(cycle(images), number, None)
        rows = [np.concatenate([_smaller(next(source), n) for _ in range(n)], axis=1) for _ in range(n)]
        whole = np.zeros((height, width, 3), np.uint8)
        joined = np.concatenate(rows, axis=0)
        whole[: joined.shape[0], : joined.shape[1]] = joined
        made.append(whole)
    return made


def _smaller(image: RgbImage, n: int) -> RgbImage:
    size = (image.shape[1] // n, image.shape[0] // n)
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def jobs_of(engine: Engine, images: Sequence[RgbImage], objects: float, most: int = MAX_OBJECTS) -> list[Job]:
    """Return one detection request for each combination of a label and an image.

    Args:
        engine: the engine.
        images: the images.
        objects: mean number of objects per answer. It determines the score threshold of the requests.
        most: maximum number of objects per answer.
    """
    classes = engine.model.classes
    labels = OPEN_LABELS if classes is None else classes[:_CLOSED_LABELS]
    jobs = [(image, Detect(label, most, 0.0)) for label, image in product(labels, images)]
    answers = [engine.submit(image, [task]) for image, task in jobs]
    scores = [[box.score for box in answer.result(_LONG_S).detections.boxes] for answer in answers]
    conf = conf_for(scores, objects)
    random.Random(0).shuffle(jobs)  # otherwise similar answers with one label would be adjacent
    return [(image, replace(task, conf=conf)) for image, task in jobs]


def conf_for(scores: Sequence[Sequence[float]], objects: float) -> float:
    """Return the score threshold that results in a given mean number of objects per answer.

    Args:
        scores: scores of each answer, generated without a threshold.
        objects: mean number of objects.
    """
    # The scores of an answer never increase, so it ends at its first score below the threshold.
    falling = sorted(chain.from_iterable(scores), reverse=True)
    return falling[min(round(objects * len(scores)), len(falling) - 1)]


class ClosedLoop:
    """Closed-loop load generator: each stream submits its next request when its previous request is answered.

    Args:
        engine: the engine.
        jobs: the requests. They are repeated endlessly.
        windows: chooses the zoom windows of each image; None for no zoom windows.

    Attributes:
        n_open: number of requests in flight.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], windows: RandomWindows | None = None) -> None:
        # One thread submits the requests of all streams: several threads would contend for the GIL.
        self._engine, self._jobs, self._windows = engine, cycle(jobs), windows or RandomWindows(engine, 0)
        self._over: queue.SimpleQueue[tuple[float, Future[Result]]] = queue.SimpleQueue()
        self.n_open = 0

    def submit(self) -> None:
        """Submit the next request to the engine."""
        begun, (image, task) = time.perf_counter(), next(self._jobs)
        asked = self._engine.submit(image, [task], windows=self._windows.of(image))
        asked.call_when_done(lambda future: self._over.put((begun, future)))
        self.n_open += 1

    def take(self, timeout: float | None = None) -> tuple[float, Result]:
        """Wait for the next answer. Return its latency in seconds, and its result.

        Raises:
            queue.Empty: if no answer arrives within `timeout` seconds.
        """
        begun, future = self._over.get(timeout=timeout)
        self.n_open -= 1
        result = future.result()
        return time.perf_counter() - begun, result


def run_closed_loop(engine: Engine, jobs: Sequence[Job], streams: int, seconds: float, measured: Measured) -> None:
    """Measure the engine under closed-loop load for `seconds`, after a warm-up. Add the results to `measured`."""
    loop = ClosedLoop(engine, jobs)

    def turn(until: float, answers: int = 0) -> None:
        while answers > 0 or time.perf_counter() < until:
            loop.take(_LONG_S)
            loop.submit()
            answers -= 1

    # The trace starts with the warm-up, because a step's period starts at the end of the previous step.
    with engine.tracing() as trace:
        for _ in range(streams):
            loop.submit()
        turn(time.perf_counter() + _WARM_UP * seconds, answers=streams)
        before, started = engine.counters(), time.perf_counter()
        turn(started + seconds)
        after, ended = engine.counters(), time.perf_counter()
    while loop.n_open:
        loop.take(_LONG_S)
    wait_for_rest(engine)
    grown = {key: after[key] - before[key] for key in after}
    measured.steps += [step for step in step_times(trace) if started < step.end <= ended]
    measured.answers += round(grown["requests_done_total"])
    measured.rows += round(grown["sequences_decode_total"])
    measured.zombies += round(grown["zombies_total"])
    measured.elapsed += ended - started


def wait_for_rest(engine: Engine) -> None:
    """Wait until all steps of the engine have ended.

    Raises:
        TimeoutError: if the engine does not become idle.
    """
    latest = time.monotonic() + _LONG_S
    while engine.counters()["batch_slots_used"]:
        if time.monotonic() > latest:
            raise TimeoutError(f"the engine did not become idle within {_LONG_S:g} s")
        time.sleep(0.001)


def step_times(trace: Trace) -> list[StepTimes]:
    """Return the duration of each engine step in a trace, without the first step."""
    device: dict[int, list[Span]] = {}
    for span in trace.spans("compute"):
        device.setdefault(_step(span), []).append(span)
    host: dict[int, float] = {}
    for span in trace.spans("host"):
        if span.name in ("launch", "finalize", "commit"):
            host[_step(span)] = host.get(_step(span), 0.0) + span.seconds
    planning = [span.seconds for span in trace.spans("host") if span.name == "schedule"]
    planned = statistics.median(planning) if planning else 0.0
    steps = []
    for number, spans in device.items():
        before = device.get(number - 1)
        if before is None or number not in host:
            continue
        busy = {part: sum(s.seconds for s in spans if (s.name == "sample") is part) for part in (True, False)}
        steps.append(
            StepTimes(
                decode=spans[0].args["kind"] == "decode",
                rows=int(str(spans[0].args["rows"])),
                end=spans[-1].end,
                period=spans[-1].end - before[-1].end,
                forward=busy[False],
                sampling=busy[True],
                host=host[number] + planned,
            )
        )
    return steps


def _step(span: Span) -> int:
    return int(str(span.args["step"]))

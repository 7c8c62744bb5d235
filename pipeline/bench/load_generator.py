"""A closed loop of streams on an engine, and what its steps took: shared by the benches of the engine.

Each stream asks for one name on one image, and for the next as soon as it has the answer. Answers end where the model
stops, which is not known in advance.
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
_CLOSED_LABELS = 2  # of a model that knows what it sees: the demo clip has persons and faces
_TILES = 4  # images are mosaics of 1 × 1 to 4 × 4 of the clip's, so that the number of objects varies
_FULL = 0.75  # a batch of more than this share of the streams counts as full: it is padded to the same size
_WARM_UP = 0.2  # of the time that is measured, and an answer for each stream: they all start at once
_LONG_S = 120.0

Job = tuple[RgbImage, Detect]


class RandomWindows:
    """As many windows of an image as `--saccades` asks for, anywhere in it, of the size in which the model sees them.

    Args:
        engine: the model's.
        count: of each image.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._count = engine, count
        self._dice = random.Random(0)
        self._sizes: dict[tuple[int, ...], tuple[int, int]] = {}

    def of(self, image: RgbImage) -> list[Window]:
        """The windows of an image; none of one that is no larger than the model sees it."""
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
    """A step on the compute stream, in seconds.

    Attributes:
        decode: whether it is a decode step, else a prefill.
        rows: sequences in it.
        end: when it was done, on the clock of `time.perf_counter`.
        period: from the end of the step before it to its end.
        forward, sampling: of that, what each took; sampling is 0 where it is part of the forward's graph.
        host: what the host did for it, waiting left out.
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
    """Everything measured at one depth.

    Attributes:
        steps: that ended while it was measured.
        answers, rows, zombies: by the engine's counters; sequences of decode steps, and the wasted ones of them.
        elapsed: seconds on the wall's clock.
    """

    steps: list[StepTimes] = field(default_factory=list)
    answers: int = 0
    rows: int = 0
    zombies: int = 0
    elapsed: float = 0.0

    @property
    def zombie_share(self) -> float:
        """z: share of decoded sequences that were wasted."""
        return self.zombies / self.rows

    @property
    def useful_steps(self) -> float:
        """L: mean decode steps of an answer."""
        return (self.rows - self.zombies) / self.answers

    @property
    def decode(self) -> list[StepTimes]:
        """Decode steps."""
        return [step for step in self.steps if step.decode]

    @property
    def mean_rows(self) -> float:
        """Sequences of a decode step."""
        return statistics.mean(step.rows for step in self.decode)

    @property
    def period(self) -> float:
        """T: mean period of a decode step, of any number of sequences and beside anything else."""
        return statistics.mean(step.period for step in self.decode)

    @property
    def useful_rate(self) -> float:
        """Useful decoded sequences in a second without prefills."""
        prefilling = sum(step.period for step in self.steps if not step.decode)
        return (self.rows - self.zombies) / (self.elapsed - prefilling)

    @property
    def prefill_s(self) -> float:
        """Mean period of the prefill of one image."""
        steps = [step for step in self.steps if not step.decode]
        return sum(step.period for step in steps) / sum(step.rows for step in steps)

    @property
    def per_answer_s(self) -> float:
        """Time an answer should take: its prefill, and its share of decode steps."""
        return self.prefill_s + self.useful_steps * self.period / self.mean_rows / (1 - self.zombie_share)

    def full(self, streams: int) -> list[StepTimes]:
        """Decode steps of a full batch; all of them if there was none."""
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
    """Load a model, or make one of random weights; the arguments are those of `Engine.load`.

    By default a model drafts, and one of random weights does not, whose answers have nothing of those before.

    Raises:
        EngineError: if there is no such model, device or dtype.
    """
    from saccade.engine import Engine
    from saccade.engine.golden.random_model import random_engine
    from saccade.engine.models.registry import RANDOM

    if name in RANDOM:
        if imgsz is not None:
            raise EngineError(f"{name} sees images at one size: leave out --imgsz, which is for nano")
        return for_life(
            lambda: random_engine(device, dtype, depth or 2, name=name, drafts=bool(drafts), kv_dtype=kv_dtype)
        )
    return for_life(
        lambda: Engine.load(
            name, device, dtype, depth=depth, drafts=drafts is not False, kv_dtype=kv_dtype, imgsz=imgsz
        )
    )


def dtypes_of(engine: Engine) -> str:
    """What an engine computes in, and what it keeps keys and values in if that is something else."""
    kept = engine.config.kv_dtype
    return engine.model.dtype if kept is None else f"{engine.model.dtype} with keys and values in {kept}"


def mosaics(images: Sequence[RgbImage]) -> list[RgbImage]:
    """As many images of the same size, each one of the given or several of them, smaller, side by side."""
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
    """What to ask of each image, at the confidence at which answers have `objects` objects in the mean."""
    classes = engine.model.classes
    labels = OPEN_LABELS if classes is None else classes[:_CLOSED_LABELS]
    jobs = [(image, Detect(label, most, 0.0)) for label, image in product(labels, images)]
    answers = [engine.submit(image, [task]) for image, task in jobs]
    scores = [[box.score for box in answer.result(_LONG_S).detections.boxes] for answer in answers]
    conf = conf_for(scores, objects)
    random.Random(0).shuffle(jobs)  # or answers of one name, which are alike, would come together
    return [(image, replace(task, conf=conf)) for image, task in jobs]


def conf_for(scores: Sequence[Sequence[float]], objects: float) -> float:
    """The confidence at which answers have `objects` objects in the mean, given the scores of answers without end.

    An answer ends at its first score that is not above the confidence, and no score in it is above the one before
    (see `skills.FindObjects`): its length is the number of scores that are above the confidence.
    """
    falling = sorted(chain.from_iterable(scores), reverse=True)
    return falling[min(round(objects * len(scores)), len(falling) - 1)]


class ClosedLoop:
    """Requests of all streams, from one thread.

    A thread for each stream, which waits for its answer, is a load of its own: of `nano` on an H200 32 of them had
    1,745 to 1,771 images a second answered, where one has 2,606 to 2,790.

    Args:
        engine: answers them.
        jobs: what is asked, again and again.
        windows: of each image; None for none.

    Attributes:
        n_open: requests under way.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], windows: RandomWindows | None = None) -> None:
        self._engine, self._jobs, self._windows = engine, cycle(jobs), windows or RandomWindows(engine, 0)
        self._over: queue.SimpleQueue[tuple[float, Future[Result]]] = queue.SimpleQueue()
        self.n_open = 0

    def submit(self) -> None:
        """Ask for the next."""
        begun, (image, task) = time.perf_counter(), next(self._jobs)
        asked = self._engine.submit(image, [task], windows=self._windows.of(image))
        asked.call_when_done(lambda future: self._over.put((begun, future)))
        self.n_open += 1

    def take(self, timeout: float | None = None) -> tuple[float, Result]:
        """Seconds that the next answer took, and it. Waits for it.

        Raises:
            queue.Empty: if it is not there within `timeout` seconds.
        """
        begun, future = self._over.get(timeout=timeout)
        self.n_open -= 1
        result = future.result()
        return time.perf_counter() - begun, result


def run_closed_loop(engine: Engine, jobs: Sequence[Job], streams: int, seconds: float, measured: Measured) -> None:
    """Keep `streams` requests under way, for a while unmeasured and then for `seconds`; add what was seen."""
    loop = ClosedLoop(engine, jobs)

    def turn(until: float, answers: int = 0) -> None:
        """Submit the next as answers come, until then and at least so many."""
        while answers > 0 or time.perf_counter() < until:
            loop.take(_LONG_S)
            loop.submit()
            answers -= 1

    with engine.tracing() as trace:  # from the warm-up on: a step's period starts at the end of the one before it
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
    """Wait until wasted steps have run, too.

    Raises:
        TimeoutError: if it does not.
    """
    latest = time.monotonic() + _LONG_S
    while engine.counters()["batch_slots_used"]:
        if time.monotonic() > latest:
            raise TimeoutError("the engine does not come to rest")
        time.sleep(0.001)


def step_times(trace: Trace) -> list[StepTimes]:
    """The steps of a trace whose beginning it holds."""
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

"""`saccade bench cameras`: simulated cameras of mixed rates that offer more than the model can answer.

How old frames are when their prefill is launched and when their result is there, what is dropped and why, and whether
each camera gets its share. One camera freezes for a third of the time, one sends its frames in bursts of a second, one
is in 4K. Frames come from memory: sources cost nothing here.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from saccade.engine.errors import DeadlineError, SupersededError
from saccade.engine.scheduling.admission import StreamSettings
from saccade.engine.tasks import Detect
from saccade.pipeline.bench.common import images_of
from saccade.pipeline.bench.load_generator import open_engine
from saccade.pipeline.core.assets import DEMO_CLIP
from saccade.sources import RgbImage

if TYPE_CHECKING:
    from concurrent.futures import Future

    from saccade.engine import Engine, Result

_CLOSED_LOOP = 32  # streams that always have a frame, for the rate to compare with
_SETTLE_S = 0.5  # of answers that are not counted, while estimates are learned
_END_S = 60.0
_LARGE = (3840, 2160)


@dataclass(slots=True)
class CameraRow:
    """One camera.

    Attributes:
        name: what is special of it, if anything.
        fps: frames that it offers a second.
        weight: of its stream.
        offered: frames that it has offered.
        looks: of these, those that were answered.
        launch_p50_ms, launch_p99_ms: age of its frames when their prefill was launched.
        result_p50_ms, result_p99_ms: the same when their result was there.
        dropped: the others by cause: superseded by a newer frame, deadline, or failed.
        share: looks by what a fair scheduler would give it in each second, of the frames that it offered at different
            moments, see `fair_shares`.
    """

    name: str
    fps: float
    weight: float
    offered: int = 0
    looks: int = 0
    launch_p50_ms: float | None = None
    launch_p99_ms: float | None = None
    result_p50_ms: float | None = None
    result_p99_ms: float | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    share: float = 1.0


@dataclass(slots=True, frozen=True)
class CamerasBench:
    """What `time_cameras` measured.

    Attributes:
        offered_fps, fps: frames offered and answered a second, by all cameras.
        closed_loop_fps: answered a second where 32 streams always have a frame.
        launch_p50_ms, launch_p99_ms, result_p50_ms, result_p99_ms: ages over all cameras.
        jain: Jain's index (1984) over the cameras' shares: 1 where each has its own.
        deadlines_met: of the frames whose prefill was launched, those with a result by the deadline; 0 to 1.
        cpu_ms: time of all of the process's threads for an answered frame.
    """

    model: str
    device: str
    dtype: str
    seconds: float
    deadline_ms: float | None
    offered_fps: float
    fps: float
    closed_loop_fps: float
    launch_p50_ms: float
    launch_p99_ms: float
    result_p50_ms: float
    result_p99_ms: float
    jain: float
    deadlines_met: float
    cpu_ms: float
    rows: tuple[CameraRow, ...]

    def as_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """A table for people."""
        lines = [
            f"{self.model} on {self.device} in {self.dtype}: {len(self.rows)} cameras offer {self.offered_fps:.0f} "
            f"frames/s; answered {self.fps:.1f}, {100 * self.fps / self.closed_loop_fps:.0f} % of "
            f"{self.closed_loop_fps:.1f} in a closed loop",
            f"age at launch p50 {self.launch_p50_ms:.0f} ms, p99 {self.launch_p99_ms:.0f}; at the result "
            f"{self.result_p50_ms:.0f}, {self.result_p99_ms:.0f}; Jain's index {self.jain:.4f}; deadlines met "
            f"{100 * self.deadlines_met:.1f} %; CPU {self.cpu_ms:.2f} ms a frame",
            f"{'camera':>10} {'fps':>6} {'weight':>6} {'offered':>8} {'looks':>6} {'share':>6} "
            f"{'launch p50':>11} {'p99':>6} {'result p50':>11} {'p99':>6}  dropped",
        ]
        for row in self.rows:
            ages = (row.launch_p50_ms, row.launch_p99_ms, row.result_p50_ms, row.result_p99_ms)
            a, b, c, d = ("-" if age is None else f"{age:.0f}" for age in ages)
            dropped = ", ".join(f"{cause} {n}" for cause, n in row.dropped.items())
            lines.append(
                f"{row.name:>10} {row.fps:>6.1f} {row.weight:>6g} {row.offered:>8} {row.looks:>6} {row.share:>6.2f} "
                f"{a:>11} {b:>6} {c:>11} {d:>6}  {dropped}"
            )
        return "\n".join(lines)


def time_cameras(
    model: str,
    device: str,
    streams: int,
    fps: tuple[float, float],
    *,
    dtype: str | None = None,
    seconds: float = 20.0,
    deadline_ms: float | None = 250.0,
    load: float | None = None,
    weights: Sequence[float] = (1.0,),
    objects: int | None = None,
    label: str = "person",
    size: tuple[int, int] = (640, 360),
) -> CamerasBench:
    """Let so many cameras offer frames, each with one prompt, for some seconds.

    Args:
        model: name, folder, hub id, or a shape with random weights.
        device: where it runs.
        streams: cameras, 4 or more.
        fps: rates of the slowest and of the fastest; the others lie evenly between them.
        dtype: as `Engine.load` takes it.
        seconds: how long.
        deadline_ms: by when after a frame its result is wanted; None for no limit.
        load: change the rates so that together they offer this many times what the model answers in a closed loop.
        weights: of the cameras in turn.
        objects: make every answer so long; as the model finds by default.
        label: what is asked for.
        size: of the images, in pixels.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    shown = images_of(str(DEMO_CLIP), *size)
    dice = np.random.default_rng(0)
    images = [np.roll(shown[i % len(shown)], int(dice.integers(1, size[0])), axis=1) for i in range(64)]
    large = images_of(str(DEMO_CLIP), *_LARGE)[:2]
    task = Detect(label) if objects is None else Detect(label, objects, conf=0.0)
    with open_engine(model, device, dtype=dtype) as engine:
        return run_cameras(engine, images, large, task, streams, fps, seconds, deadline_ms, load, weights)


def run_cameras(
    engine: Engine,
    images: Sequence[RgbImage],
    large: Sequence[RgbImage],
    task: Detect,
    streams: int,
    fps: tuple[float, float],
    seconds: float,
    deadline_ms: float | None,
    load: float | None,
    weights: Sequence[float],
) -> CamerasBench:
    """What `time_cameras` does with an engine, images, and those of the camera that is in 4K."""
    for image in [*images[:3], *large]:
        engine.submit(image, [task]).result()
    # With as many large ones among them as there are among the looks, if these are shared alike.
    mixed = [*(images[i % len(images)] for i in range(streams - 1)), large[0]]
    capacity = closed_loop(engine, mixed, task, max(1.0, seconds / 5))
    rates = [fps[0] + (fps[1] - fps[0]) * i / (streams - 1) for i in range(streams)]
    if load is not None:
        rates = [rate * load * capacity / sum(rates) for rate in rates]
    cameras = [_Camera(engine, i, rates[i], weights[i % len(weights)], images, task) for i in range(streams)]
    special = sorted(cameras, key=lambda one: one.row.fps)[streams // 2 - 1 :][:3]
    for camera, name in zip(special, ("freezes", "bursts", "4K"), strict=True):
        camera.row.name = name
    special[2].images = large
    used = time.process_time()
    limit_s = None if deadline_ms is None else deadline_ms / 1e3
    _run(cameras, seconds + _SETTLE_S, limit_s)
    used = time.process_time() - used
    info = engine.model
    return _summary(cameras, seconds, capacity, limit_s, used, (info.name, info.device, info.dtype))


class _Camera:
    """One camera: what it offers, and what became of that. Frames within `_SETTLE_S` of the start do not count."""

    def __init__(
        self, engine: Engine, number: int, fps: float, weight: float, images: Sequence[RgbImage], task: Detect
    ) -> None:
        self.row = CameraRow(f"{number}", fps, weight)
        self.images = images
        self.launch: list[float] = []
        self.result: list[float] = []
        self.failed_late = 0
        self.moments: set[float] = set()  # at which counted frames came
        self.answered: list[float] = []  # when the frames came that were answered
        self._engine, self._key, self._task = engine, ("camera", number), task
        self._lock = threading.Lock()
        self._open = 0
        engine.configure_stream(self._key, StreamSettings(weight=weight))

    def offer(self, number: int, due: float, limit_s: float | None, *, counts: bool) -> None:
        """Hand over a frame that came at `due`, on the clock of `time.monotonic`."""
        image = self.images[number % len(self.images)]
        left_s = None if limit_s is None else limit_s - (time.monotonic() - due)
        with self._lock:
            self._open += 1
            self.row.offered += counts
            if counts:
                self.moments.add(due)
        future = self._engine.submit(lambda: image, [self._task], deadline_s=left_s, stream=self._key)
        future.call_when_done(lambda future: self._take(future, due, counts=counts))

    @property
    def open(self) -> int:
        """Frames without an outcome."""
        return self._open

    def close(self) -> None:
        """Let the engine forget it."""
        self._engine.forget_stream(self._key)

    def _take(self, future: Future[Result], due: float, *, counts: bool) -> None:
        now, error = time.monotonic(), future.exception()
        with self._lock:
            self._open -= 1
            if not counts:
                return
            if error is None:
                timings = future.result().timings
                age = now - due
                self.result.append(age)
                self.answered.append(due)
                self.launch.append(age - (timings.prefill_ms - timings.crops_ms + timings.decode_ms) / 1e3)
                return
            cause = "failed"
            if isinstance(error, SupersededError):
                cause = "superseded"
            elif isinstance(error, DeadlineError):
                cause = "deadline"
                self.failed_late += error.begun
            self.row.dropped[cause] = self.row.dropped.get(cause, 0) + 1


def _run(cameras: Sequence[_Camera], seconds: float, limit_s: float | None) -> None:
    """Offer every frame when it is due, in this thread."""
    dice, numbers = random.Random(0), count()
    begun = time.monotonic() + 0.05
    due = [(begun + dice.random() / camera.row.fps, i) for i, camera in enumerate(cameras)]
    heapq.heapify(due)
    while due[0][0] < begun + seconds:
        at, i = heapq.heappop(due)
        camera, passed = cameras[i], at - begun
        if (wait_s := at - time.monotonic()) > 0:
            time.sleep(wait_s)
        counts = passed >= _SETTLE_S
        if camera.row.name == "bursts":  # a second's frames at once
            for _ in range(max(1, round(camera.row.fps))):
                camera.offer(next(numbers), at, limit_s, counts=counts)
            later = at + 1.0
        else:
            if not (camera.row.name == "freezes" and seconds / 3 < passed < seconds * 2 / 3):
                camera.offer(next(numbers), at, limit_s, counts=counts)
            later = at + dice.uniform(0.9, 1.1) / camera.row.fps
        heapq.heappush(due, (later, i))
    latest = time.monotonic() + _END_S
    while any(camera.open for camera in cameras):
        if time.monotonic() > latest:
            raise TimeoutError("the engine does not answer")
        time.sleep(0.01)
    for camera in cameras:
        camera.close()


def closed_loop(engine: Engine, images: Sequence[RgbImage], task: Detect, seconds: float) -> float:
    """Images answered a second while 32 streams always have one; the first fifth of the time is not counted."""
    numbers, done = count(), list[float]()
    stop = time.monotonic() + 1.2 * seconds
    open_now = threading.Semaphore(0)

    def submit() -> None:
        engine.submit(images[next(numbers) % len(images)], [task]).add_done_callback(take)

    def take(future: Future[Result]) -> None:
        future.result()
        done.append(time.monotonic())
        if done[-1] < stop:
            submit()
        else:
            open_now.release()

    for _ in range(_CLOSED_LOOP):
        submit()
    for _ in range(_CLOSED_LOOP):
        if not open_now.acquire(timeout=_END_S):
            raise TimeoutError("the engine does not answer")
    counted = [at for at in done if stop - seconds <= at < stop]
    return max(1, len(counted)) / seconds


def fair_shares(offered: Sequence[float], weights: Sequence[float], total: float) -> list[float]:
    """What each gets of a total in max-min fairness: in proportion to weights, and no more than it has offered."""
    shares, open_now, left = [0.0] * len(offered), set(range(len(offered))), total
    while open_now and left > 1e-9:
        level = left / sum(weights[i] for i in open_now)
        sated = {i for i in open_now if offered[i] - shares[i] <= level * weights[i]}
        for i in sated or open_now:
            given = offered[i] - shares[i] if sated else level * weights[i]
            shares[i] += given
            left -= given
        open_now -= sated or open_now
    return shares


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness (Jain, Chiu and Hawe 1984): 1 where all are equal, 1/n where one has everything."""
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _summary(
    cameras: Sequence[_Camera],
    seconds: float,
    capacity: float,
    limit_s: float | None,
    used_s: float,
    model: tuple[str, str, str],
) -> CamerasBench:
    for camera in cameras:
        row = camera.row
        row.looks = len(camera.result)
        if camera.result:
            row.launch_p50_ms, row.launch_p99_ms = _percentiles(camera.launch)
            row.result_p50_ms, row.result_p99_ms = _percentiles(camera.result)
    rows = [camera.row for camera in cameras]
    looks = sum(row.looks for row in rows)
    begun = min(min(camera.moments) for camera in cameras if camera.moments)
    shares = [0.0] * len(rows)
    for second in range(math.ceil(seconds) + 1):
        offered, answered = (
            [sum(second <= at - begun < second + 1 for at in times) for times in every]
            for every in ([camera.moments for camera in cameras], [camera.answered for camera in cameras])
        )
        given = fair_shares(offered, [row.weight for row in rows], sum(answered))
        shares = [one + more for one, more in zip(shares, given, strict=True)]
    for row, share in zip(rows, shares, strict=True):
        row.share = row.looks / share if share else 1.0
    launch = [age for camera in cameras for age in camera.launch]
    result = [age for camera in cameras for age in camera.result]
    met = sum(limit_s is None or age <= limit_s for age in result)
    began = looks + sum(camera.failed_late for camera in cameras)
    return CamerasBench(
        *model,
        seconds,
        None if limit_s is None else 1e3 * limit_s,
        sum(row.offered for row in rows) / seconds,
        looks / seconds,
        capacity,
        *_percentiles(launch),
        *_percentiles(result),
        jain([row.share for row in rows]),
        met / began if began else 1.0,
        1e3 * used_s / max(1, looks),
        tuple(rows),
    )


def _percentiles(ages: Sequence[float]) -> tuple[float, float]:
    if not ages:
        return float("nan"), float("nan")
    p50, p99 = np.percentile(ages, [50, 99])
    return 1e3 * float(p50), 1e3 * float(p99)

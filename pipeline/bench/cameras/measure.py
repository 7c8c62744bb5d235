"""The benchmark `saccade bench cameras`: overloads a model with simulated cameras of different frame rates.

The benchmark measures latency, dropped frames by cause, and fairness between cameras. Three cameras are special:
    one sends no frames for a third of the time
    one sends the frames of each second in one burst
    one has 4K resolution
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from saccade.engine.core.admission import StreamSettings
from saccade.engine.tasks import Detect
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.cameras.report import CameraLog, CameraRow, CamerasBench, summarize
from saccade.pipeline.bench.common import distinct_images, images_of, person_task
from saccade.pipeline.bench.load_generator import RandomWindows, dtypes_of, open_engine
from saccade.sources import RgbImage

if TYPE_CHECKING:
    from concurrent.futures import Future

    from saccade.engine import Engine, Result

_CLOSED_LOOP = 32  # number of streams of the closed loop that measures the capacity
SETTLE_S = 0.5  # warm-up that is not counted, while the scheduler learns its estimates
_END_S = 60.0
_LARGE_SIZE = (3840, 2160)
FREEZES, BURSTS, LARGE = "freezes", "bursts", "4K"
"""Names of the special cameras."""


def time_cameras(
    model: str,
    device: str,
    streams: int,
    fps: tuple[float, float],
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    seconds: float = 20.0,
    deadline_ms: float | None = 250.0,
    load: float | None = None,
    weights: Sequence[float] = (1.0,),
    objects: int | None = None,
    size: tuple[int, int] = (640, 360),
    saccades: int = 0,
) -> CamerasBench:
    """Simulate cameras that submit frames with one prompt each, and measure latency, dropped frames and fairness.

    Args:
        model: name, folder or Hugging Face Hub ID of a model, or the name of a model with random weights.
        device: device of the model.
        streams: number of cameras, at least 4.
        fps: lowest and highest frame rate. The other rates are evenly distributed between them.
        dtype: see `Engine.load`.
        kv_dtype: see `Engine.load`.
        seconds: duration of the measurement, in seconds.
        deadline_ms: maximum latency from the arrival of a frame to its result, in milliseconds; None for no limit.
        load: total frame rate as a multiple of the model's throughput; None to keep the frame rates in `fps`.
        weights: scheduling weights of the cameras, repeated if there are more cameras than weights.
        objects: fixed number of objects per answer; None lets the model decide.
        size: size of the images, in pixels.
        saccades: number of zoom windows per frame, at random positions.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    images, large, task = shown_images(size, objects)
    with open_engine(model, device, dtype=dtype, kv_dtype=kv_dtype) as engine:
        return run_cameras(engine, images, large, task, streams, fps, seconds, deadline_ms, load, weights, saccades)


def shown_images(size: tuple[int, int], objects: int | None) -> tuple[list[RgbImage], list[RgbImage], Detect]:
    """Return the images of normal cameras, the images of the 4K camera, and the detection task."""
    return distinct_images(size), images_of(str(DEMO_CLIP), *_LARGE_SIZE, count=2), person_task(objects)


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
    saccades: int = 0,
) -> CamerasBench:
    """Run the benchmark `saccade bench cameras` with a loaded engine. For most arguments, see `time_cameras`.

    `large` contains the images of the 4K camera, and `images` the images of the other cameras.
    """
    windows = RandomWindows(engine, saccades)
    for image in [*images[:3], *large]:
        engine.submit(image, [task], windows=windows.of(image)).result()
    # The share of large images equals their share of looks under fair scheduling.
    mixed = [*(images[i % len(images)] for i in range(streams - 1)), large[0]]
    capacity = closed_loop(engine, mixed, task, max(1.0, seconds / 5), windows)
    rates = [fps[0] + (fps[1] - fps[0]) * i / (streams - 1) for i in range(streams)]
    if load is not None:
        rates = [rate * load * capacity / sum(rates) for rate in rates]
    cameras = [_Camera(engine, i, rates[i], weights[i % len(weights)], images, task, windows) for i in range(streams)]
    name_special([camera.row for camera in cameras])
    next(camera for camera in cameras if camera.row.name == LARGE).images = large
    used = time.process_time()
    limit_s = None if deadline_ms is None else deadline_ms / 1e3
    _run(cameras, seconds + SETTLE_S, limit_s)
    used = time.process_time() - used
    info = engine.model
    return summarize(
        [camera.log for camera in cameras],
        seconds,
        capacity,
        limit_s,
        used,
        (info.name, info.device, dtypes_of(engine)),
    )


class _Camera:
    """A simulated camera, and the log of its frames. Frames of the warm-up (`SETTLE_S` seconds) are not logged."""

    def __init__(
        self,
        engine: Engine,
        number: int,
        fps: float,
        weight: float,
        images: Sequence[RgbImage],
        task: Detect,
        windows: RandomWindows,
    ) -> None:
        self.row = CameraRow(f"{number}", fps, weight)
        self.log = CameraLog(self.row)
        self.images = images
        self._engine, self._key, self._task, self._windows = engine, ("camera", number), task, windows
        self._lock = threading.Lock()
        self._open = 0
        engine.configure_stream(self._key, StreamSettings(weight=weight))

    def offer(self, number: int, due: float, limit_s: float | None, *, counts: bool) -> None:
        """Submit a frame of the simulated camera to the engine.

        Args:
            number: index of the frame, which selects the image.
            due: scheduled arrival time of the frame, by `time.monotonic()`, in seconds.
            limit_s: maximum latency of the result, in seconds; None for no limit.
            counts: False during the warm-up, so that the frame is not counted.
        """
        image = self.images[number % len(self.images)]
        left_s = None if limit_s is None else limit_s - (time.monotonic() - due)
        with self._lock:
            self._open += 1
            self.row.offered += counts
            if counts:
                self.log.moments.add(due)
        windows = self._windows.of(image)
        future = self._engine.submit(lambda: image, [self._task], deadline_s=left_s, stream=self._key, windows=windows)
        future.call_when_done(lambda future: self._take(future, due, counts=counts))

    @property
    def open(self) -> int:
        """The number of submitted frames without a result (in flight)."""
        return self._open

    def close(self) -> None:
        """Remove the stream of the camera from the engine."""
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
                self.log.result.append(age)
                self.log.answered.append(due)
                self.log.launch.append(age - (timings.prefill_ms - timings.crops_ms + timings.decode_ms) / 1e3)
            else:
                self.log.lost(error)


def name_special(rows: Sequence[CameraRow]) -> None:
    """Assign the special roles (freezes, bursts, 4K resolution) to three cameras with medium frame rates."""
    special = sorted(rows, key=lambda row: row.fps)[len(rows) // 2 - 1 :][:3]
    for row, name in zip(special, (FREEZES, BURSTS, LARGE), strict=True):
        row.name = name


def arrivals(rows: Sequence[CameraRow], seconds: float) -> Iterator[tuple[float, int]]:
    """Yield the arrival time (in seconds) and the camera index of each simulated frame, in order of time.

    The arrival times are random, but the same in each run.
    """
    dice = random.Random(0)
    due = [(dice.random() / row.fps, i) for i, row in enumerate(rows)]
    heapq.heapify(due)
    while due[0][0] < seconds:
        at, i = heapq.heappop(due)
        row = rows[i]
        if row.name == BURSTS:  # all frames of a second at once
            yield from [(at, i)] * max(1, round(row.fps))
            later = at + 1.0
        else:
            if not (row.name == FREEZES and seconds / 3 < at < seconds * 2 / 3):
                yield at, i
            later = at + dice.uniform(0.9, 1.1) / row.fps
        heapq.heappush(due, (later, i))


def _run(cameras: Sequence[_Camera], seconds: float, limit_s: float | None) -> None:
    begun = time.monotonic() + 0.05
    for number, (at, i) in enumerate(arrivals([camera.row for camera in cameras], seconds)):
        if (wait_s := begun + at - time.monotonic()) > 0:
            time.sleep(wait_s)
        cameras[i].offer(number, begun + at, limit_s, counts=at >= SETTLE_S)
    latest = time.monotonic() + _END_S
    while any(camera.open for camera in cameras):
        if time.monotonic() > latest:
            raise TimeoutError(f"the engine did not finish all images within {_END_S:g} s")
        time.sleep(0.01)
    for camera in cameras:
        camera.close()


def closed_loop(
    engine: Engine, images: Sequence[RgbImage], task: Detect, seconds: float, windows: RandomWindows
) -> float:
    """Measure the throughput under closed-loop load (32 streams with one frame in flight each), in images per second.

    Raises:
        TimeoutError: if the engine does not finish all images.
    """
    numbers, done = count(), list[float]()
    stop = time.monotonic() + 1.2 * seconds
    open_now = threading.Semaphore(0)

    def submit() -> None:
        image = images[next(numbers) % len(images)]
        engine.submit(image, [task], windows=windows.of(image)).add_done_callback(take)

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
            raise TimeoutError(f"the engine did not finish all images within {_END_S:g} s")
    counted = [at for at in done if stop - seconds <= at < stop]
    return max(1, len(counted)) / seconds

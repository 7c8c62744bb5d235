"""The benchmark `saccade bench throughput`: measures images per second and CPU time with many concurrent streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saccade.pipeline.bench.common import Measurement, distinct_images, person_task
from saccade.pipeline.bench.load_generator import ClosedLoop, RandomWindows, dtypes_of, open_engine


@dataclass(slots=True, frozen=True)
class ThroughputRow:
    """The throughput and latency at a given number of streams.

    Attributes:
        streams: number of streams. Each stream has one image in flight.
        fps: answered images per second, in total for all streams.
        median_ms, p99_ms: median and 99th percentile of the time from the submission of an image to its answer, in
            milliseconds.
        cpu_ms: CPU time of the process per image, in milliseconds.
    """

    streams: int
    fps: float
    median_ms: float
    p99_ms: float
    cpu_ms: float


@dataclass(slots=True, frozen=True)
class ThroughputBench(Measurement):
    """The results of the benchmark `saccade bench throughput`.

    `saccades` is the number of zoom windows per image. `boxes` is the mean number of boxes per image.
    """

    model: str
    device: str
    dtype: str
    width: int
    height: int
    boxes: float
    saccades: int
    rows: tuple[ThroughputRow, ...]

    def as_text(self) -> str:
        """Return the results of the throughput benchmark as a table."""
        lines = [
            f"{self.model} on {self.device} in {self.dtype}, {self.width}x{self.height}, "
            f"{self.boxes:.1f} boxes and {self.saccades} windows an image",
            f"{'streams':>8} {'images/s':>11} {'median ms':>10} {'p99 ms':>8} {'CPU ms each':>12}",
        ]
        lines += [
            f"{row.streams:>8} {row.fps:>11.1f} {row.median_ms:>10.1f} {row.p99_ms:>8.1f} {row.cpu_ms:>12.2f}"
            for row in self.rows
        ]
        return "\n".join(lines)


def time_throughput(
    model: str,
    device: str,
    counts: Sequence[int],
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    objects: int | None = None,
    size: tuple[int, int] = (640, 360),
    seconds: float = 5.0,
    saccades: int = 0,
) -> ThroughputBench:
    """Measure the throughput of concurrent streams. Each stream submits one image after another, with one prompt.

    Args:
        model: name, folder or Hugging Face Hub ID of a model, or the name of a model with random weights.
        device: device of the model.
        counts: numbers of streams to measure.
        dtype: see `Engine.load`.
        kv_dtype: see `Engine.load`.
        objects: fixed number of objects per answer; None lets the model decide.
        size: size of the images, in pixels.
        seconds: duration of each measurement, in seconds.
        saccades: number of zoom windows per image, at random positions.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    images, task = distinct_images(size), person_task(objects)
    rows, boxes = [], 0.0
    with open_engine(model, device, dtype=dtype, kv_dtype=kv_dtype) as engine:
        for image in images[:3]:
            engine.submit(image, [task]).result()
        for streams in counts:
            begun, used = time.perf_counter(), time.process_time()
            loop = ClosedLoop(engine, [(image, task) for image in images], RandomWindows(engine, saccades))
            waits, found = _answer(loop, streams, begun + seconds)
            passed, used = time.perf_counter() - begun, time.process_time() - used
            boxes = objects or float(np.mean(found))
            p50, p99 = np.percentile(waits, [50, 99])
            rows.append(ThroughputRow(streams, len(waits) / passed, float(p50), float(p99), 1e3 * used / len(waits)))
        return ThroughputBench(
            engine.model.name, engine.model.device, dtypes_of(engine), *size, boxes, saccades, tuple(rows)
        )


def _answer(loop: ClosedLoop, streams: int, stop: float) -> tuple[list[float], list[int]]:
    """Submit requests in a closed loop until the time `stop`, and wait for all answers.

    Return the latency (in milliseconds) and the number of objects of each answer.
    """
    waits: list[float] = []
    found: list[int] = []
    for _ in range(streams):
        loop.submit()
    while loop.n_open:
        took, result = loop.take()
        waits.append(1e3 * took)
        found.append(len(result.detections))
        if time.perf_counter() < stop:
            loop.submit()
    return waits, found

"""Compares Saccade's scheduling with a single FIFO queue, while simulated cameras overload the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_rounds
from saccade.engine import Detect, Engine
from saccade.engine.errors import EngineError
from saccade.engine.results import ResultFuture
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import images_of
from saccade.pipeline.bench.load_generator import open_engine

_LIMIT_MS = 500.0
_NOTE = (
    "The same engine and frames on both sides. Saccade keeps the newest frame of each camera and takes the cameras in "
    "turn. The queue keeps the newest 64 frames of all cameras together, oldest first. The load is twice the measured "
    "capacity, and the cameras' rates differ by a factor of 8."
)
_QUEUE = 64


@dataclass
class _Seen:
    ages: list[float] = field(default_factory=list)
    cameras: list[int] = field(default_factory=list)


def compare(model: str, device: str, cameras: int, rounds: int, seconds: float) -> Comparison:
    """Compare Saccade's scheduling with a single FIFO queue. Each measurement takes `seconds` seconds.

    Raises:
        EngineError: if the model cannot be loaded.
    """
    images = images_of(str(DEMO_CLIP), 640, 360)
    with open_engine(model, device) as engine:
        for image in images:
            engine.submit(image, [Detect("person")]).result()
        begun = time.perf_counter()
        waiting = [engine.submit(image, [Detect("person")]) for image in images]
        for one in waiting:
            one.result()
        capacity = len(images) / (time.perf_counter() - begun)
        rates = np.linspace(1, 8, cameras)
        rates = rates * 2 * capacity / rates.sum()
        info = engine.model

        def run(*, streams: bool) -> Measured:
            return _offer(engine, images, rates, seconds, streams=streams)

        title = f"{cameras} simulated cameras at twice the capacity, {info.name} on {info.device}"
        units = {
            "answered": "frames/s",
            "age of an answer, median": "ms",
            "age of an answer, p95": "ms",
            f"answers within {_LIMIT_MS:g} ms": "%",
            "fairness": "Jain's index of answers per camera, 1 is equal",
        }
        made = begin("one-queue", title, _NOTE, units, ())
        return in_rounds(made, {OURS: lambda: run(streams=True), "one queue": lambda: run(streams=False)}, rounds)


def _offer(engine: Engine, images: list, rates: np.ndarray, seconds: float, *, streams: bool) -> Measured:  # type: ignore[type-arg]
    """Submit each frame at its simulated capture time, and measure the latencies of the results."""
    arrivals = sorted(
        (n / rate + 0.37 * i / rate, i) for i, rate in enumerate(rates) for n in range(int(seconds * rate))
    )
    seen, pending = _Seen(), list[ResultFuture]()
    lock, used = threading.Lock(), time.monotonic()

    def note(future: ResultFuture, camera: int, offered: float) -> None:
        if future.cancelled() or future.exception() is not None:
            return  # superseded or thrown out
        with lock:
            seen.ages.append(1000 * (time.monotonic() - offered))
            seen.cameras.append(camera)

    for at, camera in arrivals:
        time.sleep(max(0.0, used + at - time.monotonic()))
        offered = time.monotonic()
        key: Hashable = f"camera-{camera}" if streams else None
        future = engine.submit(images[(camera + len(pending)) % len(images)], [Detect("person")], stream=key)
        future.add_done_callback(lambda done, camera=camera, offered=offered: note(done, camera, offered))  # type: ignore[misc]
        pending.append(future)
        if not streams:
            pending = [one for one in pending if not one.done()]
            while len(pending) > _QUEUE:
                pending.pop(0).cancel()
    for future in pending:
        try:
            future.result()
        except EngineError:
            continue
        except BaseException as error:  # cancelled
            if not future.cancelled():
                raise error
    took = time.monotonic() - used
    counts = np.bincount(seen.cameras, minlength=len(rates))
    ages = np.array(seen.ages or [np.nan])
    return {
        "answered": len(seen.ages) / took,
        "age of an answer, median": float(np.median(ages)),
        "age of an answer, p95": float(np.percentile(ages, 95)),
        f"answers within {_LIMIT_MS:g} ms": 100 * float((ages <= _LIMIT_MS).mean()),
        "fairness": float(counts.sum() ** 2 / (len(counts) * (counts**2).sum())),
    }

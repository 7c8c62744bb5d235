"""The benchmark `saccade bench frame`: measures the end-to-end latency from one image to its boxes."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from saccade.engine.tasks import Detect
from saccade.pipeline.bench.common import Measurement, images_of
from saccade.pipeline.config import RunConfig
from saccade.pipeline.runtime.tasks import tasks_for

WARM_UP = 20  # CPU replay is recorded by then, see `engine.cpu.replay`


@dataclass(slots=True, frozen=True)
class FrameBench(Measurement):
    """The measured latency of single images, in milliseconds.

    Attributes:
        model, device, dtype: name of the model, device and data type.
        width, height: size of the images, in pixels.
        frames: number of measured images.
        median_ms, p99_ms: median and 99th percentile of the time from the submission of an image to its boxes.
        prefill_ms, decode_ms: median times of the prefill and of decoding, as reported by the engine.
        boxes: mean number of boxes per image, or the fixed number of objects.
    """

    model: str
    device: str
    dtype: str
    width: int
    height: int
    frames: int
    median_ms: float
    p99_ms: float
    prefill_ms: float
    decode_ms: float
    boxes: float

    def as_text(self) -> str:
        """Return the results of the latency benchmark as two lines of text."""
        return (
            f"{self.model} on {self.device} in {self.dtype}, {self.width}x{self.height}, {self.frames} images, "
            f"{self.boxes:.1f} boxes each\n"
            f"median {self.median_ms:.1f} ms, p99 {self.p99_ms:.1f} ms; "
            f"prefill {self.prefill_ms:.1f}, decode {self.decode_ms:.1f}"
        )


def time_frames(config: RunConfig, width: int, height: int, frames: int, objects: int | None = None) -> FrameBench:
    """Measure the latency of single images from a video source.

    Args:
        config: model, source and prompts.
        width: width to which the images are scaled, in pixels.
        height: height to which the images are scaled, in pixels.
        frames: number of measured images.
        objects: fixed number of objects per answer; None lets the model decide.

    Raises:
        SourceError, EngineError: if the source or the model cannot be used.
    """
    images = images_of(config.source, width, height)
    from saccade.pipeline.bench.load_generator import dtypes_of, open_engine

    with open_engine(
        config.model, config.device, dtype=config.dtype, kv_dtype=config.kv_dtype, imgsz=config.imgsz
    ) as engine:
        tasks = tasks_for(engine, config)
        if objects is not None:
            tasks = [replace(task, max_objects=objects, conf=0.0) for task in tasks if isinstance(task, Detect)]
        for image in islice(cycle(images), WARM_UP):
            engine.submit(image, tasks, config.tiles).result()
        total, prefill, decode, boxes = [], [], [], 0
        for image in islice(cycle(images), frames):
            begun = time.perf_counter()
            result = engine.submit(image, tasks, config.tiles).result()
            total.append(1000 * (time.perf_counter() - begun))
            prefill.append(result.timings.prefill_ms)
            decode.append(result.timings.decode_ms)
            boxes += len(result.detections)
        return FrameBench(
            model=engine.model.name,
            device=engine.model.device,
            dtype=dtypes_of(engine),
            width=width,
            height=height,
            frames=frames,
            median_ms=statistics.median(total),
            p99_ms=float(np.percentile(total, 99)),
            prefill_ms=statistics.median(prefill),
            decode_ms=statistics.median(decode),
            boxes=objects or boxes / frames,
        )

"""`saccade bench pipeline`: what a picture costs besides the model, from the decoder to its record on a WebSocket.

The demo clip is played at the pace of a camera, through a real run on the real model, to a real client in this process.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from pipeline.bench import DEMO_CLIP
from pipeline.config import ConfigError, RunConfig
from pipeline.run import Output
from pipeline.setup import load_engine, tasks_for
from pipeline.streams import Streams
from sinks.websocket import WebSocketSink
from sources import Frame, SourceInfo, open_source

_WARM_UP = 10  # pictures: the first ones find cold caches, and a client that is only just there
_LONG_S = 30.0


@dataclass(slots=True, frozen=True)
class PipelineBench:
    """Times in milliseconds, from the decoder to the client, the model's own work taken off.

    Attributes:
        model, device: what ran, and where.
        fps: the pace.
        frames: how many records came.
        median_ms, p99_ms: of everything but the model.
        before_ms, after_ms: medians up to the model's work and from its result on.
        model_ms: median of what was taken off.
    """

    model: str
    device: str
    fps: float
    frames: int
    median_ms: float
    p99_ms: float
    before_ms: float
    after_ms: float
    model_ms: float

    def as_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """Two lines for people."""
        return (
            f"{self.model} on {self.device}, {self.frames} records at {self.fps:g} fps\n"
            f"from the decoder to the socket, less the model's {self.model_ms:.1f} ms: median {self.median_ms:.2f} ms, "
            f"p99 {self.p99_ms:.2f}; before the model {self.before_ms:.2f}, after it {self.after_ms:.2f}"
        )


class _Camera:
    """The demo clip as a camera: again and again, at its own pace, each picture decoded when it is due."""

    corrupt_packets = 0

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._closed = threading.Event()
        with open_source(DEMO_CLIP) as clip:
            self.info: SourceInfo = replace(clip.info, live=True, frames=None)
        self.name = "bench"
        self.decoded_at: dict[int, float] = {}

    def __iter__(self) -> Iterator[Frame]:
        begun, number = time.monotonic(), 0
        while not self._closed.is_set():
            with open_source(DEMO_CLIP) as clip:
                frames = iter(clip)
                while not self._closed.wait(max(0.0, begun + number / self._fps - time.monotonic())):
                    frame = next(frames, None)
                    if frame is None:
                        break
                    self.decoded_at[number] = frame.decoded_at
                    yield replace(frame, index=number, capture_clock="arrival")
                    number += 1

    def close(self) -> None:
        self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def time_pipeline(config: RunConfig, *, fps: float, seconds: float) -> PipelineBench:
    """Play for `seconds` at `fps` and measure.

    Raises:
        EngineError: if the model cannot be used.
        ConfigError: if too few records came to say anything: the model is too slow for the pace.
    """
    camera = _Camera(fps)
    came: list[tuple[float, dict[str, Any]]] = []
    with load_engine(config) as engine:
        tasks = tasks_for(engine, config)
        sink = WebSocketSink("ws://127.0.0.1:0")
        with Streams(engine, [Output(sink)]) as streams, connect(sink.url) as client:

            def listen() -> None:
                try:
                    while True:
                        text = client.recv()
                        came.append((time.monotonic(), json.loads(text)))
                except ConnectionClosed:
                    return

            listener = threading.Thread(target=listen, name="bench-client", daemon=True)
            listener.start()
            run = streams.add("bench", camera, tasks)
            run.join(seconds + _WARM_UP / fps)
            streams.close()
            listener.join(_LONG_S)
            if run.error:
                raise run.error
        model, device = engine.model.name, engine.model.device
    return _figures(model, device, fps, came, camera.decoded_at)


def _figures(
    model: str, device: str, fps: float, came: list[tuple[float, dict[str, Any]]], decoded_at: dict[int, float]
) -> PipelineBench:
    before, after, models = [], [], []
    for received_at, record in [one for one in came if "frame" in one[1]][_WARM_UP:]:
        latency = record["latency_ms"]
        model_ms = latency["prefill"] + latency["decode_tokens"]
        models.append(model_ms)
        before.append(latency["queue"])
        after.append(1000 * (received_at - decoded_at[record["frame"]]) - model_ms - latency["queue"])
    if not models:
        raise ConfigError(f"no picture came through at {fps:g} fps: give a lower --fps or more --seconds")
    both = [sum(parts) for parts in zip(before, after, strict=True)]
    return PipelineBench(
        model=model,
        device=str(device),
        fps=fps,
        frames=len(both),
        median_ms=statistics.median(both),
        p99_ms=float(np.percentile(both, 99)),
        before_ms=statistics.median(before),
        after_ms=statistics.median(after),
        model_ms=statistics.median(models),
    )

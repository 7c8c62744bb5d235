"""`python -m benchmarks pipeline`: measures the latency from a decoded frame to its WebSocket message.

The inference time of the model is subtracted. The demo clip is played in real time. The WebSocket client runs in this
process.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from saccade.engine import ModelInfo
from saccade.engine.results import Result
from saccade.pipeline.bench.common import Measurement
from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.stream import load_engine
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.runtime.tasks import tasks_for
from saccade.sinks import CallbackSink, Latency
from saccade.sinks.websocket.server import WebSocketSink
from saccade.sources import Frame, open_source
from saccade.sources.replay import ReplaySource

_WARM_UP = 10  # frames: the first ones find cold caches, and a client that is only just there
_LONG_S = 30.0


@dataclass(slots=True, frozen=True)
class PipelineBench(Measurement):
    """Latencies from a decoded frame to its WebSocket message in milliseconds, without the inference time of the model.

    Attributes:
        model, device, dtype: the model, its device and its dtype.
        fps: frames per second that are processed.
        frames: number of frames whose message was received.
        median_ms, p99_ms: median and 99th percentile of the latency.
        before_ms: median time from the decoded frame to the start of inference.
        after_ms: median time from the result to the client.
        model_ms: median inference time of the model.
    """

    model: str
    device: str
    dtype: str
    fps: float
    frames: int
    median_ms: float
    p99_ms: float
    before_ms: float
    after_ms: float
    model_ms: float

    def as_text(self) -> str:
        """Return the pipeline latencies as text for the terminal."""
        return (
            f"{self.model} on {self.device} in {self.dtype}, {self.frames} records at {self.fps:g} fps\n"
            f"from the decoder to the socket, less the model's {self.model_ms:.1f} ms: median {self.median_ms:.2f} ms, "
            f"p99 {self.p99_ms:.2f}; before the model {self.before_ms:.2f}, after it {self.after_ms:.2f}"
        )


def time_pipeline(config: RunConfig, *, seconds: float) -> PipelineBench:
    """Play the configured video file in real time for `seconds`, and measure the latencies of the pipeline.

    Raises:
        SourceError: if the file cannot be read.
        EngineError: if the model cannot be loaded.
        ConfigError: if too few results arrived because the model is too slow.
    """
    came: list[tuple[float, dict[str, Any]]] = []
    decoded_at: dict[int, float] = {}

    def note(frame: Frame, result: Result, latency: Latency) -> None:
        decoded_at[frame.index] = frame.decoded_at

    source = ReplaySource(open_source(config.source, vid_stride=config.vid_stride))
    fps = float(source.info.average_rate or 0) / config.vid_stride
    with load_engine(config) as engine:
        sink = WebSocketSink("ws://127.0.0.1:0")
        with Streams(engine, [Output(CallbackSink(note)), Output(sink)]) as streams, connect(sink.url) as client:

            def listen() -> None:
                with suppress(ConnectionClosed):
                    while True:
                        text = client.recv()
                        came.append((time.monotonic(), json.loads(text)))

            listener = threading.Thread(target=listen, name="bench-client", daemon=True)
            listener.start()
            run = streams.add("bench", source, tasks_for(engine, config))
            run.join(seconds)
            streams.close()
            listener.join(_LONG_S)
            if run.error:
                raise run.error
        return _figures(engine.model, fps, came, decoded_at)


def _figures(
    model: ModelInfo, fps: float, came: list[tuple[float, dict[str, Any]]], decoded_at: dict[int, float]
) -> PipelineBench:
    before, after, models = [], [], []
    for received_at, record in [one for one in came if "frame" in one[1]][_WARM_UP:]:
        latency = record["latency_ms"]
        model_ms = latency["prefill"] + latency["decode_tokens"]
        models.append(model_ms)
        before.append(latency["queue"])
        after.append(1000 * (received_at - decoded_at[record["frame"]]) - model_ms - latency["queue"])
    if not models:
        raise ConfigError(f"too few frames were processed at {fps:g} fps; increase --seconds, or set --vid-stride 2")
    both = [sum(parts) for parts in zip(before, after, strict=True)]
    return PipelineBench(
        model=model.name,
        device=model.device,
        dtype=model.dtype,
        fps=fps,
        frames=len(both),
        median_ms=statistics.median(both),
        p99_ms=float(np.percentile(both, 99)),
        before_ms=statistics.median(before),
        after_ms=statistics.median(after),
        model_ms=statistics.median(models),
    )

"""`python -m benchmarks events`: measures the time from the capture of a frame until a client learns of a new event.

The image is divided into zones, so that every moving object starts many events. A WebSocket client in this process
receives the events. Events, clips and snapshots are stored.
"""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from saccade.pipeline.bench.common import Measurement
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError, RunFailed
from saccade.pipeline.run import opened_run

_COLUMNS, _ROWS = 16, 4  # of zones
_PARTS = ("decode", "queue", "prefill", "decode_tokens", "track")
_LONG_S = 60.0


@dataclass(slots=True, frozen=True)
class BeginBench(Measurement):
    """Event latencies in milliseconds.

    Attributes:
        source: address of the source, without credentials.
        clock: origin of the capture times: 'rtcp' (sender's clock) or 'arrival' (time of reception).
        frames, fps: number of processed frames, and processed frames per second.
        events: number of started events.
        p50_ms, p95_ms, max_ms: median, 95th percentile and maximum of the event latency: the time from the capture of
            an event's first frame until the client is notified.
        parts: median time of each stage: `decode`, `queue`, `prefill`, `decode_tokens`, `track` (tracks and rules), and
            `rest` (transfer from the camera and delivery to the client).
        frame_p50_ms, frame_p95_ms: median and 95th percentile of the time from the capture of any frame until the
            client receives the frame's result.
    """

    source: str
    clock: str
    frames: int
    fps: float
    events: int
    p50_ms: float
    p95_ms: float
    max_ms: float
    parts: dict[str, float]
    frame_p50_ms: float
    frame_p95_ms: float

    def as_text(self) -> str:
        """Return the event latencies as text for the terminal."""
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in self.parts.items())
        return (
            f"{self.source}, {self.frames} frames at {self.fps:.1f} fps, clock {self.clock}\n"
            f"{self.events} events began: median {self.p50_ms:.0f} ms after their frame, p95 {self.p95_ms:.0f}, "
            f"max {self.max_ms:.0f}; records of all frames {self.frame_p50_ms:.0f} and {self.frame_p95_ms:.0f}\n"
            f"median parts: {parts}"
        )


def time_events(given: dict[str, Any], *, seconds: float) -> BeginBench:
    """Process a live source for `seconds` after its first result, and measure the latency of its events.

    Args:
        given: settings with `source` and `detect`.
        seconds: duration in seconds.

    Raises:
        SourceError: if the source cannot be opened or read.
        EngineError: if the model cannot be loaded.
        ConfigError: if the source is not live, or if no event started.
        RunFailed: if the pipeline failed.
    """
    label = given["detect"][0] if isinstance(given["detect"], list) else given["detect"]
    came: list[tuple[float, dict[str, Any]]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="saccade-bench-"))
        port = _free_port()
        settings = {"sinks": [f"ws://127.0.0.1:{port}"], "store": folder, "name": "bench"}
        config = load(None, {**given, **settings, "zones": _zones(), "rules": _rules(label)})
        opened = stack.enter_context(opened_run(config))
        client = stack.enter_context(connect(f"ws://127.0.0.1:{port}", max_size=None))
        (run,) = opened.controller.start()
        if not run.source.info.live:
            raise ConfigError(
                f"{run.source.info.url} is not a live source; use a camera, because files have no capture timestamps"
            )
        watching = threading.Thread(target=_listen, args=(client, came), name="bench client", daemon=True)
        watching.start()
        deadline = time.monotonic() + _LONG_S
        while not came and not run.ended and time.monotonic() < deadline:
            time.sleep(0.05)
        run.join(seconds)
        run.stop()
        if not run.join(_LONG_S) or run.error:
            raise RunFailed from run.error
        address = run.source.info.url
    return _figures(address, came)


def _listen(client: Any, came: list[tuple[float, dict[str, Any]]]) -> None:
    with suppress(ConnectionClosed):
        while True:
            text = client.recv()
            came.append((time.time(), json.loads(text)))


def _figures(address: str, came: list[tuple[float, dict[str, Any]]]) -> BeginBench:
    clock = next((m["capture_clock"] for _, m in reversed(came) if "frame" in m), "")  # known a moment after the start
    results = [(at, message) for at, message in came if "frame" in message and message["capture_clock"] == clock]
    frames = {message["captured_at"]: message for _, message in results}
    frame_ages = [1e3 * (at - message["captured_at"]) for at, message in results]
    begun = [
        (at, message["event"])
        for at, message in came
        if message.get("event", {}).get("type") == "begin" and message["event"]["start_time"] in frames
    ]
    if not begun:
        raise ConfigError(
            f"no event started in {len(frames)} frames, because no object moved; use a source with moving objects"
        )
    ages = [1e3 * (at - event["start_time"]) for at, event in begun]
    rows = []
    for age, (_, event) in zip(ages, begun, strict=True):
        known = [frames[event["start_time"]]["latency_ms"][part] for part in _PARTS]
        rows.append([*known, age - sum(known)])
    medians = np.median(np.array(rows), axis=0).tolist()
    return BeginBench(
        source=address,
        clock=clock,
        frames=len(results),
        fps=(len(results) - 1) / (results[-1][0] - results[0][0]) if len(results) > 1 else 0.0,
        events=len(begun),
        p50_ms=float(np.percentile(ages, 50)),
        p95_ms=float(np.percentile(ages, 95)),
        max_ms=max(ages),
        parts=dict(zip((*_PARTS, "rest"), medians, strict=True)),
        frame_p50_ms=float(np.percentile(frame_ages, 50)),
        frame_p95_ms=float(np.percentile(frame_ages, 95)),
    )


def _zones() -> dict[str, dict[str, object]]:
    """Return the settings of a grid of zones that covers the image."""
    zones: dict[str, dict[str, object]] = {}
    for row in range(_ROWS):
        for column in range(_COLUMNS):
            left, right = column / _COLUMNS, (column + 1) / _COLUMNS
            top, bottom = row / _ROWS, (row + 1) / _ROWS
            polygon = [left, top, right, top, right, bottom, left, bottom]
            zones[f"z{row}-{column}"] = {"polygon": polygon, "anchor": "center", "inertia": 0}
    return zones


def _rules(label: str) -> list[str]:
    return [f'r{row}-{column}="{label}" in z{row}-{column}' for row in range(_ROWS) for column in range(_COLUMNS)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])

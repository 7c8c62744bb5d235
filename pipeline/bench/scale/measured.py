"""What 1, 2, 4 workers of this machine carry: cameras that play a clip at its own pace, and a killed worker."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from saccade.pipeline.core.config import ListedStream, RunConfig
from saccade.pipeline.core.errors import RunFailed
from saccade.pipeline.workers.front.front import Front, opened_front

_LONG_S = 300.0  # for workers to start: a large model, on a slow machine
_POLL_S = 0.05


@dataclass(slots=True, frozen=True)
class Row:
    """What so many workers did.

    Attributes:
        workers: how many.
        frames_per_s: results of all streams together.
        dropped: share of the frames that was dropped, from 0 to 1.
        p50_ms, p99_ms: the median of the streams' latencies, and the worst of their 99th percentiles.
        cameras_each: how many cameras of the clip's rate a worker would keep up with, by its frames a second.
        start_s: from the command to the first result of every stream.
        ready_s: from the end of a worker killed by SIGKILL until the next takes streams.
        back_s: until every stream has results again.
        rss_mib: resident memory of the workers together.
    """

    workers: int
    frames_per_s: float
    dropped: float
    p50_ms: float
    p99_ms: float
    cameras_each: float
    start_s: float
    ready_s: float
    back_s: float
    rss_mib: float


@dataclass(slots=True, frozen=True)
class ScaleTimes:
    """What `time_scale` measured.

    Attributes:
        cameras: how many streams there were.
        fps: frames a second of each.
        rows: one for each number of workers.
    """

    cameras: int
    fps: float
    rows: list[Row]

    def as_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """A table."""
        head = "workers  frames/s  dropped   p50 ms   p99 ms  cameras each  start s  killed: ready s  all back s   MiB"
        lines = [f"{self.cameras} cameras at {self.fps:g} fps, on {os.cpu_count()} processors", head]
        for row in self.rows:
            times = f"{row.start_s:7.1f}  {row.ready_s:15.2f}  {row.back_s:10.2f}  {row.rss_mib:4.0f}"
            speed = f"{row.frames_per_s:8.1f}  {100 * row.dropped:6.1f} %  {row.p50_ms:6.0f}   {row.p99_ms:6.0f}"
            lines.append(f"{row.workers:7}  {speed}  {row.cameras_each:12.1f}  {times}")
        return "\n".join(lines)


def time_scale(settings: RunConfig, counts: list[int], *, cameras: int, seconds: float) -> ScaleTimes:
    """Run cameras on so many workers each time, then kill one of these.

    Args:
        settings: the source, which is a file and is played over and over, what to find in it, the model and device.
        counts: numbers of workers, one row each.
        cameras: how many streams.
        seconds: how long to measure each.

    Raises:
        ConfigError, EngineError, SourceError: if something it names cannot be used.
        RunFailed: if streams do not come up within some minutes.
    """
    from saccade.pipeline.core.build import open_stream  # brings FFmpeg

    stream = settings.each()[0]
    with open_stream(stream) as opened:
        rate = opened.source.info.average_rate
    fps = float(rate or 25) / stream.vid_stride
    rows = [_time(settings, stream, count, fps, cameras, seconds) for count in counts]
    return ScaleTimes(cameras, fps, rows)


def _time(settings: RunConfig, stream: ListedStream, workers: int, fps: float, cameras: int, seconds: float) -> Row:
    begun = time.monotonic()
    values = settings.model_copy(update={"workers": workers, "source": "", "streams": [], "http": "127.0.0.1:0"})
    with opened_front(values) as front:
        front.start()
        config = stream.model_dump(mode="json", exclude_unset=True)
        opening = [front.supervisor.open(config, f"camera{number}", repeat=True) for number in range(cameras)]
        for one in opening:
            while not one.done():
                front.check()
                time.sleep(_POLL_S)
            one.result()
        _wait(lambda: all(one["frames_out"] for one in _streams(front)), "streams have no results")
        start_s = time.monotonic() - begun
        before, since = _streams(front), time.monotonic()
        time.sleep(seconds)
        after, took_s = _streams(front), time.monotonic() - since
        seats = front.supervisor.seats()
        rss = sum(seat.report.rss_bytes for seat in seats if seat.report)
        ready_s, back_s = _kill_one(front)
    done = sum(one["frames_out"] for one in after) - sum(one["frames_out"] for one in before)
    lost = sum(sum(one["dropped"].values()) for one in after) - sum(sum(one["dropped"].values()) for one in before)
    return Row(
        workers=workers,
        frames_per_s=done / took_s,
        dropped=lost / (done + lost) if done + lost else 0.0,
        p50_ms=median(one["latency_ms"]["p50"] for one in after),
        p99_ms=max(one["latency_ms"]["p99"] for one in after),
        cameras_each=done / took_s / workers / fps,
        start_s=start_s,
        ready_s=ready_s,
        back_s=back_s,
        rss_mib=rss / (1 << 20),
    )


def _kill_one(front: Front) -> tuple[float, float]:
    """Kill the first worker; seconds until it is ready again, and until all streams have results."""
    seat = front.supervisor.seats()[0]
    assert seat.pid is not None
    killed, starts = time.monotonic(), seat.starts
    os.kill(seat.pid, signal.SIGKILL)
    _wait(lambda: seat.starts > starts and seat.ready, "the worker does not come back")
    ready_s = time.monotonic() - killed
    _wait(lambda: all(one["worker"] and one["frames_out"] for one in _streams(front)), "streams do not come back")
    return ready_s, time.monotonic() - killed


def _streams(front: Front) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{front.url}/streams", timeout=_LONG_S) as answer:
        listed: list[dict[str, Any]] = json.loads(answer.read())["streams"]
    return listed


def _wait(until: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LONG_S
    while not until():
        if time.monotonic() > deadline:
            raise RunFailed(f"{what} after {_LONG_S:g} s")
        time.sleep(_POLL_S)

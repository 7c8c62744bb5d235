"""What 1, 2, 4 workers of this machine carry: cameras that play a clip at its own pace, and a killed worker."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.errors import RunFailed
from saccade.pipeline.workers.front.front import Front, opened_front
from saccade.processors import usable_processors

_LONG_S = 300.0  # for workers to start: a large model, on a slow machine
_FIRST_S = 60.0  # for results of every stream, at first and after a worker was killed
_IN_TIME_S = 0.1
_DROPPED = ("full", "deadline", "failed")  # causes of drops for which the workers are to blame
_SETTLE_S = 2.0  # after which what waited for the first results is through
_POLL_S = 0.05


@dataclass(slots=True, frozen=True)
class Row:
    """What so many workers did.

    Attributes:
        workers: how many.
        offered_per_s: frames of all streams together that the model was to process: those that their sources have
            really handed over, but no more of each than `max_fps`.
        frames_per_s: results of all streams together.
        dropped: share of the frames offered that was dropped, from 0 to 1.
        in_time: share of the frames offered whose result came within 100 ms, decoding included, from 0 to 1.
        silent: streams without a result.
        p50_ms, p99_ms: of the latencies of all streams together, decoding included, as exact as the metrics' buckets
            let them be; None without results.
        cameras_each: how many such cameras a worker would keep up with, by its frames a second.
        cores: processors that the workers keep busy.
        decoders: how many streams are decoded by what, such as {"h264 (cuda)": 64}.
        start_s: from the command to the first result of every stream; None if some have none after a minute.
        ready_s: from the end of a worker killed by SIGKILL until the next takes streams; None if none is killed.
        back_s: until every stream that had results has some again; None if that takes more than a minute.
        rss_mib: resident memory of the workers together.
    """

    workers: int
    offered_per_s: float
    frames_per_s: float
    dropped: float
    in_time: float
    silent: int
    p50_ms: float | None
    p99_ms: float | None
    cameras_each: float
    cores: float
    decoders: dict[str, int]
    start_s: float | None
    ready_s: float | None
    back_s: float | None
    rss_mib: float


@dataclass(slots=True, frozen=True)
class ScaleTimes:
    """What `time_scale` measured.

    Attributes:
        cameras: how many streams there were.
        fps: frames a second of each that the model would be offered at the clip's own pace.
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
        head = (
            "workers  offered/s  frames/s  dropped  in 100 ms  silent   p50 ms   p99 ms  cameras each  cores  start s"
        )
        lines = [f"{self.cameras} cameras at {self.fps:g} fps, on {os.cpu_count()} processors"]
        lines.append(f"{head}  killed: ready s  all back s   MiB  decoded by")
        for row in self.rows:
            p50, p99 = (_shown(ms, 6, 0) for ms in (row.p50_ms, row.p99_ms))
            shares = f"{100 * row.dropped:5.1f} %    {100 * row.in_time:5.1f} %  {row.silent:6}"
            killed = f"{_shown(row.ready_s, 15, 2)}  {_shown(row.back_s, 10, 2)}"
            times = f"{_shown(row.start_s, 7, 1)}  {killed}  {row.rss_mib:4.0f}"
            rates = f"{row.offered_per_s:9.1f}  {row.frames_per_s:8.1f}"
            speed = f"{rates}  {shares}   {p50}   {p99}  {row.cameras_each:12.1f}  {row.cores:5.1f}"
            decoders = ", ".join(f"{name} x {count}" for name, count in row.decoders.items())
            lines.append(f"{row.workers:7}  {speed}  {times}  {decoders}")
        return "\n".join(lines)


def time_scale(
    settings: RunConfig, counts: list[int], *, cameras: int, seconds: float, kill: bool = True
) -> ScaleTimes:
    """Run cameras on so many workers each time, then kill one of these.

    Args:
        settings: the source, which is a file and is played over and over, what to find in it, the model and device.
        counts: numbers of workers, one row each.
        cameras: how many streams.
        seconds: how long to measure each.
        kill: whether to kill one.

    Raises:
        ConfigError, EngineError, SourceError: if something it names cannot be used.
        RunFailed: if no stream comes up within a minute, or a killed worker does not come back.
    """
    from saccade.pipeline.runtime.stream import open_source_of  # brings FFmpeg

    stream = settings.each()[0]
    with open_source_of(stream) as opened:
        rate = opened.info.average_rate
    fps = float(rate or 25) / stream.vid_stride
    fps = min(fps, stream.max_fps or fps)
    rows = [_time(settings, stream, count, fps, cameras, seconds, kill) for count in counts]
    return ScaleTimes(cameras, fps, rows)


def _time(
    settings: RunConfig, stream: ListedStream, workers: int, fps: float, cameras: int, seconds: float, kill: bool
) -> Row:
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
        start_s: float | None = None
        if _comes(lambda: all(one["frames_out"] for one in _streams(front)), _FIRST_S):
            start_s = time.monotonic() - begun
        elif not any(one["frames_out"] for one in _streams(front)):
            raise RunFailed(f"no stream has a result after {_FIRST_S:g} s")
        time.sleep(_SETTLE_S)
        since, early, before = time.monotonic(), _latencies(front), _streams(front)
        time.sleep(seconds)
        took_s, late, after = time.monotonic() - since, _latencies(front), _streams(front)
        seats = front.supervisor.seats()
        reports = [seat.report for seat in seats if seat.report]
        ready_s, back_s = _kill_one(front) if kill else (None, None)
    known = {one["name"]: one for one in before}
    counted = [frames_counted(known[one["name"]], one, took_s, stream.max_fps) for one in after if one["name"] in known]
    offered, results, dropped = (sum(column) for column in zip(*counted, strict=True))
    counts = {edge: late[edge] - early.get(edge, 0.0) for edge in sorted(late)}
    in_time = counts[_IN_TIME_S] / counts[math.inf] if counts.get(math.inf) else 0.0
    return Row(
        workers=workers,
        offered_per_s=offered / took_s,
        frames_per_s=results / took_s,
        dropped=dropped / max(1.0, offered),
        in_time=in_time * min(1.0, results / max(1.0, offered)),
        silent=cameras - sum(results > 0 for _, results, _ in counted),
        p50_ms=quantile_ms(counts, 0.5),
        p99_ms=quantile_ms(counts, 0.99),
        cameras_each=results / took_s / workers / fps,
        cores=sum(report.busy for report in reports) * usable_processors() / max(1, len(reports)),
        decoders=dict(Counter((one["detail"] or "?").rpartition(" by ")[2] for one in after)),
        start_s=start_s,
        ready_s=ready_s,
        back_s=back_s,
        rss_mib=sum(report.rss_bytes for report in reports) / (1 << 20),
    )


def _kill_one(front: Front) -> tuple[float, float | None]:
    """Kill the first worker; seconds until it is ready again, and until all streams with results have some again."""
    seat = front.supervisor.seats()[0]
    assert seat.pid is not None
    names = {one["name"] for one in _streams(front) if one["frames_out"]}
    killed, starts = time.monotonic(), seat.starts
    os.kill(seat.pid, signal.SIGKILL)
    if not _comes(lambda: seat.starts > starts and seat.ready, _LONG_S):
        raise RunFailed(f"the worker does not come back within {_LONG_S:g} s")
    ready_s = time.monotonic() - killed

    def back() -> bool:
        return names <= {one["name"] for one in _streams(front) if one["worker"] and one["frames_out"]}

    return ready_s, time.monotonic() - killed if _comes(back, _FIRST_S) else None


def _streams(front: Front) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{front.url}/streams", timeout=_LONG_S) as answer:
        listed: list[dict[str, Any]] = json.loads(answer.read())["streams"]
    return listed


def _latencies(front: Front) -> dict[float, float]:
    """Results of all streams so far, by the seconds within which they came: the cumulated buckets of the metrics."""
    with urllib.request.urlopen(f"{front.url}/metrics", timeout=_LONG_S) as answer:
        text = answer.read().decode()
    counts: dict[float, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        if family.name == "saccade_latency_seconds":
            for sample in family.samples:
                if sample.labels.get("stage") == "total" and "le" in sample.labels:
                    counts[float(sample.labels["le"])] += sample.value
    return counts


def frames_counted(
    before: Mapping[str, Any], after: Mapping[str, Any], seconds: float, max_fps: float | None
) -> tuple[float, float, float]:
    """Frames of a stream that the model was offered, that have results, and that were dropped, between two statuses.

    Of those beyond `max_fps` nobody wants a result. A stream that was moved to another worker counts anew there.
    """
    if after["frames_in"] < before["frames_in"]:
        before = {"frames_in": 0, "frames_out": 0, "dropped": {}}
    read, results = (after[key] - before[key] for key in ("frames_in", "frames_out"))
    lost = sum(after["dropped"].get(cause, 0) - before["dropped"].get(cause, 0) for cause in _DROPPED)
    offered = read if max_fps is None else max(min(read, max_fps * seconds), results)
    return offered, results, min(lost, max(0.0, offered - results))


def quantile_ms(counts: dict[float, float], share: float) -> float | None:
    """The milliseconds within which a share of some results came, evenly spread within a bucket; None without results.

    Args:
        counts: how many came within so many seconds, from the fewest to infinity.
        share: from 0 to 1.
    """
    wanted = share * max(counts.values(), default=0.0)
    low = below = 0.0
    for edge, count in counts.items():
        if count >= wanted > 0:
            return 1e3 * (low if math.isinf(edge) else low + (edge - low) * (wanted - below) / (count - below))
        low, below = edge, count
    return None


def _comes(until: Callable[[], bool], limit_s: float) -> bool:
    """Wait for something; False if it does not come in time."""
    deadline = time.monotonic() + limit_s
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _shown(number: float | None, width: int, digits: int) -> str:
    return f"{'-' if number is None else format(number, f'.{digits}f'):>{width}}"

"""Reports the results of cameras that share an engine: latency, dropped frames by cause, and fairness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from saccade.engine.errors import DeadlineError, SupersededError
from saccade.pipeline.bench.common import Measurement


@dataclass(slots=True)
class CameraRow:
    """The results of one simulated camera.

    Attributes:
        name: role of a special camera, such as the camera with 4K resolution. Other cameras have a number.
        fps: frame rate, in frames per second.
        weight: scheduling weight.
        offered: number of submitted frames.
        looks: number of frames that the model answered.
        launch_p50_ms, launch_p99_ms: median and 99th percentile of the latency from the arrival of a frame to the
            launch of its prefill, in milliseconds.
        result_p50_ms, result_p99_ms: median and 99th percentile of the latency from the arrival of a frame to its
            result, in milliseconds.
        dropped: number of dropped frames, by cause: superseded by a newer frame, deadline, or failed.
        share: number of answered frames relative to fair scheduling; 1 is fair.
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
class CamerasBench(Measurement):
    """The results of the benchmark `saccade bench cameras`, which simulates cameras.

    Attributes:
        offered_fps, fps: submitted and answered frames per second, in total for all cameras.
        closed_loop_fps: answered frames per second of 32 streams with one frame in flight each.
        launch_p50_ms, launch_p99_ms, result_p50_ms, result_p99_ms: latencies over all cameras, see `CameraRow`.
        jain: Jain's fairness index of the cameras' `share`, from 1/n for n cameras (unfair) to 1 (fair).
        deadlines_met: fraction of the frames with a launched prefill whose result met the deadline.
        cpu_ms: CPU time of the process per answered frame, in milliseconds.
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

    def as_text(self) -> str:
        """Return the results of the camera benchmark as a table."""
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


@dataclass(slots=True)
class CameraLog:
    """The times of one camera's frames, in seconds.

    Attributes:
        row: results of the camera for the report.
        moments: arrival times of all frames.
        answered: arrival times of the answered frames.
        launch: latencies of the answered frames, from the arrival to the launch of the prefill.
        result: latencies of the answered frames, from the arrival to the result.
        failed_late: number of frames that missed the deadline after the launch of their prefill.
    """

    row: CameraRow
    moments: set[float] = field(default_factory=set)
    answered: list[float] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    result: list[float] = field(default_factory=list)
    failed_late: int = 0

    def lost(self, error: BaseException) -> None:
        """Count a dropped frame by its cause: superseded by a newer frame, deadline, or failed."""
        cause = "failed"
        if isinstance(error, SupersededError):
            cause = "superseded"
        elif isinstance(error, DeadlineError):
            cause = "deadline"
            self.failed_late += error.begun
        self.row.dropped[cause] = self.row.dropped.get(cause, 0) + 1


def fair_shares(offered: Sequence[float], weights: Sequence[float], total: float) -> list[float]:
    """Return the number of answered frames of each camera under max-min fair scheduling.

    Args:
        offered: number of submitted frames of each camera.
        weights: scheduling weight of each camera.
        total: number of answered frames of all cameras.
    """
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
    """Return Jain's fairness index of a list of values (Jain, Chiu and Hawe 1984).

    The index is 1 if all n values are equal, and 1/n if only one value is not 0.
    """
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def summarize(
    cameras: Sequence[CameraLog],
    seconds: float,
    capacity: float,
    limit_s: float | None,
    used_s: float,
    model: tuple[str, str, str],
) -> CamerasBench:
    """Summarize the results of all simulated cameras.

    Args:
        cameras: results of the cameras' frames.
        seconds: duration of the measurement, in seconds.
        capacity: throughput in a closed loop, in images per second.
        limit_s: maximum latency from the arrival of a frame to its result, in seconds; None for no limit.
        used_s: total CPU time, in seconds.
        model: name, device and dtype of the model.
    """
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

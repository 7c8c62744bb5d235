"""`python -m benchmarks soak`: runs Saccade for a long time with injected faults, and measures its resource use.

The measured process is `saccade run`. Simulated cameras, clients and servers run in other processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.soak.clients import Visits, broker, receiving, visiting
from benchmarks.soak.slope import Slope, slope_of
from saccade.pipeline.errors import RunFailed

_READ_S = 5.0  # between two readings of memory: each minute's value is the mean of its readings
_LONG_S = 600.0  # of a start beside much other work
_WARM_MIN = 10.0
_GROWN = 8  # types of objects that are shown


@dataclass(slots=True, frozen=True)
class Soak:
    """Parameters of a soak test.

    Attributes:
        clip: video that the cameras show.
        streams, fps: number of cameras, and frames per second of each camera.
        minutes: duration in minutes.
        segment_s: length of a recording segment in seconds.
        faults: whether to inject faults into cameras, servers and clients.
        seed: seed of the random faults.
        folder: output folder, or None for a temporary folder.
        trace: whether to trace Python allocations.
    """

    clip: str
    streams: int = 8
    fps: float = 3.0
    minutes: float = 30.0
    segment_s: int = 60
    faults: bool = True
    seed: int = 1
    folder: str | None = None
    trace: bool = False

    @property
    def warm_up(self) -> float:
        """Duration of the warm-up in minutes. Slopes are computed after the warm-up."""
        return min(_WARM_MIN, self.minutes / 3)


@dataclass(slots=True)
class Minute:
    """Resource use of the measured Saccade process in one minute of a soak test.

    Attributes:
        minute: minutes since the first result.
        rss_mb: resident memory, mean over the minute.
        anonymous_mb: anonymous resident memory (without file mappings) at the end of the minute.
        threads, descriptors: number of threads and of file descriptors.
        disk_mb: size of all files written.
        recorded: fraction of the video that was recorded, mean over all cameras. The time range is from 90 s to 30 s
            before the end of the minute.
        gaps: number of gaps in the recordings of this time range, by reason. "" is an unknown reason.
        queues: number of frames and results in all queues.
        frames: number of results so far.
        malloc: statistics of glibc's memory allocator.
        objects: number of Python objects by type.
        blocks: number of blocks that Python's allocator has allocated.
        metrics: values of the process's metrics, by name and summed over labels.
        traced: Python allocations that grew most since the warm-up. Set in every fifth minute with `Soak.trace`.
    """

    minute: float
    rss_mb: float
    anonymous_mb: float
    threads: int
    descriptors: int
    disk_mb: float
    recorded: float
    gaps: dict[str, int]
    queues: float
    frames: float
    malloc: dict[str, float]
    objects: dict[str, int]
    blocks: int
    metrics: dict[str, float] = field(default_factory=dict)
    traced: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class SoakResult:
    """Result of a soak test: resource use in each minute, and counts of client visits."""

    soak: Soak
    minutes: list[Minute]
    visits: dict[str, int]

    def after_warm_up(self) -> list[Minute]:
        """Return the resource use of each minute that follows the warm-up."""
        return [one for one in self.minutes if one.minute > self.soak.warm_up]

    def slope(self, name: str) -> Slope | None:
        """Return how fast a measured value grows after the warm-up, or None for fewer than 3 measurements.

        Args:
            name: attribute of `Minute`, or key of `Minute.malloc`.
        """
        steady = self.after_warm_up()
        values = [getattr(one, name) if hasattr(one, name) else one.malloc.get(name, 0.0) for one in steady]
        return slope_of([one.minute for one in steady], values)

    def grown(self) -> list[tuple[str, int, int]]:
        """Return the types of Python objects that grew most: (type name, count after the warm-up, final count)."""
        steady = self.after_warm_up()
        if len(steady) < 2:
            return []
        first, last = steady[0].objects, steady[-1].objects
        found = [(name, first.get(name, 0), count) for name, count in last.items()]
        return sorted(found, key=lambda one: one[1] - one[2])[:_GROWN]

    def as_json(self) -> str:
        """Return the result as JSON. Only the first and the last minute contain the object counts."""
        kept = [asdict(one) for one in self.minutes]
        for one in kept[1:-1]:
            one["objects"] = {}
        return json.dumps({"soak": asdict(self.soak), "minutes": kept, "visits": self.visits}, indent=1)

    def as_text(self) -> str:
        """Return text that states the memory growth, the gaps in the recordings, and the number of client visits."""
        names = ("rss_mb", "used_mb", "threads", "descriptors", "blocks")
        lines = ["slope a minute, ± half of the 95 % interval:"]
        lines += [f"  {name:12} {self.slope(name) or '-'}" for name in names]
        lines += ["objects, after the warm-up and at the end:"]
        lines += [f"  {name} {before} {after}" for name, before, after in self.grown() if after > before]
        steady = self.after_warm_up()
        if steady:
            gaps = sum((Counter(one.gaps) for one in steady), Counter())
            lines.append(f"recorded: {100 * statistics.mean(one.recorded for one in steady):.1f} % of the time")
            lines += [f"  {count} gaps: {reason or 'no reason'}" for reason, count in sorted(gaps.items())]
        if self.visits:
            lines.append("visits: " + ", ".join(f"{name} {count}" for name, count in sorted(self.visits.items())))
        return "\n".join(lines)


def run_soak(soak: Soak) -> SoakResult:
    """Run a soak test, and print the resource use of each minute.

    Raises:
        RunFailed: if the `saccade run` process does not start or ends too early.
    """
    with ExitStack() as stack:
        if soak.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saccade-soak-")))
        else:
            folder = Path(soak.folder)
            folder.mkdir(parents=True, exist_ok=True)
        cameras = stack.enter_context(_cameras(soak))
        http, feed, mqtt = _free_port(), _free_port(), _free_port()
        sinks = [f"ws://127.0.0.1:{feed}", f"{folder}/all.jsonl?max_mb=20&keep=3"]
        if soak.faults:
            sinks.append(stack.enter_context(receiving()) + "#send=events&snapshot=1")
            if stack.enter_context(broker(folder, mqtt, soak.seed)):
                sinks.append(f"mqtt://127.0.0.1:{mqtt}/soak?records=1")
        settings = folder / "soak.yaml"
        settings.write_text(yaml.safe_dump(_settings(soak, folder, cameras, http, sinks)))
        product = stack.enter_context(_product(soak, folder, settings))
        names = [f"camera{number}" for number in range(soak.streams)]
        watch = _Watch(product, f"http://127.0.0.1:{http}", folder, names)
        watch.wait_for_frames()
        visits = Visits(
            f"http://127.0.0.1:{http}",
            f"ws://127.0.0.1:{feed}/",
            f"rtsp://127.0.0.1:{cameras}/0",
            names,
            soak.seed,
        )
        if soak.faults:
            stack.enter_context(visiting(visits))
        minutes = []
        print(_HEAD, flush=True)
        for one in watch.minutes(soak.minutes, round(soak.warm_up)):
            minutes.append(one)
            print(_line(one), flush=True)
            for size, count, lines in one.traced:
                print(f"    +{size / 1e3:.0f} kB in {count:+d} blocks:\n" + "\n".join(f"      {at}" for at in lines))
    return SoakResult(soak, minutes, dict(visits.counts))


_HEAD = (
    "minute   RSS MB  anon MB  malloc: used  free mapped arenas  threads  fds  disk MB  recorded % queues  frames  "
    "objects  blocks"
)


def _line(one: Minute) -> str:
    malloc = one.malloc
    return (
        f"{one.minute:6.1f} {one.rss_mb:8.2f} {one.anonymous_mb:8.2f} {malloc.get('used_mb', 0):13.2f} "
        f"{malloc.get('free_mb', 0):5.1f} {malloc.get('mapped_mb', 0):6.1f} {malloc.get('arenas', 0):6.0f} "
        f"{one.threads:8d} {one.descriptors:4d} {one.disk_mb:8.1f} "
        f"{100 * one.recorded:11.1f} {one.queues:6.0f} {one.frames:7.0f} "
        f"{sum(one.objects.values()):8d} {one.blocks:7d}"
    )


def _settings(soak: Soak, folder: Path, cameras: int, http: int, sinks: list[str]) -> dict[str, Any]:
    """Return the configuration of the `saccade run` process."""
    streams = [
        {"name": f"camera{number}", "source": f"rtsp://127.0.0.1:{cameras}/{number}"} for number in range(soak.streams)
    ]
    recording = f"{folder}/{{stream}}-%Y%m%d-%H%M%S.mp4?segment={soak.segment_s}s&keep=10m"
    return {
        "streams": streams,
        "detect": ["person"],
        "track": True,
        "model": "nano",
        "device": "cpu",
        "rtsp_transport": "tcp",
        "zones": {"door": "0,0,.6,0,.6,1,0,1"},
        "lines": {"gate": ".5,1,.5,0"},
        "rules": ["visitor=person in door for 1s", "through=person crosses gate"],
        "store": str(folder / "store"),
        "store_keep": "10m",
        "http": f"127.0.0.1:{http}",
        "state": str(folder / "state.db"),
        "record": f"{folder}/recording?segment={soak.segment_s}s&keep=10m",
        "sinks": [*sinks, recording],
    }


@contextmanager
def _cameras(soak: Soak) -> Iterator[int]:
    """Run the simulated cameras in a separate process, and yield the port of their RTSP server."""
    given = [soak.clip, str(soak.streams), str(soak.fps), *([str(soak.seed)] if soak.faults else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.soak.cameras", *given], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = process.stdout.readline()
        if not port:
            raise RunFailed("the process of the simulated cameras could not be started; see its errors above")
        yield int(port)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class _Product:
    process: subprocess.Popen[bytes]
    answers: Any

    def observe(self, command: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.answers.readline())
        return found


@contextmanager
def _product(soak: Soak, folder: Path, settings: Path) -> Iterator[_Product]:
    read, write = os.pipe()
    environment = {**os.environ, "SACCADE_SOAK_OUT": str(write), **({"SACCADE_SOAK_TRACE": "1"} if soak.trace else {})}
    with (folder / "log.txt").open("wb") as log, os.fdopen(read) as answers:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.product", "run", "--config", str(settings), "--quiet"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=[write],
        )
        os.close(write)
        try:
            yield _Product(process, answers)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LONG_S)
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()


class _Watch:
    """Measures the resource use of the tested Saccade process."""

    def __init__(self, product: _Product, http: str, folder: Path, names: list[str]) -> None:
        self._product, self._http, self._folder, self._names = product, http, folder, names
        self._files = Path("/proc") / str(product.process.pid)

    def wait_for_frames(self) -> None:
        """Wait until the tested Saccade process has delivered its first result.

        Raises:
            RunFailed: if no result arrives in time.
        """
        deadline = time.monotonic() + _LONG_S
        while time.monotonic() < deadline:
            self._check()
            if self._metrics().get("saccade_frames_out_total", 0.0) > 0:
                return
            time.sleep(0.5)
        raise RunFailed(f"the first result did not arrive within {_LONG_S:.0f} s; see {self._folder}/log.txt")

    def minutes(self, count: float, warm_up: int) -> Iterator[Minute]:
        """Yield the resource use of each minute. Growth of Python allocations is relative to the end of the warm-up."""
        begun, readings = time.monotonic(), []
        self._product.observe("reset")
        number = 0
        while (now := time.monotonic() - begun) < count * 60:
            self._check()
            time.sleep(_READ_S)
            readings.append(self._status("VmRSS") / 1e3)
            if now + _READ_S >= (number + 1) * 60:
                number += 1
                yield self._minute((time.monotonic() - begun) / 60, sum(readings) / len(readings), number - warm_up)
                readings = []

    def _minute(self, minute: float, rss: float, since: int) -> Minute:
        found = self._product.observe("reset" if not since else "")
        metrics = self._metrics()
        recorded, gaps = self._recorded(time.time() - 90, time.time() - 30)
        return Minute(
            minute=minute,
            rss_mb=rss,
            anonymous_mb=self._status("RssAnon") / 1e3,
            threads=int(self._status("Threads")),
            descriptors=len(os.listdir(self._files / "fd")),
            disk_mb=sum(path.stat().st_size for path in _files(self._folder)) / 1e6,
            recorded=recorded,
            gaps=gaps,
            queues=metrics.get("saccade_queue_length", 0.0),
            frames=metrics.get("saccade_frames_out_total", 0.0),
            malloc=found["malloc"],
            objects=found["objects"],
            blocks=found["blocks"],
            metrics=metrics,
            traced=found.get("traced", []) if since > 0 and since % 5 == 0 else [],
        )

    def _recorded(self, since: float, until: float) -> tuple[float, dict[str, int]]:
        """Return the fraction of a time range that is recorded, and the number of recording gaps by reason."""
        seconds, gaps = 0.0, Counter[str]()
        for name in self._names:
            url = f"{self._http}/streams/{name}/recording/spans?from={since:.3f}&to={until:.3f}"
            with urllib.request.urlopen(url, timeout=30) as response:
                spans = json.load(response)["spans"]
            seconds += sum(one["end"] - one["begin"] for one in spans)
            # A span that goes on from before `since` is cut there, without a gap.
            gaps.update(one.get("after") or "" for one in spans if one["begin"] > since + 0.01)
        return seconds / (until - since) / len(self._names), dict(gaps)

    def _check(self) -> None:
        if self._product.process.poll() is not None:
            raise RunFailed(
                f"Saccade exited before the end of the test; its log: {(self._folder / 'log.txt').read_text()[-2000:]}"
            )

    def _status(self, key: str) -> float:
        text = (self._files / "status").read_text()
        found = re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)
        value = float(found[1]) if found else 0.0
        return value * 1.024 if key.startswith(("Vm", "Rss")) else value

    def _metrics(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        try:
            with urllib.request.urlopen(f"{self._http}/metrics", timeout=30) as response:
                lines = response.read().decode().splitlines()
        except (urllib.error.URLError, OSError):
            return sums
        for line in lines:
            name, _, value = line.partition("{")[0].partition(" ")[0], None, line.rpartition(" ")[2]
            if not line.startswith("#") and not name.endswith("_bucket"):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield path


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])

"""The metrics of all workers as those of one process, and of each worker.

A stream is in one worker, so that its metrics are taken as they are; of a sink that each worker has for all its streams
one sample is made. What a worker counts of its engine and process is
summed, under the same name, and shown with the label `worker` as `saccade_worker_…`. A sum of counters goes on when a
worker is started again: what its last process had counted when it was read last is kept. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from saccade.pipeline.server.prometheus import sink_metrics

from saccade.pipeline.workers.front.forwarding import Forwarder
from saccade.pipeline.workers.states import WorkerSeat
from saccade.pipeline.workers.supervisor import Supervisor
from saccade.sinks import SinkStatus

_OWN = "process_"
_ENGINE = "saccade_engine_"
_NOT_SUMMED = ("process_start_time_seconds", "process_max_fds")
_JOINED: dict[str, Callable[[list[float]], float]] = {"saccade_sink_up": min, "saccade_sink_state": max}  # else a sum
RELAY = "RelaySink"
"""The name of the sink that takes results out of a worker, which is none of the user's."""


class MergedMetrics:
    """What `/metrics` shows.

    Args:
        supervisor: whose workers.
        headers: that workers want.
        sinks: how the sinks that all streams share are doing.
    """

    def __init__(
        self, supervisor: Supervisor, headers: dict[str, str], sinks: Callable[[], list[SinkStatus]] = list
    ) -> None:
        self._supervisor = supervisor
        self._headers = headers
        self._sinks = sinks
        self._reading = asyncio.Lock()
        self._last: dict[str, tuple[int, dict[str, float]]] = {}  # by worker: its process, and its counters
        self._before: dict[str, float] = defaultdict(float)  # of processes that have ended

    async def as_text(self, forwarder: Forwarder) -> bytes:
        """All of it in Prometheus' text format, read anew."""
        async with self._reading:
            return await self._read(forwarder)

    async def _read(self, forwarder: Forwarder) -> bytes:
        seats = self._supervisor.seats()
        texts = await asyncio.gather(*(forwarder.get_bytes(seat.url, "/metrics", self._headers) for seat in seats))
        read = [(seat, (text or b"").decode()) for seat, text in zip(seats, texts, strict=True)]
        return await asyncio.to_thread(self._merged, read)

    def _merged(self, read: list[tuple[WorkerSeat, str]]) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected([*self._families(read), *self._workers(), *self._shared_sinks()]))
        return generate_latest(registry)

    def _families(self, read: list[tuple[WorkerSeat, str]]) -> Iterable[Metric]:
        for name in self._last.keys() - {seat.name for seat, _ in read}:  # it was replaced
            for counter, value in self._last.pop(name)[1].items():
                self._before[counter] += value
        families: dict[str, Metric] = {}
        sums: dict[str, tuple[Metric, float]] = {}
        for seat, text in read:
            own: dict[str, float] = {}
            for family in text_string_to_metric_families(text):
                if not family.name.startswith((_ENGINE, _OWN)):
                    merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    merged.samples += [sample for sample in family.samples if not _of_relay(sample.labels)]
                    continue
                if family.name in _NOT_SUMMED or not family.samples:
                    continue
                value = family.samples[0].value
                if family.type == "counter":
                    own[family.name] = value
                sums[family.name] = family, sums.get(family.name, (family, 0.0))[1] + value
                name = f"saccade_worker_{family.name.removeprefix('saccade_')}"
                each = families.setdefault(name, _family(family.type, name, family.documentation, ["worker"]))
                each.add_metric([seat.name], value)  # type: ignore[attr-defined]
            self._note(seat, own, bool(text))
        for merged in families.values():
            merged.samples = _joined(merged.samples)
        for name, (family, value) in sums.items():
            total = _family(family.type, name, f"{family.documentation}; of all workers", [])
            total.add_metric([], value + (self._before[name] if family.type == "counter" else 0.0))  # type: ignore[attr-defined]
            families[name] = total
        return families.values()

    def _note(self, seat: WorkerSeat, counters: dict[str, float], answered: bool) -> None:
        """Keep what an ended process of the worker had counted, once a newer one is there."""
        if not answered:
            return
        starts, last = self._last.get(seat.name, (seat.starts, {}))
        if starts != seat.starts:
            for name, value in last.items():
                self._before[name] += value
        self._last[seat.name] = seat.starts, counters

    def _workers(self) -> Iterable[Metric]:
        one = ["worker"]
        up = GaugeMetricFamily("saccade_worker_up", "1 while the worker takes streams, else 0", labels=one)
        starts = CounterMetricFamily("saccade_worker_starts", "How often the worker was started", labels=one)
        busy = GaugeMetricFamily("saccade_worker_busy", "Share of its processors' time that it uses", labels=one)
        rss = GaugeMetricFamily("saccade_worker_resident_memory_bytes", "Resident memory of the worker", labels=one)
        streams = GaugeMetricFamily("saccade_worker_streams", "Streams that the worker has", labels=one)
        opened = CounterMetricFamily(
            "saccade_stream_opened",
            "How often the stream was opened; above 1 its worker had ended, or it was moved",
            labels=["stream"],
        )
        known = self._supervisor.streams().values()
        for seat in self._supervisor.seats():
            up.add_metric([seat.name], float(seat.ready))
            starts.add_metric([seat.name], seat.starts)
            streams.add_metric([seat.name], sum(stream.worker == seat.name for stream in known))
            if seat.report is not None:
                busy.add_metric([seat.name], seat.report.busy)
                rss.add_metric([seat.name], seat.report.rss_bytes)
        for stream in known:
            opened.add_metric([stream.name], stream.opened)
        return up, starts, busy, rss, streams, opened

    def _shared_sinks(self) -> Iterable[Metric]:
        return sink_metrics([("", status) for status in self._sinks()])


class _Collected:
    """Families for a registry; those of one name as one."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            known = self._families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def _joined(samples: Iterable[Sample]) -> list[Sample]:
    """The samples, those of one name and labels as one: Prometheus takes no two of a scrape."""
    found: dict[tuple[object, ...], Sample] = {}
    for sample in samples:
        key = sample.name, *sorted(sample.labels.items())
        values = [one.value for one in (found.get(key), sample) if one is not None]
        found[key] = sample._replace(value=_JOINED.get(sample.name, sum)(values))
    return list(found.values())


def _of_relay(labels: Mapping[str, str]) -> bool:
    return any(labels.get(key, "").endswith(f" {RELAY}") for key in ("sink", "queue"))


def _family(kind: str, name: str, about: str, labels: list[str]) -> Metric:
    return (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, about, labels=labels)

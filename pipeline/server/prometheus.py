"""How the streams and the engine are doing, in the words of Prometheus; read only when somebody asks.

Knows reports and counters; knows nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from saccade.pipeline.core.stats import BUCKETS_MS
from saccade.pipeline.core.stream_manager import Streams, StreamStatus

_EDGES = [f"{ms / 1000:g}" for ms in BUCKETS_MS] + ["+Inf"]


class Metrics:
    """What `/metrics` shows: every stream by its name, the engine's counters where it has any, and the process.

    Args:
        streams: whose streams and engine.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def as_text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Read everything anew; called by the registry."""
        statuses = self._streams.snapshot()
        yield from _streams(statuses)
        yield from _latencies(statuses)
        yield _sinks(self._streams)
        counters = getattr(self._streams.engine, "counters", None)
        if counters is not None:
            yield from _engine(counters())


def _streams(statuses: list[StreamStatus]) -> Iterable[Metric]:
    one = ["stream"]
    up = GaugeMetricFamily("saccade_stream_up", "1 while frames come and are looked at", labels=one)
    state = GaugeMetricFamily("saccade_stream_state", "1 for the state it is in", labels=["stream", "state"])
    made = CounterMetricFamily("saccade_connections", "How often a live source has become so", labels=one)
    age = GaugeMetricFamily("saccade_result_age_seconds", "Since the newest result's frame came here", labels=one)
    read = CounterMetricFamily("saccade_frames_in", "Frames that the source handed over", labels=one)
    out = CounterMetricFamily("saccade_frames_out", "Frames whose result was handed to the sinks", labels=one)
    lost = CounterMetricFamily("saccade_frames_dropped", "Frames lost on the way", labels=["stream", "cause"])
    found = CounterMetricFamily("saccade_objects", "Boxes and points found", labels=one)
    corrupt = CounterMetricFamily("saccade_corrupt_packets", "Pieces that could not be decoded", labels=one)
    waiting = GaugeMetricFamily("saccade_queue_length", "What waits, by for whom", labels=["stream", "queue"])
    for status in statuses:
        report, label = status.report, [status.name]
        up.add_metric(label, float(status.ok))
        state.add_metric([status.name, status.state], 1.0)
        if status.live:
            made.add_metric(label, status.connections)
        if report.recent.age_ms is not None:
            age.add_metric(label, report.recent.age_ms / 1000)
        read.add_metric(label, report.read)
        out.add_metric(label, report.frames)
        found.add_metric(label, report.objects)
        corrupt.add_metric(label, report.corrupt_packets)
        for cause, count in report.drops.items():
            lost.add_metric([status.name, cause], count)
        for queue, length in report.waiting.items():
            waiting.add_metric([status.name, queue], length)
    return up, state, made, age, read, out, lost, found, corrupt, waiting


def _latencies(statuses: list[StreamStatus]) -> Iterable[Metric]:
    family = HistogramMetricFamily(
        "saccade_latency_seconds", "Where the time of a frame went", labels=["stream", "stage"]
    )
    for status in statuses:
        for stage, histogram in status.report.histograms.items():
            buckets = [(edge, float(n)) for edge, n in zip(_EDGES, accumulate(histogram.counts), strict=True)]
            family.add_metric([status.name, stage], buckets, histogram.sum_ms / 1000)
    yield family


def _sinks(streams: Streams) -> Metric:
    """What receivers lost because they, or the way to them, were slow; sinks that can lose nothing count nothing."""
    family = CounterMetricFamily("saccade_sink_dropped", "Records that a receiver did not get", labels=["sink"])
    for number, sink in enumerate(streams.sinks):
        dropped = getattr(sink, "dropped", None)
        if dropped is not None:
            family.add_metric([f"{number} {type(sink).__name__}"], dropped)
    return family


def _engine(counters: dict[str, float]) -> Iterable[Metric]:
    for key, value in counters.items():
        name = "saccade_engine_" + re.sub(r"\W", "_", key)
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield kind(name, "The engine's own count", value=value)

"""Exports metrics of streams, sinks and engines in the text format of Prometheus."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from saccade.pipeline.control.runner import Runner, WorkerStatus
from saccade.pipeline.runtime.stats import BUCKETS_MS
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.sinks import SinkStatus

_EDGES = [f"{ms / 1000:g}" for ms in BUCKETS_MS] + ["+Inf"]


class Metrics:
    """Exports Prometheus metrics of every stream, of the engines and of the process.

    Args:
        runner: runner of the streams and engines.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def as_text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics for the Prometheus registry."""
        statuses = self._runner.statuses()
        yield from _streams(statuses)
        yield from _latencies(statuses)
        yield from _counts(statuses)
        yield from sink_metrics(self._runner.sink_statuses())
        changes = CounterMetricFamily(
            "saccade_event_changes_dropped",
            "Event changes (begin, update, end) dropped because a queue was full: hub for outputs, store for the disk",
            labels=["where"],
        )
        for where, count in self._runner.lost_changes().items():
            changes.add_metric([where], count)
        yield changes
        workers = self._runner.workers()
        yield from _engines(workers)
        if len(workers) > 1:
            yield from _workers(workers)


def _streams(statuses: list[StreamStatus]) -> Iterable[Metric]:
    one, by_cause, by_class = ["stream"], ["stream", "cause"], ["stream", "class"]
    up = GaugeMetricFamily("saccade_stream_up", "1 while frames arrive and are processed, else 0", labels=one)
    state = GaugeMetricFamily(
        "saccade_stream_state",
        "1 for the current state of the stream, such as connecting, live, retrying, running, stuck or failed",
        labels=["stream", "state"],
    )
    made = CounterMetricFamily(
        "saccade_connections",
        "Connections opened to a live source; more than 1 means that Saccade has reconnected",
        labels=one,
    )
    age = GaugeMetricFamily(
        "saccade_result_age_seconds",
        "Time since the arrival of the newest frame that has a result, for live sources",
        labels=one,
    )
    read = CounterMetricFamily("saccade_frames_in", "Frames read from the source", labels=one)
    out = CounterMetricFamily("saccade_frames_out", "Frames whose results were passed to the sinks", labels=one)
    lost = CounterMetricFamily(
        "saccade_frames_dropped",
        "Dropped frames by cause: lost (in transit); full or closed (queue of the model); max_fps (frame rate limit); "
        "deadline (missed); gate (not admitted); failed (error in the model or a stage); sink full or sink closed "
        "(queue of the sink)",
        labels=by_cause,
    )
    found = CounterMetricFamily(
        "saccade_objects",
        "Detected boxes and points by class; an object counts once per frame",
        labels=by_class,
    )
    looks = CounterMetricFamily(
        "saccade_looks",
        "Windows processed in native resolution, by reason: motion without a detection, a small tracked object, a "
        "detection with a low score, or the sweep of the whole frame",
        labels=["stream", "reason"],
    )
    kept = GaugeMetricFamily(
        "saccade_kept",
        "Items of a stream in memory, by kind: tracks, minutes of counts, open events, bytes of video for clips, "
        "and clips not yet written",
        labels=["stream", "what"],
    )
    held = CounterMetricFamily(
        "saccade_finds_held_back",
        "Detections suppressed because they resemble a false alarm; an object counts once per frame",
        labels=one,
    )
    corrupt = CounterMetricFamily(
        "saccade_corrupt_packets", "Packets of the source that could not be decoded", labels=one
    )
    waiting = GaugeMetricFamily(
        "saccade_queue_length",
        "Frames waiting for the model (queue engine), and results waiting for a sink (queue index and name)",
        labels=["stream", "queue"],
    )
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
        for name, count in report.objects_by_class.items():
            found.add_metric([status.name, name], count)
        for reason, count in report.looks.items():
            looks.add_metric([status.name, reason], count)
        for what, count in report.kept.items():
            kept.add_metric([status.name, what], count)
        held.add_metric(label, report.held_back)
        corrupt.add_metric(label, report.corrupt_packets)
        for cause, count in report.drops.items():
            lost.add_metric([status.name, cause], count)
        for queue, length in report.waiting.items():
            waiting.add_metric([status.name, queue], length)
    return up, state, made, age, read, out, lost, found, looks, kept, held, corrupt, waiting


def _latencies(statuses: list[StreamStatus]) -> Iterable[Metric]:
    family = HistogramMetricFamily(
        "saccade_latency_seconds",
        "Latency of a frame by stage: decode (video), queue, prefill (image and prompt), decode_tokens (answers), "
        "track, and total (from arrival to result)",
        labels=["stream", "stage"],
    )
    for status in statuses:
        for stage, histogram in status.report.histograms.items():
            buckets = [(edge, float(n)) for edge, n in zip(_EDGES, accumulate(histogram.counts), strict=True)]
            family.add_metric([status.name, stage], buckets, histogram.sum_ms / 1000)
    yield family


def _counts(statuses: list[StreamStatus]) -> Iterable[Metric]:
    zone, line = ["stream", "zone", "class"], ["stream", "line", "direction", "class"]
    tracks = CounterMetricFamily("saccade_tracks", "Tracked objects, each counted once", labels=["stream", "class"])
    inside = GaugeMetricFamily("saccade_zone_objects", "Objects currently in the zone", labels=zone)
    entered = CounterMetricFamily("saccade_zone_entered", "Objects that have entered the zone", labels=zone)
    left = CounterMetricFamily("saccade_zone_left", "Objects that have left the zone", labels=zone)
    crossed = CounterMetricFamily("saccade_line_crossings", "Objects that have crossed the line", labels=line)
    for status in statuses:
        if status.counts is None:
            continue
        for label, count in status.counts.objects.items():
            tracks.add_metric([status.name, label], count)
        for name, labels in status.counts.zones.items():
            for label, counts in labels.items():
                for family, what in ((inside, "inside"), (entered, "entered"), (left, "left")):
                    family.add_metric([status.name, name, label], counts[what])
        for name, labels in status.counts.lines.items():
            for label, counts in labels.items():
                for direction, count in counts.items():
                    crossed.add_metric([status.name, name, direction, label], count)
    return tracks, inside, entered, left, crossed


def sink_metrics(statuses: list[tuple[str, SinkStatus]]) -> Iterable[Metric]:
    """Yield the Prometheus metrics of sinks.

    Args:
        statuses: pairs of a stream name and the status of a sink. The name is empty for a sink that all streams share.
    """
    two = ["sink", "stream"]
    up = GaugeMetricFamily(
        "saccade_sink_up",
        "1 while results are written to the sink, 0 while the sink is paused or has ended",
        labels=two,
    )
    state = GaugeMetricFamily(
        "saccade_sink_state", "1 for the current state of the sink: ok, paused or ended", labels=[*two, "state"]
    )
    lost = CounterMetricFamily("saccade_sink_lost", "Results dropped because a sink could not write them", labels=two)
    counted: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        "connected": GaugeMetricFamily("saccade_sink_connected", "1 while the sink's server is connected", labels=two),
        "clients": GaugeMetricFamily("saccade_sink_clients", "Clients connected to the sink", labels=two),
        "backlog": GaugeMetricFamily("saccade_sink_backlog", "Messages waiting to be sent by the sink", labels=two),
        "backlog_age_s": GaugeMetricFamily(
            "saccade_sink_backlog_age_seconds", "Time since the sink queued its oldest unsent message", labels=two
        ),
        "sent": CounterMetricFamily("saccade_sink_sent", "Messages accepted by the sink's receivers", labels=two),
        "dropped": CounterMetricFamily(
            "saccade_sink_dropped",
            "Messages dropped because the receiver was offline or slow, or refused them",
            labels=two,
        ),
    }
    numbers: Counter[str] = Counter()  # index of each sink, because two sinks can have the same name
    for stream, status in statuses:
        label = [f"{numbers[stream]} {status.name}", stream]
        numbers[stream] += 1
        up.add_metric(label, float(status.state == "ok"))
        state.add_metric([*label, status.state], 1.0)
        lost.add_metric(label, status.lost)
        for key, family in counted.items():
            if status.stats is not None and (value := getattr(status.stats, key)) is not None:
                family.add_metric(label, value)
    return up, state, lost, *counted.values()


def _engines(workers: list[WorkerStatus]) -> Iterable[Metric]:
    """Yield the sum of each counter over all engines. With several engines, also yield the counters of each engine."""
    each: dict[str, dict[str, float]] = {}
    for worker in workers:
        for key, value in worker.counters.items():
            each.setdefault(key, {})[worker.name] = value
    for key, values in each.items():
        name = "engine_" + re.sub(r"\W", "_", key)
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield kind(
            f"saccade_{name}",
            f"Engine counter {key}, summed over all engines; see Engine.counters",
            value=sum(values.values()),
        )
        if len(workers) > 1:
            family = kind(
                f"saccade_worker_{name}", f"Engine counter {key} of one worker; see Engine.counters", labels=["worker"]
            )
            for name_of_one, value in values.items():
                family.add_metric([name_of_one], value)
            yield family


def _workers(workers: list[WorkerStatus]) -> Iterable[Metric]:
    one = ["worker"]
    up = GaugeMetricFamily("saccade_worker_up", "1 while the worker accepts streams, else 0", labels=one)
    starts = CounterMetricFamily("saccade_worker_starts", "Number of starts of the worker", labels=one)
    busy = GaugeMetricFamily(
        "saccade_worker_busy", "Fraction of time in which the worker's engine is busy, from 0 to 1", labels=one
    )
    rss = GaugeMetricFamily("saccade_worker_resident_memory_bytes", "Resident memory of the worker", labels=one)
    streams = GaugeMetricFamily("saccade_worker_streams", "Number of streams on the worker", labels=one)
    for worker in workers:
        up.add_metric([worker.name], float(worker.state == "ready"))
        starts.add_metric([worker.name], worker.starts)
        streams.add_metric([worker.name], len(worker.streams))
        if worker.busy is not None:
            busy.add_metric([worker.name], worker.busy)
        if worker.rss_bytes is not None:
            rss.add_metric([worker.name], worker.rss_bytes)
    return up, starts, busy, rss, streams

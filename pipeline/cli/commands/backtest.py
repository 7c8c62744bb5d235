"""The command `saccade backtest`: evaluates rules on recorded videos, as fast as the model allows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any

from saccade.pipeline.cli.commands.forecast import Forecast, forecast, forecast_text
from saccade.pipeline.cli.terminal import json_text
from saccade.pipeline.config import ListedStream
from saccade.pipeline.config.file import load
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import opened_local
from saccade.pipeline.errors import ConfigError, RunFailed
from saccade.pipeline.runtime.run import Run
from saccade.sources import open_source

_TICK_S = 0.2
_MAX_FPS = 15
"""Default limit of frames per second; `vid_stride` overrides it.

Tracks follow time and not frames, so rules need no higher rate. The model nano reaches 22 frames per second on two
cores, less than many cameras record.
"""
_OUTPUTS: dict[str, Any] = {"sinks": [], "jsonl": None, "out": None, "display": False, "http": None}


@dataclass(slots=True, frozen=True)
class Backtest:
    """The result of evaluating rules on recorded videos.

    Attributes:
        events: last record of each event, sorted by video and time.
        video_s: total duration of the videos, in seconds.
        took_s: run time, in seconds.
        vid_stride: N if every Nth frame was processed; the largest N of all videos.
        forecasts: expected events per day of each rule.
    """

    events: list[dict[str, Any]]
    video_s: float
    took_s: float
    vid_stride: int = 1
    forecasts: Sequence[Forecast] = ()

    def as_json(self, forecast: bool = False) -> str:
        """Return the events as JSON. With `forecast`, the expected events per day are included."""
        pace = {"video_s": round(self.video_s, 2), "took_s": round(self.took_s, 2), "vid_stride": self.vid_stride}
        more = {"forecast": [asdict(one) for one in self.forecasts]} if forecast else {}
        return json_text({"events": self.events, **pace, **more})

    def as_text(self, forecast: bool = False) -> str:
        """Return the events of the backtest as a table, with times relative to the start of each video.

        Args:
            forecast: whether to include the expected events per day.
        """
        rows = [("video", "begins", "ends", "rule", "what", "score")]
        for event in self.events:
            tracks = ", ".join(str(number) for number in event["tracks"])
            what = f"{event['label']} {tracks}".strip()
            times = (f"{event['start_time']:.2f}", f"{event['end_time']:.2f}")
            rows.append((event["stream"], *times, event["rule"], what, f"{event['top_score']:.2f}"))
        wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
        pace = self.video_s / self.took_s if self.took_s > 0 else 0.0
        count = f"{len(self.events)} event{'' if len(self.events) == 1 else 's'}"
        summary = f"{count} in {self.video_s:.1f} s of video, {pace:.1f} times as fast as it was recorded"
        if self.vid_stride > 1:
            summary += f"; 1 of {self.vid_stride} frames was processed (--vid-stride 1 for all)"
        foreseen = [forecast_text(self.forecasts)] if forecast else []
        return "\n".join([*(lines if self.events else []), summary, *foreseen])


def backtest(path: Path, videos: Sequence[str], given: Mapping[str, Any], stream: str | None) -> Backtest:
    """Evaluate the rules of a configuration on videos. The outputs and the event store are not written.

    Args:
        path: path of the configuration file. The file needs no source.
        videos: video files. Each video is processed as a separate stream.
        given: settings that override the file.
        stream: name of the stream whose settings are used; required if the file has several streams.

    Raises:
        ConfigError: if the configuration is invalid or has no rules.
        SourceError, EngineError: if a video or the model cannot be used.
        RunFailed: if a video could not be read to its end.
    """
    config = load(path, given, source="video.mp4")
    chosen = choose_stream(config.each(), stream)
    if not chosen.rules:
        raise ConfigError(f"{path}: the configuration has no rules; add the key rules")
    streams = [
        chosen.model_copy(
            update={
                "source": video,
                "name": None,
                "sinks": [],
                "heatmap": None,
                "record": None,
                "record_source": None,
                "loop": False,
                "realtime": False,
                "vid_stride": chosen.vid_stride if {"vid_stride"} & chosen.model_fields_set else _stride_of(video),
            }
        )
        for video in videos
    ]
    nothing = {"source": "", "name": None, "heatmap": None, "record": None, "store": None, **_OUTPUTS}
    config = config.model_copy(update={"streams": streams, **nothing})
    ended: list[dict[str, Any]] = []

    def keep(event: Mapping[str, Any]) -> None:
        if event["type"] == "end":
            ended.append(dict(event))

    config, now = config.resolved(), datetime.now()
    with opened_local(config, config.named()) as (local, opened):
        local.events.hub.add(keep)
        began = time.monotonic()
        runs = Controller(local, config, first=opened).start()
        while not all(run.join(_TICK_S) for run in runs):
            pass  # keeps the main thread responsive to Ctrl-C
        local.events.hub.flush()
        if failed := next((run for run in runs if run.error), None):
            raise RunFailed from failed.error
        took_s = time.monotonic() - began
        strides = [stream.vid_stride for stream in streams]
        lengths = [_seconds_of(run, stride) for run, stride in zip(runs, strides, strict=True)]
        order = {run.name: number for number, run in enumerate(runs)}
    ended.sort(key=lambda event: (order[event["stream"]], event["start_time"]))
    start = chosen.began or now
    found = forecast(chosen.rules, [event["rule"] for event in ended], [(start, seconds) for seconds in lengths])
    return Backtest(ended, sum(lengths), took_s, max(strides), found)


def _stride_of(video: str) -> int:
    with open_source(video) as source:
        return max(1, ceil((source.info.average_rate or 0) / _MAX_FPS))


def _seconds_of(run: Run, vid_stride: int) -> float:
    """Return the duration of a processed video, in seconds."""
    rate = run.source.info.average_rate
    return float(run.report().read * vid_stride / rate) if rate else 0.0


def choose_stream(streams: Sequence[ListedStream], name: str | None) -> ListedStream:
    """Return the stream with the given name. Without a name, return the only stream.

    Raises:
        ConfigError: if the stream does not exist, or there are several streams and no name.
    """
    if name is None and len(streams) == 1:
        return streams[0]
    named = {stream.name: stream for stream in streams if stream.name}
    if name is None or name not in named:
        wrong = "defines several streams" if name is None else f"does not define stream '{name}'"
        raise ConfigError(f"--stream: the configuration {wrong}; give one of {', '.join(named) or 'the named streams'}")
    return named[name]

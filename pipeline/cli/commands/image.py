"""The command `saccade image`: detects objects in one image."""

from __future__ import annotations

import time
from dataclasses import dataclass

from saccade.engine.results import Result, Text
from saccade.pipeline.cli.formatting import show_preparation
from saccade.pipeline.cli.terminal import json_text
from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.stats import latency_of
from saccade.pipeline.runtime.stream import load_engine
from saccade.pipeline.runtime.targets import check_targets, targets_of
from saccade.pipeline.runtime.tasks import tasks_for
from saccade.sinks import Latency, draw, make_record
from saccade.sinks.still import check_still, save_still
from saccade.sources import Frame, SourceError, open_source


@dataclass(slots=True, frozen=True)
class ProcessedImage:
    """An image and the detections in it."""

    frame: Frame
    result: Result
    latency: Latency

    def as_json(self) -> str:
        """Return the detections as indented JSON, in the same format as `saccade run --jsonl`."""
        return json_text(make_record(self.frame, self.result, self.latency))

    def as_text(self) -> str:
        """Return one line per detection, with positions in pixels."""
        width, height = self.frame.width, self.frame.height
        lines = []
        for box in self.result.detections.boxes:
            x1, y1, x2, y2 = box.pixels(width, height)
            lines.append(f"{box.label} {box.score:.0%}  box {x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}")
        for spot in self.result.points.points:
            x, y = spot.pixels(width, height)
            lines.append(f"{spot.label} {spot.score:.0%}  point {x:.0f} {y:.0f}")
        for one in self.result.segments:
            x1, y1, x2, y2 = one.box[0] * width, one.box[1] * height, one.box[2] * width, one.box[3] * height
            cut = "" if one.complete else "  (incomplete)"
            lines.append(f"{one.label}  outline {x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}  {one.path}{cut}")
        lines += [f"{text.prompt}: {text.text}{_shares(text)}" for text in self.result.texts]
        return "\n".join(lines) or "nothing found"

    def save(self, path: str) -> None:
        """Draw the detections on the image and write it to a file. The file suffix selects the format.

        Raises:
            SinkError: if the image cannot be written.
        """
        save_still(path, draw(self.frame.image, self.result))


def _shares(text: Text) -> str:
    if text.probabilities is None:
        return ""
    ranked = sorted(text.probabilities.items(), key=lambda one: -one[1])
    return f"  ({', '.join(f'{choice} {p:.1%}' for choice, p in ranked)})"


def process_image(config: RunConfig) -> ProcessedImage:
    """Detect objects in the image that `config.source` names.

    Raises:
        ConfigError: if the source is not a single image, or the output would overwrite the source.
        SourceError, EngineError: if the source or the model cannot be used.
        SinkError: if the annotated image cannot be written.
    """
    check_targets(targets_of(config), [config.source])
    with open_source(config.source) as source:
        if source.info.live:
            raise ConfigError(f"{source.info.url} is a live source; `saccade probe --out FILE` saves an image of it")
        frames = iter(source)
        frame = next(frames, None)
        count = source.info.frames
        if (count is not None and count > 1) or next(frames, None) is not None:
            raise ConfigError(f"{source.info.url} has more than one image; use `saccade run` for videos")
    if frame is None:
        raise SourceError(f"{config.source}: no image could be read")
    if config.out:
        check_still(config.out, frame.width, frame.height)
    with load_engine(config, show_preparation) as engine:
        tasks = tasks_for(engine, config)
        submitted_at = time.monotonic()
        result = engine.submit(frame.image, tasks, config.tiles).result()
    return ProcessedImage(frame, result, latency_of(frame, submitted_at, result))

"""`python -m benchmarks mot`: tracks MOT Challenge sequences, scores the tracks and writes them to files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.mot.evaluate import score, track
from benchmarks.mot.files import MotError, Rows, Sequence, read_sequences, write_rows
from benchmarks.mot.metrics import Counts
from saccade.pipeline.analytics.tracker import TrackerSettings
from saccade.pipeline.config import RunConfig
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.stream import load_engine
from saccade.pipeline.runtime.tasks import tasks_for
from saccade.sources import open_source

_ALL = "all"
_COLUMNS = ("MOTA", "IDF1", "HOTA", "ID switches", "misses", "false boxes", "true boxes")


@dataclass(slots=True, frozen=True)
class Scores:
    """Tracking results of each MOT Challenge sequence, keyed by its name."""

    counts: dict[str, Counts]

    def with_all(self) -> dict[str, Counts]:
        """Return the counts of each sequence. For several sequences, add an entry with the total counts."""
        if len(self.counts) == 1:
            return self.counts
        return {**self.counts, _ALL: sum(self.counts.values(), Counts())}

    def as_json(self) -> str:
        """Return the tracking scores, from 0 to 1, as JSON."""
        return json.dumps({name: counts.to_dict() for name, counts in self.with_all().items()}, indent=2)

    def as_text(self) -> str:
        """Return a table of tracking scores in percent."""
        wide = max(len(name) for name in self.with_all())
        lines = [" " * wide + "".join(f"{column:>{max(8, len(column) + 2)}}" for column in _COLUMNS)]
        for name, counts in self.with_all().items():
            *scores, switches, misses, false, true = counts.to_dict().values()
            cells = [*(f"{100 * value:.1f}" for value in scores), *map(str, (switches, misses, false, true))]
            pairs = zip(_COLUMNS, cells, strict=True)
            lines.append(f"{name:<{wide}}" + "".join(f"{cell:>{max(8, len(column) + 2)}}" for column, cell in pairs))
        return "\n".join(lines)


def evaluate(
    folder: Path, settings: RunConfig, *, detections: str, every: int, out: Path | None, start: float | None
) -> Scores:
    """Run the tracker on all MOT Challenge sequences in a folder, and score the tracks.

    Args:
        folder: a sequence, or a folder of sequences.
        settings: model and labels, used only if `detections` is `model`.
        detections: `det` for the boxes in det/det.txt, or `model` for the boxes that the model detects.
        every: use only every Nth frame.
        out: folder for the tracks (NAME.txt), or None to write no tracks.
        start: minimum score of a box to start a track, or None for the defaults of BoT-SORT.

    Raises:
        ConfigError: if a sequence or `detections` is invalid.
        EngineError: if the model cannot be loaded.
        SourceError: if the frames cannot be read.
    """
    if detections not in ("det", "model"):
        raise ConfigError(f"--detections must be det or model; got '{detections}'")
    chosen = TrackerSettings() if start is None else TrackerSettings(high=start, new=start)
    try:
        sequences = read_sequences(folder)
        counts = {}
        found = _detect(sequences, settings) if detections == "model" else [one.detections() for one in sequences]
        for sequence, boxes in zip(sequences, found, strict=True):
            tracks = track(boxes, sequence.fps, chosen, every)
            if out is not None:
                write_rows(out / f"{sequence.name}.txt", tracks)
            counts[sequence.name] = score(sequence, tracks, every)
    except MotError as error:
        raise ConfigError(str(error)) from None
    return Scores(counts)


def _detect(sequences: list[Sequence], settings: RunConfig) -> list[Rows]:
    """Return the boxes that the model detects in each MOT Challenge sequence."""
    media = [sequence.media() for sequence in sequences]
    found = []
    with load_engine(settings) as engine:
        tasks = tasks_for(engine, settings)
        for path in media:
            rows = []
            with open_source(str(path)) as source:
                for frame in source:
                    boxes = engine.submit(frame.image, tasks).result().detections.boxes
                    rows += [
                        (frame.index + 1, -1, *box.pixels(frame.width, frame.height), box.score, -1) for box in boxes
                    ]
            found.append(np.array(rows, np.float64).reshape(-1, 8))
    return found

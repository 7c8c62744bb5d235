"""Compares Saccade with the Python package `trackers` (Apache-2.0): tracking, and scoring of given tracks.

The input boxes are the sequences TUD-Campus and TUD-Stadtmitte from the package `motmetrics` (MIT). Video frames are
not needed.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_rounds, require
from benchmarks.mot.evaluate import score, track
from benchmarks.mot.files import Rows, Sequence, read_sequences
from benchmarks.mot.metrics import Counts, count
from benchmarks.track import walk
from saccade.pipeline.analytics.tracker import Tracker, TrackerSettings

_INSTALL = "trackers motmetrics"
_FPS = 25.0
_EVERY = 5
_TRACK_NOTE = (
    "CPU time is the median per frame with simulated boxes. Scores cover both sequences, with the boxes that come with "
    "them as detections of score 1. ByteTrack has the defaults of `trackers`."
)
_SCORE_NOTE = "Both score the tracks that come with TUD-Campus and TUD-Stadtmitte. The scores should be equal."


def compare_trackers(rounds: int, frames: int, objects: int) -> Comparison:
    """Measure the speed and accuracy of Saccade's tracker and of ByteTrack from the package `trackers`.

    Raises:
        ConfigError: if a package is missing.
    """
    require("trackers", "motmetrics", install=_INSTALL)
    boxes = walk(objects, frames)
    with tempfile.TemporaryDirectory() as folder:
        sequences = read_sequences(_folders(Path(folder)))

        def ours() -> Measured:
            tracker = Tracker(TrackerSettings(high=0.5, new=0.5, low=0.0))
            took = []
            for number, (corners, scores) in enumerate(boxes):
                begun = time.thread_time_ns()
                tracker.update(corners, scores, np.zeros(len(corners), np.int64), number / 30)
                took.append(time.thread_time_ns() - begun)
            return {"CPU time": float(np.median(took)) / 1e6, **_scores(sequences, _track_with_saccade)}

        def theirs() -> Measured:
            return {"CPU time": _time_bytetrack(boxes), **_scores(sequences, _track_with_bytetrack)}

        units = {"CPU time": f"ms per frame, {objects} objects"}
        for every in (1, _EVERY):
            units |= {_name(metric, every): "%" for metric in ("MOTA", "IDF1", "HOTA")}
        title = "Tracking: Saccade and ByteTrack of the package trackers"
        made = begin("bytetrack", title, _TRACK_NOTE, units, ("trackers", "supervision"))
        return in_rounds(made, {OURS: ours, "ByteTrack": theirs}, rounds)


def compare_scoring(rounds: int) -> Comparison:
    """Compute tracking scores of the same tracks with `benchmarks mot` and with the package `trackers`.

    Raises:
        ConfigError: if a package is missing.
    """
    require("trackers", "motmetrics", install=_INSTALL)
    from trackers.eval import evaluate_mot_sequences

    with tempfile.TemporaryDirectory() as folder:
        root = _folders(Path(folder))

        def ours() -> Measured:
            begun = time.process_time()
            total = Counts()
            for one in read_sequences(root):
                tracks = one.detections()
                tracks[:, 1] = np.loadtxt(one.folder / "det" / "det.txt", delimiter=",")[:, 1]
                total = total + count(one.truth, tracks, one.distractors)
            return {"CPU time": 1000 * (time.process_time() - begun), **_percent(total)}

        def theirs() -> Measured:
            begun = time.process_time()
            result = evaluate_mot_sequences(
                root / "flat" / "gt", root / "flat" / "tracks", metrics=["CLEAR", "HOTA", "Identity"]
            ).aggregate
            took = 1000 * (time.process_time() - begun)
            scores = {"MOTA": result.CLEAR.MOTA, "IDF1": result.Identity.IDF1, "HOTA": result.HOTA.HOTA}
            return {"CPU time": took, **{name: 100 * float(value) for name, value in scores.items()}}

        units = {"CPU time": "ms for both sequences", "MOTA": "%", "IDF1": "%", "HOTA": "%"}
        title = "Scoring of tracks: Saccade and the package trackers"
        return in_rounds(
            begin("mot-scores", title, _SCORE_NOTE, units, ("trackers",)), {OURS: ours, "trackers": theirs}, rounds
        )


def _folders(root: Path) -> Path:
    """Write the sequences in two file layouts: as MOT Challenge folders, and in one folder for `trackers.eval`."""
    spec = importlib.util.find_spec("motmetrics")
    assert spec is not None
    assert spec.origin is not None
    data = Path(spec.origin).parent / "data"
    for kind in ("gt", "tracks"):
        (root / "flat" / kind).mkdir(parents=True)
    for name in ("TUD-Campus", "TUD-Stadtmitte"):
        for source, kind, part in (("gt.txt", "gt", "gt"), ("test.txt", "det", "tracks")):
            (root / name / kind).mkdir(parents=True)
            shutil.copy(data / name / source, root / name / kind / f"{kind}.txt")
            lines = (data / name / source).read_text(encoding="utf-8").split()
            boxes = [",".join(line.split(",")[:6]) + ",1,1,1\n" for line in lines]  # class 1, which `trackers` counts
            (root / "flat" / part / f"{name}.txt").write_text("".join(boxes), encoding="utf-8")
        (root / name / "seqinfo.ini").write_text(f"[Sequence]\nname={name}\nframeRate={_FPS:g}\n", encoding="utf-8")
    return root


def _scores(sequences: list[Sequence], run: Callable[[Rows, int], Rows]) -> dict[str, float]:
    found: dict[str, float] = {}
    for every in (1, _EVERY):
        total = Counts()
        for one in sequences:
            total = total + score(one, run(one.detections(), every), every)
        found |= {_name(metric, every): value for metric, value in _percent(total).items()}
    return found


def _percent(counts: Counts) -> dict[str, float]:
    return {"MOTA": 100 * counts.mota, "IDF1": 100 * counts.idf1, "HOTA": 100 * counts.hota}


def _name(metric: str, every: int) -> str:
    return metric if every == 1 else f"{metric}, every {every}th frame"


def _track_with_saccade(rows: Rows, every: int) -> Rows:
    return track(rows, _FPS, TrackerSettings(), every)


def _track_with_bytetrack(rows: Rows, every: int) -> Rows:
    import supervision
    from trackers import ByteTrackTracker

    tracker = ByteTrackTracker(frame_rate=_FPS / every)
    tracked = []
    for number in range(1, int(rows[:, 0].max(initial=0)) + 1, every):
        here = rows[rows[:, 0] == number]
        found = supervision.Detections(here[:, 2:6], confidence=here[:, 6], class_id=np.zeros(len(here), int))
        found = tracker.update(found)
        kept = np.full((len(found), 8), -1.0)
        if len(found):
            kept[:, 0], kept[:, 1], kept[:, 2:6], kept[:, 6] = number, found.tracker_id, found.xyxy, found.confidence
        tracked.append(kept[kept[:, 1] >= 0])
    out = np.concatenate([np.zeros((0, 8)), *tracked])
    out[:, 1] += 1  # IDs from 1, as ours
    return out


def _time_bytetrack(boxes: list[tuple[np.ndarray, np.ndarray]]) -> float:
    import supervision
    from trackers import ByteTrackTracker

    tracker, took = ByteTrackTracker(frame_rate=30.0, track_activation_threshold=0.5, high_conf_det_threshold=0.5), []
    scale = np.array([640, 360, 640, 360])
    for corners, scores in boxes:
        found = supervision.Detections(corners * scale, confidence=scores, class_id=np.zeros(len(corners), int))
        begun = time.thread_time_ns()
        tracker.update(found)
        took.append(time.thread_time_ns() - begun)
    return float(np.median(took)) / 1e6

"""Reads and writes files of MOT Challenge sequences: `seqinfo.ini`, `gt/gt.txt`, `det/det.txt`, and tracks.

Each line of a box file starts with frame, id, left, top, width, height and score.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
"""(n, 8) array: frame, id, x1, y1, x2, y2, score and class; -1 marks a missing value."""

_PEDESTRIAN, _DISTRACTORS = (1, -1), (2, 7, 8, 12)


class MotError(Exception):
    """Raised if a MOT Challenge sequence cannot be read or written. The message is one line for the user."""


@dataclass(slots=True, frozen=True)
class Sequence:
    """A MOT Challenge sequence.

    Attributes:
        name: name of the sequence.
        folder: folder of the sequence.
        fps: frame rate, in frames per second.
        frames: number of frames. Frame numbers start at 1.
        truth: ground-truth boxes of the pedestrians that are scored.
        distractors: boxes of distractors, such as reflections. Detections on distractors are ignored.
    """

    name: str
    folder: Path
    fps: float
    frames: int
    truth: Rows
    distractors: Rows

    def detections(self) -> Rows:
        """Read the detected boxes in `det/det.txt`. If any score is outside 0 to 1, all scores become 1.

        Raises:
            MotError: if the file cannot be read.
        """
        rows = read_rows(self.folder / "det" / "det.txt")
        rows[:, 1] = -1
        if len(rows) and (rows[:, 6].min() < 0 or rows[:, 6].max() > 1):
            rows[:, 6] = 1.0
        return rows

    def media(self) -> Path:
        """Return the path of the sequence's frames: the image folder `img1`, or the first video in its folder.

        Raises:
            MotError: if the folder has neither images nor a video.
        """
        if (self.folder / "img1").is_dir():
            return self.folder / "img1"
        videos = sorted(path for path in self.folder.iterdir() if path.suffix in (".mp4", ".mkv", ".avi", ".webm"))
        if not videos:
            raise MotError(f"{self.folder}: no folder img1 and no video found; use --detections det")
        return videos[0]


def read_sequences(folder: Path) -> list[Sequence]:
    """Read the sequence in a folder, or all sequences in its subfolders, sorted by folder name.

    Raises:
        MotError: if the folder has no sequence, or if a sequence cannot be read.
    """
    found = (
        [folder]
        if (folder / "gt" / "gt.txt").is_file()
        else sorted(p.parent.parent for p in folder.glob("*/gt/gt.txt"))
    )
    if not found:
        raise MotError(f"{folder}: no gt/gt.txt found, neither in this folder nor in its subfolders")
    return [_read(one) for one in found]


def read_rows(path: Path) -> Rows:
    """Read a MOT Challenge box file.

    Raises:
        MotError: if the file cannot be read, or if a value is not a number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MotError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = [float(value) for value in line.split(",")]
            frame, track, left, top, width, height = values[:6]
        except ValueError:
            raise MotError(
                f"{path}:{number}: each line must start with six numbers: frame,id,left,top,width,height"
            ) from None
        score, kind = (*values[6:8], *(1.0, -1.0)[max(0, len(values) - 6) :])
        rows.append((frame, track, left, top, left + width, top + height, score, kind))
    table = np.array(rows, np.float64).reshape(-1, 8)
    if not np.isfinite(table).all():
        raise MotError(f"{path}: the file contains NaN or infinite numbers")
    return table


def write_rows(path: Path, rows: Rows) -> None:
    """Write tracks as a MOT Challenge box file.

    Raises:
        MotError: if the file cannot be written.
    """
    lines = [
        f"{frame:.0f},{track:.0f},{x1:.2f},{y1:.2f},{x2 - x1:.2f},{y2 - y1:.2f},{score:.3f},-1,-1,-1\n"
        for frame, track, x1, y1, x2, y2, score, _ in rows.tolist()
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise MotError(f"{path}: {error.strerror or error}") from None


def _read(folder: Path) -> Sequence:
    info = configparser.ConfigParser()
    try:
        info.read(folder / "seqinfo.ini", encoding="utf-8")
        known = info["Sequence"] if info.has_section("Sequence") else {}
        fps, length = float(known.get("frameRate", 30)), int(known.get("seqLength", 0))
    except (configparser.Error, ValueError, UnicodeDecodeError) as error:
        raise MotError(f"{folder / 'seqinfo.ini'}: {' '.join(str(error).split())}") from None
    if not 0 < fps < 1e4:
        raise MotError(f"{folder / 'seqinfo.ini'}: frameRate must be above 0")
    boxes = read_rows(folder / "gt" / "gt.txt")
    # Files of MOT15 hold world coordinates in the column that later files use for the class.
    kinds = boxes[:, 7] if len(boxes) and (boxes[:, 7] % 1 == 0).all() else np.full(len(boxes), -1.0)
    counts = (boxes[:, 6] != 0) & np.isin(kinds, _PEDESTRIAN)
    frames = max(length, int(boxes[:, 0].max(initial=0)))
    name = str(known.get("name", folder.name))
    return Sequence(name, folder, fps, frames, boxes[counts], boxes[np.isin(kinds, _DISTRACTORS)])

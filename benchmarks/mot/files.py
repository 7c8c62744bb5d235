"""Sequences of the MOT Challenge on disk: `seqinfo.ini`, `gt/gt.txt`, `det/det.txt`, and tracks in the same format.

A line of these is frame, id, left, top, width, height, score and more. Knows no trackers and no metrics.
"""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
"""(n, 8): frame, id, x1, y1, x2, y2, score and class; -1 where there is none."""

_PEDESTRIAN, _DISTRACTORS = (1, -1), (2, 7, 8, 12)


class MotError(Exception):
    """A sequence cannot be read; one line for the user."""


@dataclass(slots=True, frozen=True)
class Sequence:
    """A sequence.

    Attributes:
        name: of it.
        folder: where it is.
        fps: frames a second.
        frames: how many there are, numbered from 1.
        truth: the boxes of pedestrians that count.
        distractors: boxes of what looks like them; what is found there counts neither way.
    """

    name: str
    folder: Path
    fps: float
    frames: int
    truth: Rows
    distractors: Rows

    def detections(self) -> Rows:
        """The boxes in `det/det.txt`, without ids; scores that are none from 0 to 1 become 1.

        Raises:
            MotError: if it cannot be read.
        """
        rows = read_rows(self.folder / "det" / "det.txt")
        rows[:, 1] = -1
        if len(rows) and (rows[:, 6].min() < 0 or rows[:, 6].max() > 1):
            rows[:, 6] = 1.0
        return rows

    def media(self) -> Path:
        """Its frames: the folder of images, or the first video in its folder.

        Raises:
            MotError: if there are none.
        """
        if (self.folder / "img1").is_dir():
            return self.folder / "img1"
        videos = sorted(path for path in self.folder.iterdir() if path.suffix in (".mp4", ".mkv", ".avi", ".webm"))
        if not videos:
            raise MotError(f"{self.folder}: has neither a folder img1 nor a video: give --detections det")
        return videos[0]


def read_sequences(folder: Path) -> list[Sequence]:
    """The sequence in a folder, or all those in the folders in it, in the order of their names.

    Raises:
        MotError: if there is none, or one cannot be read.
    """
    found = (
        [folder]
        if (folder / "gt" / "gt.txt").is_file()
        else sorted(p.parent.parent for p in folder.glob("*/gt/gt.txt"))
    )
    if not found:
        raise MotError(f"{folder}: has no gt/gt.txt, nor a folder with one in it")
    return [_read(one) for one in found]


def read_rows(path: Path) -> Rows:
    """The lines of a file of boxes.

    Raises:
        MotError: if it cannot be read, or a line is not one of numbers.
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
            raise MotError(f"{path}:{number}: should be frame,id,left,top,width,height,score,…") from None
        score, kind = (*values[6:8], *(1.0, -1.0)[max(0, len(values) - 6) :])
        rows.append((frame, track, left, top, left + width, top + height, score, kind))
    table = np.array(rows, np.float64).reshape(-1, 8)
    if not np.isfinite(table).all():
        raise MotError(f"{path}: has numbers that are not finite")
    return table


def write_rows(path: Path, rows: Rows) -> None:
    """Write tracks as the MOT Challenge takes them.

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
        raise MotError(f"{folder / 'seqinfo.ini'}: frameRate should be above 0")
    boxes = read_rows(folder / "gt" / "gt.txt")
    # Files of 2015 have coordinates in the world where later ones have the class: those are no classes.
    kinds = boxes[:, 7] if len(boxes) and (boxes[:, 7] % 1 == 0).all() else np.full(len(boxes), -1.0)
    counts = (boxes[:, 6] != 0) & np.isin(kinds, _PEDESTRIAN)
    frames = max(length, int(boxes[:, 0].max(initial=0)))
    name = str(known.get("name", folder.name))
    return Sequence(name, folder, fps, frames, boxes[counts], boxes[np.isin(kinds, _DISTRACTORS)])

"""`python -m benchmarks mot` on sequences that are written here, from files to the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.mot.evaluate import track
from benchmarks.mot.files import MotError, read_rows, read_sequences, write_rows
from saccade.pipeline.analytics.tracker import TrackerSettings
from saccade.pipeline.errors import ConfigError
from tests.pipeline.analytics.scenes import straight, watch

PATHS = [straight((0.1, 0.5), (0.9, 0.5), 4), straight((0.9, 0.2), (0.1, 0.8), 4, hidden=(1, 1.5))]


def write_sequence(folder: Path, fps: float = 25) -> Path:
    """A sequence of two who cross, found with some noise."""
    lines: dict[str, list[str]] = {"gt": [], "det": []}
    truth, found = watch(PATHS, fps), watch(PATHS, fps, noise=0.02, miss=0.1)
    for kind, frames in (("gt", truth), ("det", found)):
        for number, seen in enumerate(frames, 1):
            for (x1, y1, x2, y2), path in zip(1000 * seen.boxes, seen.paths, strict=True):
                name, tail = (path + 1, "1,1,1") if kind == "gt" else (-1, "0.9,-1,-1,-1")
                lines[kind].append(f"{number},{name},{x1:.2f},{y1:.2f},{x2 - x1:.2f},{y2 - y1:.2f},{tail}")
    for kind, text in lines.items():
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{kind}.txt").write_text("\n".join(text) + "\n")
    info = f"[Sequence]\nname={folder.name}\nframeRate={fps:g}\nseqLength={len(truth)}\nimWidth=1000\nimHeight=1000\n"
    (folder / "seqinfo.ini").write_text(info)
    return folder


def test_a_folder_of_sequences_is_scored_and_written(tmp_path: Path) -> None:
    for name in ("A", "B"):
        write_sequence(tmp_path / "all" / name)
    out = tmp_path / "tracks"
    done = CliRunner().invoke(bench, ["mot", str(tmp_path / "all"), "--json", "--out", str(out)])
    scores = json.loads(done.output)
    assert list(scores) == ["A", "B", "all"]
    assert scores["A"] == scores["B"]
    assert (scores["A"]["mota"] > 0.85, scores["A"]["idf1"] > 0.9, scores["A"]["id_switches"]) == (True, True, 0)
    assert scores["all"]["true_boxes"] == 2 * scores["A"]["true_boxes"]
    written = read_rows(out / "A.txt")
    assert set(written[:, 1]) == {1, 2}
    table = CliRunner().invoke(bench, ["mot", str(tmp_path / "all" / "A"), "--every", "5"]).output
    assert [line.split()[0] for line in table.splitlines()] == ["MOTA", "A"]


def test_tracks_survive_being_written_and_read(tmp_path: Path) -> None:
    (sequence,) = read_sequences(write_sequence(tmp_path / "A"))
    tracks = track(sequence.detections(), sequence.fps, TrackerSettings())
    write_rows(tmp_path / "out" / "A.txt", tracks)
    assert abs(read_rows(tmp_path / "out" / "A.txt")[:, :6] - tracks[:, :6]).max() < 0.011


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("gt/gt.txt", "1,1,a,2,3,4\n", "gt.txt:1: each line must start with six numbers: frame"),
        ("gt/gt.txt", "1,1,2\n", "gt.txt:1: each line must start with six numbers: frame"),
        ("gt/gt.txt", "1,1,2,nan,3,4\n", "NaN or infinite"),
        ("seqinfo.ini", "[Sequence]\nframeRate=0\n", "frameRate"),
        ("seqinfo.ini", "frameRate=0\n", "seqinfo.ini"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    folder = write_sequence(tmp_path / "A")
    (folder / file).write_text(text)
    with pytest.raises(MotError, match=complaint):
        read_sequences(folder)


def test_a_folder_without_sequences_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, ["mot", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert "gt/gt.txt" in str(done.exception)
    choice = CliRunner().invoke(bench, ["mot", str(write_sequence(tmp_path / "A")), "--detections", "mine"])
    assert "--detections" in str(choice.exception)
    frames = CliRunner().invoke(bench, ["mot", str(tmp_path / "A"), "--detections", "model"])
    assert "img1" in str(frames.exception)

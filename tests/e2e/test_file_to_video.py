from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from tests.support import REPO
from tests.support.clips import MakeClip
from tests.support.command import Command, run_saccade

SHARED = REPO.parent / "shared" / "clips" / "one-by-one-person.mp4"
CLIP = SHARED if SHARED.exists() else REPO / "pipeline" / "assets" / "demo.mp4"  # the same frames
END_S = 12
FRAMES = 120

Box = tuple[float, float, float, float]

# Drawn by hand on every tenth frame: the one person there is, as fractions of width and height. There is none at 60
# and 70; at 50 only a shadow is.
STANDS_LEFT: Box = (0.50, 0.03, 0.67, 0.91)
STANDS_RIGHT: Box = (0.50, 0.00, 0.71, 0.88)
PEOPLE: dict[int, Box] = {
    **dict.fromkeys((0, 10, 20, 30), STANDS_LEFT),
    40: (0.66, 0.09, 0.95, 0.90),
    80: (0.28, 0.51, 0.56, 1.00),
    90: (0.465, 0.07, 0.68, 1.00),
    **dict.fromkeys(range(100, FRAMES, 10), STANDS_RIGHT),
}

pytestmark = pytest.mark.e2e


def overlap(a: Box, b: Box) -> float:
    """Intersection over union."""
    across = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - across
    return across / both


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("run")
    wanted = ["--detect", "person", "--end", END_S, "--out", "out.mp4", "--jsonl", "out.jsonl"]
    done = run_saccade("run", CLIP, *wanted, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{FRAMES} frames in ")
    return folder / "out.mp4", [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_every_frame_is_written_with_its_own_time(run: tuple[Path, list[dict[str, Any]]]) -> None:
    video, records = run
    with av.open(str(CLIP)) as container:
        times = [frame.pts * frame.time_base for frame in container.decode(video=0)][:FRAMES]
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.width, stream.height) == ("h264", "yuv420p", 640, 360)
        assert [frame.pts * frame.time_base for frame in container.decode(video=0)] == times
    assert [record["frame"] for record in records] == list(range(FRAMES))
    assert [record["pts"] * Fraction(record["time_base"]) for record in records] == times
    assert all(record["dropped_since_last"] == 0 for record in records)


def test_people_are_found_where_they_are(run: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = run
    found = [
        number
        for number, person in PEOPLE.items()
        if any(
            thing["label"] == "person" and overlap(tuple(thing["box_norm"]), person) >= 0.5
            for thing in records[number]["objects"]
        )
    ]
    assert len(found) >= len(PEOPLE) / 3, f"a person was found only in frames {found}"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_damaged_file_shows_in_summary_and_exit_code(
    make_clip: MakeClip, saccade: Command, tmp_path: Path, damaged: bool
) -> None:
    clip = make_clip("clip.ts", frames=30, noise=True)
    if damaged:
        data, chance = bytearray(clip.read_bytes()), random.Random(7)
        for _ in range(300):
            data[chance.randrange(2000, len(data))] ^= 0xFF
        clip.write_bytes(data)
    done = saccade("run", clip, "--detect", "person", "--jsonl", "found.jsonl", cwd=tmp_path)
    assert done.returncode == damaged, done.stderr
    assert ("damaged packets skipped" in done.stdout) == damaged
    assert (f"{clip} is damaged" in done.stderr) == damaged

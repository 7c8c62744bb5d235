"""A run over a damaged file says so and ends with an exit code of its own."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPO
from tests.support.clips import MakeClip

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("damaged", [False, True])
def test_a_damaged_file_shows_in_summary_and_exit_code(make_clip: MakeClip, tmp_path: Path, damaged: bool) -> None:
    clip = make_clip("clip.ts", frames=30, noise=True)
    if damaged:
        data, chance = bytearray(clip.read_bytes()), random.Random(7)
        for _ in range(300):
            data[chance.randrange(2000, len(data))] ^= 0xFF
        clip.write_bytes(data)
    command = [sys.executable, "-m", "saccade", "run", str(clip), "--detect", "person"]
    done = subprocess.run(
        [*command, "--jsonl", str(tmp_path / "found.jsonl")],
        cwd=REPO, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == damaged, done.stderr
    assert ("damaged packets skipped" in done.stdout) == damaged
    assert (f"{clip} is damaged" in done.stderr) == damaged

"""Files that end before their video does, as a copy that has not come to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.sources import FileSource
from tests.support import REPO
from tests.support.clips import MakeClip

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"  # its index comes first, as in most files from the net


def test_what_a_file_lacks_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(CLIP.read_bytes()[:100_000])
    with FileSource(path) as source:
        frames = sum(1 for _ in source)
        assert 40 < frames < 60
        assert 198 <= frames + source.corrupt_packets <= 200  # the last ones may need others that are not there
    with FileSource(path, end=2) as source:
        assert sum(1 for _ in source) == 20
        assert source.corrupt_packets == 0  # nothing is lost of what was asked for


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.mov", "clip.avi", "clip.ts", "clip.webm"])
@pytest.mark.parametrize("audio", [None, "aac"])
def test_a_whole_file_lacks_nothing(make_clip: MakeClip, name: str, audio: str | None) -> None:
    codec, audio = ("libvpx", audio and "libopus") if name.endswith(".webm") else ("libx264", audio)
    with FileSource(make_clip(name, codec=codec, audio=audio), start=0.5) as source:
        assert list(source)
        assert source.corrupt_packets == 0

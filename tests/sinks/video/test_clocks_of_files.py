"""Files whose clocks jump, repeat or begin elsewhere, on their way into an MP4: video and sound stay together."""

from __future__ import annotations

import itertools
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from saccade.sinks import Mp4Sink
from saccade.sinks.video.segmented_mp4 import RecordingSink
from saccade.sources import FileSource
from tests.support import REPO
from tests.support.clips import MakeClip, number_of
from tests.support.remux import joined, moved_by, remux, retimed
from tests.support.sinks.mp4 import audio_packets
from tests.support.sinks.results import LATENCY, NOTHING


def written(source: FileSource, path: Path) -> list[float]:
    """Write a file; the times of its frames, as they were read."""
    sink = Mp4Sink(path, rate=source.info.average_rate, audio_from=source.info.url)
    times = []
    for frame in source:
        times.append(frame.captured_at)
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    return times


def shown(path: Path) -> list[tuple[float, int]]:
    return [(float(frame.pts * frame.time_base), number_of(frame.image)) for frame in FileSource(path)]


@pytest.fixture
def parts(make_clip: MakeClip, tmp_path: Path) -> list[Path]:
    """Two clips of 1.2 s with sound as MPEG-TS, on clocks that begin near 0."""
    return [make_clip(name, frames=30, audio="aac") for name in ("a.ts", "b.ts")]


@pytest.mark.parametrize(
    ("first", "second"),
    [(100, 5), (30, 5), (5, 20_000), (5, 30), (95_400, 2), (10, 9)],
    ids=["far back, as if it had wrapped", "back", "far ahead", "ahead", "wrapped", "a second back"],
)
def test_joined_recordings_lose_neither_time_nor_sound(
    parts: list[Path], tmp_path: Path, first: float, second: float, caplog: pytest.LogCaptureFixture
) -> None:
    moved = [
        remux(part, tmp_path / f"moved{number}.ts", moved_by(seconds))
        for number, (part, seconds) in enumerate(zip(parts, (first, second), strict=True))
    ]
    source = FileSource(joined(tmp_path / "joined.ts", *moved))
    times = written(source, tmp_path / "out.mp4")
    assert times[0] == 0
    assert [number for _, number in shown(tmp_path / "out.mp4")] == [*range(30), *range(30)]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sorted(steps)[:-1] == pytest.approx([0.04] * 58, abs=0.001)
    assert 0 < max(steps) < 0.15
    sound = audio_packets(tmp_path / "out.mp4")
    assert len(sound) >= 110  # of 116
    assert all(b > a for (a, _), (b, _) in itertools.pairwise(sound))
    assert max(b - a for (a, _), (b, _) in itertools.pairwise(sound)) < 0.1
    assert sound[-1][0] == pytest.approx(shown(tmp_path / "out.mp4")[-1][0], abs=0.1)
    assert not caplog.records


def test_a_jump_within_a_recording_of_segments(parts: list[Path], tmp_path: Path) -> None:
    ahead = remux(parts[1], tmp_path / "ahead.ts", moved_by(20_000))
    source = FileSource(joined(tmp_path / "joined.ts", parts[0], ahead))
    sink = RecordingSink(tmp_path / "out-%H%M%S.mp4", audio_from=source.info.url, length_s=1)
    for frame in source:
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    files = sorted(tmp_path.glob("out-*.mp4"), key=lambda path: path.stat().st_mtime_ns)
    assert [number for path in files for _, number in shown(path)] == [*range(30), *range(30)]
    assert sum(len(audio_packets(path)) for path in files) >= 108


SPOILT: dict[str, Callable[[int, int], int]] = {
    "equal": lambda number, pts: pts - 14 * 1920 if number % 15 == 14 else pts,
    "all equal": lambda number, pts: 90_000 if number >= 2 else pts,
    "far ahead": lambda number, pts: pts + 40_000 * 90_000 * (number == 2),
    "far ahead, twice": lambda number, pts: pts + 40_000 * 90_000 * (number in (1, 2)),
    "gap": lambda number, pts: pts + 80_000 * 90_000 * (number >= 2),
    "back": lambda number, pts: 0 if number == 2 else pts,
    "any": lambda number, pts: random.Random(number).randrange(2**33),
}
"""What is done to the times of an MPEG-TS's packets of sound, of which each holds several of its frames."""


@pytest.mark.parametrize("kind", SPOILT)
def test_sound_with_wrong_times_costs_no_frame(make_clip: MakeClip, tmp_path: Path, kind: str) -> None:
    path = retimed(make_clip("right.ts", frames=50, audio="aac"), tmp_path / "spoilt.ts", SPOILT[kind])
    written(FileSource(path), tmp_path / "out.mp4")
    assert [number for _, number in shown(tmp_path / "out.mp4")] == list(range(50))
    sound = audio_packets(tmp_path / "out.mp4")
    assert all(b > a for (a, _), (b, _) in itertools.pairwise(sound))
    assert sound[-1][0] < 2.2
    if kind not in ("all equal", "any"):
        assert len(sound) >= 80  # of 94


@pytest.mark.parametrize("back", [0, 5])
def test_equal_times_in_matroska(make_clip: MakeClip, tmp_path: Path, back: int) -> None:
    def change(packet: Any, number: int) -> None:
        if packet.stream.type == "audio" and 20 <= number <= 20 + back:
            packet.pts = packet.dts = round(Fraction(19 * 1024, 48_000) / packet.time_base)

    path = remux(make_clip("right.mp4", frames=50, audio="aac"), tmp_path / "equal.mkv", change)
    written(FileSource(path), tmp_path / "out.mp4")
    assert [number for _, number in shown(tmp_path / "out.mp4")] == list(range(50))
    assert len(audio_packets(tmp_path / "out.mp4")) >= 93 - back


def test_sound_from_before_the_video_is_kept_or_said_to_be_left_out(
    make_clip: MakeClip, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_clip("whole.mp4", frames=50, audio="aac")

    def later(seconds: float) -> Any:
        def change(packet: Any, number: int) -> None:
            if packet.stream.type == "video":
                moved_by(seconds)(packet, number)

        return change

    written(FileSource(remux(whole, tmp_path / "early.mkv", later(0.5))), tmp_path / "kept.mp4")
    assert audio_packets(tmp_path / "kept.mp4")[0][0] < 0.1
    assert shown(tmp_path / "kept.mp4")[0][0] == pytest.approx(0.5, abs=0.1)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        written(FileSource(remux(whole, tmp_path / "late.mkv", later(1.5))), tmp_path / "cut.mp4")
    assert "s of audio were omitted" in caplog.text
    assert shown(tmp_path / "cut.mp4")[0][0] == 0
    caplog.clear()
    written(FileSource(whole, start=1.2), tmp_path / "asked.mp4")
    assert not caplog.records  # as it was asked for


@pytest.mark.parametrize("begins", [-0.6, 0, 10, 50_000])
@pytest.mark.parametrize("name", ["moved.ts", "moved.mkv", "moved.mp4"])
def test_times_count_from_the_beginning_of_the_video(
    make_clip: MakeClip, tmp_path: Path, name: str, begins: float
) -> None:
    if begins < 0 and not name.endswith(".mp4"):
        pytest.skip("there are no negative timestamps in it")
    path = remux(make_clip("clip.mp4", frames=50), tmp_path / name, moved_by(begins))
    source = FileSource(path)
    frames = [(frame.captured_at, number_of(frame.image)) for frame in source]
    first = frames[0][1]  # players leave out what is before 0
    assert [number for _, number in frames] == list(range(first, 50))
    assert [time for time, _ in frames] == pytest.approx([n / 25 for n in range(50 - first)], abs=0.002)
    if begins >= 0:
        cut = [(frame.captured_at, number_of(frame.image)) for frame in FileSource(path, start=1, end=1.6)]
        assert [number for _, number in cut] == list(range(25, 40))
        assert cut[0][0] == pytest.approx(1, abs=0.002)
        with pytest.raises(Exception, match="past the end"):
            list(FileSource(path, start=9))


def test_a_start_behind_a_jump_is_where_it_is_shown(parts: list[Path], tmp_path: Path) -> None:
    lower = remux(parts[1], tmp_path / "lower.ts", moved_by(5))
    path = joined(tmp_path / "joined.ts", remux(parts[0], tmp_path / "high.ts", moved_by(100)), lower)
    whole = [(frame.captured_at, number_of(frame.image)) for frame in FileSource(path)]
    assert len(whole) == 60
    for start in (0.5, 1.3, 2.0):
        source = FileSource(path, start=start)
        for _ in range(2):  # the second time by its index
            got = [(frame.captured_at, number_of(frame.image)) for frame in source]
            assert got == [one for one in whole if one[0] >= start]


@pytest.mark.parametrize("name", ["gap.mkv", "gap.mp4"])
def test_sound_that_goes_on_after_the_video_is_said_to_be_left_out(
    make_clip: MakeClip, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def change(packet: Any, number: int) -> None:
        if packet.stream.type == "audio" and number >= 20:
            moved_by(30)(packet, number)

    written(
        FileSource(remux(make_clip("clip.mp4", frames=50, audio="aac"), tmp_path / name, change)), tmp_path / "out.mp4"
    )
    assert 19 <= len(audio_packets(tmp_path / "out.mp4")) <= 20
    assert FileSource(tmp_path / "out.mp4").info.duration_s == pytest.approx(2, abs=0.1)
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert container.duration is not None
        assert container.duration / 1e6 == pytest.approx(2, abs=0.1)  # the last packet does not last for the gap
    assert "audio ends early, because its timestamps jump" in caplog.text


WRITE_ALL = """
import sys
from pathlib import Path
from saccade.pipeline.events.storage.clips import copy_clip
from saccade.sinks import Mp4Sink
from saccade.sources import FileSource
from tests.support.sinks.results import LATENCY, NOTHING
for path in map(Path, sys.argv[1:]):
    source = FileSource(path)
    sink = Mp4Sink(path.with_suffix(".mp4"), rate=source.info.average_rate, audio_from=path)
    times = []
    for frame in source:
        times.append(frame.captured_at)
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    assert len(times) >= 20 and times == sorted(set(times)) and times[-1] - times[0] < 600, (path, times)
    copy_clip(source.index, times[-1] / 2, times[-1], path.with_suffix(".clip.mp4"))
print("all written")
"""


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_no_time_in_a_file_ends_the_process(make_clip: MakeClip, tmp_path: Path, share: float) -> None:
    clip = make_clip("right.ts", frames=30, audio="aac")
    chance = random.Random(share)

    def change(number: int, pts: int) -> int:
        if chance.random() > share:
            return pts
        return chance.choice([0, 2**33 - 1, chance.randrange(2**33), pts + chance.randint(-20, 20) * 90_000])

    paths = [retimed(clip, tmp_path / f"{number}.ts", change, video=True) for number in range(12)]
    command = [sys.executable, "-c", WRITE_ALL, *map(str, paths)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert (ended.returncode, ended.stdout) == (0, "all written\n"), ended.stderr[-2000:]


def test_no_other_way_leads_into_a_muxer() -> None:
    """Every packet that is written has times that FFmpeg takes: there is one call of `mux_one`, and none of `mux`."""
    found = [
        f"{path.relative_to(REPO)}: {line.strip()}"
        for package in ("engine", "pipeline", "sinks", "sources")
        for path in (REPO / package).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if ".mux_one(" in line or (".mux(" in line and "muxer.mux(" not in line)
    ]
    assert found == ["sinks/video/muxer.py: self._container.mux_one(packet)"]

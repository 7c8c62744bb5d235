"""Recordings in segments: where they are cut, what they are called, that their times add up, and a kill."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sinks import Mp4Sink, RecordingSink, SinkError, open_sink
from saccade.sinks.video import mp4_writer
from saccade.sinks.video import part_file as part_file_module
from saccade.sinks.video.encoder import Mp4Encoder, VideoFormat
from saccade.sinks.video.segments import GAP_S, Segmenter, SegmentNames
from saccade.sources import FileSource, Frame
from tests.support import REPO
from tests.support.clips import MakeClip, number_of
from tests.support.sinks.mp4 import audio_packets, top_boxes
from tests.support.sinks.results import LATENCY, NOTHING, file_frame

BASE = Fraction(1, 90000)
NTSC = Fraction(1001, 30000)
SMALL, LARGE = (160, 120), (320, 240)

# Length of a segment, frames as (seconds, size), and which of them begin one.
CUTS = {
    "nothing but the first": (10, [(n, SMALL) for n in range(5)], [0]),
    "by time": (2, [(n / 2, SMALL) for n in range(10)], [0, 4, 8]),
    "counted from the first frame": (2, [(100 + n, SMALL) for n in range(5)], [0, 2, 4]),
    "a short gap is kept": (100, [(0, SMALL), (1, SMALL), (1 + GAP_S, SMALL)], [0]),
    "a long one is not": (100, [(0, SMALL), (1, SMALL), (1.1 + GAP_S, SMALL), (2.1 + GAP_S, SMALL)], [0, 2]),
    "back in time": (100, [(5, SMALL), (6, SMALL), (5.5, SMALL), (6.5, SMALL)], [0, 2]),
    "the same time again": (100, [(5, SMALL), (5, SMALL)], [0, 1]),
    "another size": (100, [(0, SMALL), (1, LARGE), (2, LARGE), (3, SMALL)], [0, 1, 3]),
    "a frame an hour": (60, [(3600 * n, SMALL) for n in range(3)], [0, 1, 2]),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_segment_begins_where_expected(case: str) -> None:
    length_s, frames, expected = CUTS[case]
    segmenter = Segmenter(length_s)
    found = [n for n, (t, size) in enumerate(frames) if segmenter.starts_segment(round(Fraction(t) / BASE), BASE, size)]
    assert found == expected


def test_a_clock_in_other_units_begins_a_segment() -> None:
    segmenter = Segmenter(10)
    assert [segmenter.starts_segment(n, base, SMALL) for n, base in ((0, BASE), (1, BASE), (2, Fraction(1, 1000)))] == [
        True,
        False,
        True,
    ]


@given(st.lists(st.tuples(st.integers(-(10**7), 10**7), st.booleans()), min_size=1, max_size=60), st.integers(1, 20))
def test_a_segment_has_one_size_and_a_bounded_length(steps: list[tuple[int, bool]], length_s: int) -> None:
    segmenter, pts = Segmenter(length_s), 0
    segments: list[list[tuple[int, tuple[int, int]]]] = []
    for step, large in steps:
        pts += step
        size = LARGE if large else SMALL
        if segmenter.starts_segment(pts, BASE, size):
            segments.append([])
        segments[-1].append((pts, size))
    for segment in segments:
        assert len({size for _, size in segment}) == 1
        assert all(0 < (b - a) * BASE <= GAP_S for (a, _), (b, _) in itertools.pairwise(segment))
        assert (segment[-1][0] - segment[0][0]) * BASE < length_s


NAMES = {
    "door-%Y%m%d-%H%M%S.mp4": "door-20261121-173637.mp4",
    "out.mp4": "out-20261121-173637.mp4",
    "a/out.mp4": "a/out-20261121-173637.mp4",
    "%Y-%m-%d/door/%H.mp4": "2026-11-21/door/17.mp4",
    "/rec/%Y/%H%M.mp4": "/rec/2026/1736.mp4",
    "100%.mp4": "100%-20261121-173637.mp4",
    "100%%-%H.mp4": "100%-17.mp4",
}


@pytest.mark.parametrize("pattern", NAMES)
def test_segment_names_hold_the_time(pattern: str) -> None:
    names = SegmentNames(pattern)
    path = names.at(datetime(2026, 11, 21, 17, 36, 37, tzinfo=UTC))
    assert str(path) == NAMES[pattern]
    again = names.at(datetime(2026, 11, 21, 17, 36, 37, tzinfo=UTC), 2)
    assert str(again) == NAMES[pattern].replace(".mp4", "-2.mp4")
    assert names.root in path.parents


def record(folder: Path, frames: list[Frame], length_s: float) -> list[FileSource]:
    """What was written, in the order of writing."""
    sink = RecordingSink(folder / "%Y%m%d.mp4", length_s=length_s)  # all on one day, hence numbered
    for frame in frames:
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    sink.close()
    paths = sorted(folder.glob("*.mp4"), key=lambda path: (len(path.name), path.name))
    assert all("moof" not in top_boxes(path) for path in paths)
    return [FileSource(path) for path in paths]


CLOCKS = {
    "29.97 a second": ([n * 3003 for n in range(210)], BASE),
    "29.97 a second, from the middle": ([2**33 + n * 3003 for n in range(210)], BASE),
    "variable": ([0, 33, 100, 101, 1990, 2050, 2400, 2433, 3990, 7200, 7233, 7299], Fraction(1, 1000)),
    "a camera that was away": ([n * 3600 for n in range(30)] + [n * 3600 + 12 * 90000 for n in range(30, 90)], BASE),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_segments_begin_at_zero_and_their_times_add_up(tmp_path: Path, clock: str) -> None:
    stamps, base = CLOCKS[clock]
    segments = record(tmp_path, [file_frame(pts, base, n % 256) for n, pts in enumerate(stamps)], 2)
    assert len(segments) > 1
    read = [list(segment) for segment in segments]
    assert [number_of(f.image) for f in itertools.chain(*read)] == [n % 256 for n in range(len(stamps))]
    at = Fraction(stamps[0] * base)
    placed = []
    for segment, frames in zip(segments, read, strict=True):
        assert frames[0].pts == 0
        placed += [at + f.pts * f.time_base for f in frames]
        assert segment.info.duration_s is not None
        at += Fraction(segment.info.duration_s).limit_denominator(base.denominator)
    assert placed == [pts * base for pts in stamps]
    assert at == (2 * stamps[-1] - stamps[-2]) * base


def test_segments_of_one_format_share_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    class Counted(Mp4Encoder):
        def __init__(self, form: VideoFormat) -> None:
            opened.append((form.width, form.height))
            super().__init__(form)

    monkeypatch.setattr(mp4_writer, "Mp4Encoder", Counted)
    frames = [file_frame(n * 3600, BASE, n, LARGE if 150 <= n < 200 else SMALL) for n in range(250)]
    segments = record(tmp_path, frames, 2)
    assert opened == [SMALL, LARGE, SMALL]
    assert [sum(1 for _ in segment) for segment in segments] == [50] * 5


def test_a_long_gap_is_not_recorded(tmp_path: Path) -> None:
    stamps = [0, 9000, 18000, 18000 + 40 * 90000, 27000 + 40 * 90000]
    segments = record(tmp_path, [file_frame(pts, BASE, n) for n, pts in enumerate(stamps)], 600)
    assert [segment.info.duration_s for segment in segments] == [pytest.approx(0.3), pytest.approx(0.2)]


def test_a_new_size_and_a_clock_set_back_begin_a_file(tmp_path: Path) -> None:
    frames = [file_frame(n * 3600, BASE, n, SMALL if n < 5 else LARGE) for n in range(10)]
    frames += [file_frame(n * 3600, BASE, n, LARGE) for n in range(3)]
    segments = record(tmp_path, frames, 600)
    assert [[(f.width, f.height) for f in segment] for segment in segments] == [[SMALL] * 5, [LARGE] * 5, [LARGE] * 3]


def test_existing_files_are_kept(tmp_path: Path) -> None:
    for _ in range(3):
        sink = RecordingSink(tmp_path / "%Y" / "all.mp4")
        sink.write(file_frame(0, BASE), NOTHING, LATENCY)
        sink.close()
    (year,) = tmp_path.iterdir()
    assert sorted(os.listdir(year)) == ["all-1.mp4", "all-2.mp4", "all.mp4"]
    assert all((year / name).stat().st_size > 500 for name in os.listdir(year))


def test_audio_is_divided_among_the_segments(make_clip: MakeClip, tmp_path: Path) -> None:
    clip = make_clip(frames=75, audio="aac")
    sink = RecordingSink(tmp_path / "out-%Y.mp4", length_s=1, audio_from=clip)
    for frame in FileSource(clip):
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    paths = sorted(tmp_path.glob("out-*.mp4"), key=lambda path: (len(path.name), path.name))
    assert len(paths) == 3
    audios = [audio_packets(path) for path in paths]
    assert all(0 <= audio[0][0] < 0.03 for audio in audios)
    before = [size for time, size in audio_packets(clip) if time >= 0]  # without the encoder's priming
    after = [size for audio in audios for _, size in audio]
    assert after == before[: len(after)]
    assert len(after) >= len(before) - 3


KILLED = """
import sys, os, signal
from fractions import Fraction
sys.path.insert(0, sys.argv[1])
from tests.support.sinks.results import LATENCY, NOTHING, file_frame
from saccade.sinks import open_sink
sink = open_sink(sys.argv[2] + "?segment=3")
for n in range(200):
    sink.write(file_frame(n * 3600, Fraction(1, 90000), n), NOTHING, LATENCY)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_only_the_end_of_the_last_segment(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(REPO), str(tmp_path / "%Y.mp4")], check=False)
    assert ended.returncode == -signal.SIGKILL
    paths = sorted(tmp_path.glob("*.mp4*"), key=lambda path: (len(path.name), path.name))
    # 200 frames at 25 a second, 75 a segment, a key frame every 2 s: of 150–199, no group was whole yet.
    whole = [number_of(f.image) for path in paths[:2] for f in FileSource(path)]
    assert whole == list(range(150))
    assert [path.suffix for path in paths] == [".mp4", ".mp4", ".part"]


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("out.mp4", Mp4Sink),
        ("100%.mp4", Mp4Sink),
        ("what?.mp4", Mp4Sink),
        ("door-%Y%m%d-%H%M%S.mp4", RecordingSink),
        ("out.mp4?segment=60", RecordingSink),
        ("%H.M4V?segment=1h", RecordingSink),
    ],
)
def test_the_target_decides_whether_there_are_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, kind: type
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = open_sink(target)
    assert type(sink) is kind
    assert not sink.shared
    sink.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("no/such/%H.mp4", "cannot write no/such/%H.mp4: the folder no/such does not exist"),
        ("out.mp4?segment=0", "out.mp4: segment should be a time such as 90, 10m, 1h or 7d, not '0'"),
        ("out.mp4?segment=soon", "segment should be a time"),
        ("out.mp4?segment=1.2.3", "segment should be a time"),
        ("out.mp4?segmet=60", "out.mp4: unknown option 'segmet'; did you mean 'segment'?"),
        ("out.mp4?keep=60", "out.mp4: keep should be a time such as 12h or 7d, not '60'"),
    ],
)
def test_an_invalid_recording_is_refused_in_one_line(target: str, expected: str) -> None:
    with pytest.raises(SinkError) as caught:
        open_sink(target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_a_folder_is_one_line(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "%Y" / "a.mp4")
    (tmp_path / f"{datetime.now().astimezone():%Y}").touch()
    with pytest.raises(SinkError, match=r"^cannot write .+a.mp4: File exists$"):
        sink.write(file_frame(0, BASE), NOTHING, LATENCY)
    sink.close()


def test_a_deleted_folder_is_one_line_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_file_module, "_CHECK_S", 0.0)
    folder = tmp_path / "rec"
    folder.mkdir()
    sink = RecordingSink(folder / "%Y" / "a.mp4")
    sink.write(file_frame(0, BASE), NOTHING, LATENCY)
    shutil.rmtree(folder)
    for n in range(1, 4):
        with pytest.raises(SinkError, match=r"^cannot write .+/rec/%Y/a.mp4: the folder .+/rec no longer exists$"):
            sink.write(file_frame(n * 3600, BASE, n), NOTHING, LATENCY)
    folder.mkdir()
    for n in range(4, 10):
        sink.write(file_frame(n * 3600, BASE, n), NOTHING, LATENCY)
    sink.close()
    (path,) = folder.rglob("*.mp4")
    assert [number_of(f.image) for f in FileSource(path)] == list(range(4, 10))


OWNED = {
    "door-%Y%m%d-%H%M%S.mp4": ("door-20261121-173637.mp4 door-20261121-173637-2.mp4 door-20261121-173637.mp4.part", ""),
    "%Y/%b/100%%.mp4": ("2026/Nov/100%.mp4 1999/Jan/100%-1.mp4", ""),
    "out.mp4": ("out-20261121-173637.mp4", "out.mp4 out-2.mp4 about-20261121-173637.mp4 out-20261121-173637.mp4.txt"),
}


@pytest.mark.parametrize("pattern", OWNED)
def test_a_recording_knows_its_files_from_others(pattern: str) -> None:
    names = SegmentNames(pattern)
    mine, others = (text.split() for text in OWNED[pattern])
    assert [names.owns(Path(name)) for name in mine] == [True] * len(mine)
    assert [names.owns(Path(name)) for name in others] == [False] * len(others)


def test_the_oldest_segments_are_deleted_and_never_the_current(tmp_path: Path) -> None:
    def record_one() -> int:
        sink = open_sink(f"{tmp_path}/%Y/%j/%f.mp4?max_gb=0.00003")
        for n in range(30):
            sink.write(file_frame(n * 3600, BASE, n), NOTHING, LATENCY)
        sink.close()
        newest = max(tmp_path.rglob("*.mp4"), key=lambda path: path.stat().st_mtime)
        return newest.stat().st_size

    (tmp_path / "2025/001").mkdir(parents=True)
    (tmp_path / "2025/001/123456.mp4").write_bytes(bytes(30_000))
    (tmp_path / "2025/001/kept.txt").touch()
    os.utime(tmp_path / "2025/001/123456.mp4", (1, 1))
    (tmp_path / "2024/001").mkdir(parents=True)
    (tmp_path / "2024/001/123456.mp4.part").write_bytes(bytes(30_000))
    os.utime(tmp_path / "2024/001/123456.mp4.part", (1, 1))
    size = record_one()
    assert size < 30_000
    for _ in range(40_000 // size + 2):
        record_one()
    left = list(tmp_path.rglob("*.mp4*"))
    total = sum(path.stat().st_size for path in left)
    assert 0 < total - size <= 30_000  # the last one began within the limit
    assert sorted(os.listdir(tmp_path))[0] == "2025"  # and the empty folders went, too
    assert os.listdir(tmp_path / "2025/001") == ["kept.txt"]


def test_segments_past_their_age_are_deleted(tmp_path: Path) -> None:
    old, young, foreign = (tmp_path / name for name in ("a-2025.mp4", "a-2026.mp4", "b-2025.mp4"))
    for path, days in ((old, 8), (young, 6), (foreign, 8)):
        path.touch()
        os.utime(path, (time.time() - days * 86400,) * 2)
    sink = open_sink(f"{tmp_path}/a-%Y.mp4?keep=7d")
    sink.write(file_frame(0, BASE), NOTHING, LATENCY)
    assert [path.exists() for path in (old, young, foreign)] == [False, True, True]
    sink.close()


def test_another_aspect_of_pixels_begins_a_file(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "out-%H%M%S.mp4")
    for number in range(20):
        aspect = Fraction(1) if number < 10 else Fraction(4, 3)
        sink.write(replace(file_frame(number, Fraction(1, 10), number), pixel_aspect=aspect), NOTHING, LATENCY)
    sink.close()
    files = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [{frame.pixel_aspect for frame in FileSource(path)} for path in files] == [{Fraction(1)}, {Fraction(4, 3)}]

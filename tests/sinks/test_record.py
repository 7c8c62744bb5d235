"""The record on the wire, JSON lines, and the choice of sinks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result, Spot, Text
from saccade.sinks import (
    CallbackSink,
    DisplaySink,
    JsonlSink,
    Latency,
    Mp4Sink,
    SinkClosedError,
    SinkError,
    make_record,
    open_sink,
)
from saccade.sinks.record import drawn_latency
from saccade.sources import Frame
from tests.support import REPO

FRAME = Frame(
    image=np.zeros((720, 1280, 3), np.uint8),
    stream="door",
    index=1042,
    pts=3751200,
    time_base=Fraction(1, 90000),
    captured_at=1795262111.4821,
    capture_clock="rtcp",
    decoded_at=12.0,
    decode_ms=2.5,
    dropped_before=3,
)
RESULT = Result(
    Detections((Box("person", 0.9312, 0.25, 0.5, 0.75, 1.0),), 1280, 720),
    Points((Spot("cup", 0.5, 1 / 3, 0.125),), 1280, 720),
    (Text("what is it", "ein Fuß"),),
)
LATENCY = Latency(decode=2.5, queue=0.126, prefill=12.0, decode_tokens=9.5, total=24.126)

RECORD = {
    "schema": "saccade/1",
    "stream": "door",
    "frame": 1042,
    "pts": 3751200,
    "time_base": "1/90000",
    "captured_at": 1795262111.482,
    "capture_clock": "rtcp",
    "width": 1280,
    "height": 720,
    "latency_ms": {"decode": 2.5, "queue": 0.13, "prefill": 12.0, "decode_tokens": 9.5, "track": 0.0, "total": 24.13},
    "dropped_since_last": 3,
    "objects": [
        {"label": "person", "score": 0.931, "box": [320.0, 360.0, 960.0, 720.0], "box_norm": [0.25, 0.5, 0.75, 1.0]}
    ],
    "points": [{"label": "cup", "score": 0.5, "x": 426.7, "y": 90.0, "x_norm": 0.33333, "y_norm": 0.125}],
    "answers": [{"prompt": "what is it", "text": "ein Fuß"}],
}


def test_the_record_has_exactly_these_words() -> None:
    assert make_record(FRAME, RESULT, LATENCY) == RECORD
    assert list(make_record(FRAME, RESULT, LATENCY)) == list(RECORD)


def test_every_bin_of_a_coordinate_stays_distinct() -> None:
    boxes = tuple(Box("x", 0.5, n / 1024, 0.0, 1.0, 1.0) for n in range(1024))
    record = make_record(FRAME, Result(Detections(boxes, 1, 1), Points((), 1, 1)), LATENCY)
    assert [round(o["box_norm"][0] * 1024) for o in record["objects"]] == list(range(1024))


def test_a_picture_tells_its_age_when_live_and_the_work_when_read_from_a_file() -> None:
    assert drawn_latency(FRAME, LATENCY) == LATENCY.total
    assert drawn_latency(replace(FRAME, capture_clock="file"), LATENCY) == pytest.approx(24.0)


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = JsonlSink(path)
    for count in (1, 2, 3):
        sink.write(FRAME, RESULT, LATENCY)
        assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [RECORD] * count
    sink.close()
    sink.close()


STDOUT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.sinks.test_record import FRAME, RESULT, LATENCY
from saccade.sinks import SinkClosedError, open_sink
sink = open_sink("-")
try:
    for _ in range(int(sys.argv[2])):
        sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    print("end")
except SinkClosedError:
    sys.stderr.write("closed")
"""


def test_a_dash_is_standard_output_and_stays_open() -> None:
    ended = subprocess.run([sys.executable, "-c", STDOUT, str(REPO), "2"], capture_output=True, check=True)
    lines = ended.stdout.decode().splitlines()
    assert [json.loads(line) for line in lines[:2]] == [RECORD, RECORD]
    assert lines[2] == "end"


def test_a_reader_that_has_gone_closes_the_sink() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STDOUT, str(REPO), "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert json.loads(writer.stdout.readline()) == RECORD
        writer.stdout.close()
        assert writer.stderr.read() == b"closed"
    assert writer.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_line() -> None:
    sink = JsonlSink("/dev/full")
    with pytest.raises(SinkError, match="cannot write /dev/full: No space left on device"):
        sink.write(FRAME, RESULT, LATENCY)
    with pytest.raises(SinkError, match="cannot finish /dev/full"):
        sink.close()
    sink.close()


def numbered(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_bytes().splitlines()]


def test_a_file_is_rotated_at_a_line_and_the_oldest_go(tmp_path: Path) -> None:
    line = len(json.dumps(RECORD, ensure_ascii=False, separators=(",", ":")).encode()) + 1
    sink = open_sink(f"{tmp_path}/out.jsonl?max_mb={3.5 * line / 1e6}&keep=2")
    for index in range(1000, 1011):
        sink.write(replace(FRAME, index=index), RESULT, LATENCY)
    sink.close()
    assert {path.name: numbered(path) for path in tmp_path.iterdir()} == {
        "out.jsonl": [1009, 1010],
        "out.jsonl.1": [1006, 1007, 1008],
        "out.jsonl.2": [1003, 1004, 1005],
    }


def test_a_rotated_file_is_continued_and_half_a_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for index in (1, 2):
        sink = JsonlSink(path, max_bytes=10_000)
        sink.write(replace(FRAME, index=index), RESULT, LATENCY)
        sink.close()
    assert numbered(path) == [1, 2]
    with path.open("ab") as torn:
        torn.write(b'{"half')
    sink = JsonlSink(path, max_bytes=10_000)
    sink.write(replace(FRAME, index=3), RESULT, LATENCY)
    sink.close()
    lines = path.read_bytes().splitlines()
    assert lines[2] == b'{"half'
    assert json.loads(lines[3])["frame"] == 3
    assert len(lines) == 4


def test_a_line_longer_than_a_file_may_be_is_still_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "out.jsonl", max_bytes=1, keep=3)
    for index in (1, 2):
        sink.write(replace(FRAME, index=index), RESULT, LATENCY)
    sink.close()
    assert numbered(tmp_path / "out.jsonl.1") == [1]
    assert numbered(tmp_path / "out.jsonl") == [2]


def test_several_streams_write_whole_lines(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "out.jsonl", max_bytes=20_000, keep=100)
    assert sink.shared

    def run(stream: str) -> None:
        for index in range(100):
            sink.write(replace(FRAME, stream=stream, index=index), RESULT, LATENCY)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    paths = sorted(tmp_path.iterdir(), key=lambda path: -int(path.suffix[1:]) if path.suffix != ".jsonl" else 0)
    assert len(paths) > 3
    assert all(path.stat().st_size <= 20_000 for path in paths)
    records = [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]
    for stream in "abcd":
        assert [record["frame"] for record in records if record["stream"] == stream] == list(range(100))


def test_a_rotation_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.1").mkdir()
    sink = JsonlSink(tmp_path / "out.jsonl", max_bytes=1, keep=1)
    sink.write(FRAME, RESULT, LATENCY)
    for _ in range(2):  # other streams write to it as well, and are told the same
        with pytest.raises(SinkError, match=r"^cannot write .+out.jsonl: Is a directory$"):
            sink.write(FRAME, RESULT, LATENCY)
    (tmp_path / "out.jsonl.1").rmdir()
    sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    assert [len(path.read_bytes().splitlines()) for path in sorted(tmp_path.iterdir())] == [1, 1]


def test_a_callback_is_called_for_every_frame_until_it_is_closed() -> None:
    calls: list[tuple[object, ...]] = []
    sink = CallbackSink(lambda *given: calls.append(given))
    assert sink.shared
    sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    sink.close()
    with pytest.raises(SinkClosedError):
        sink.write(FRAME, RESULT, LATENCY)
    assert calls == [(FRAME, RESULT, LATENCY)]


def test_a_callback_is_called_by_one_thread_at_a_time() -> None:
    inside, most = 0, 0

    def callback(*_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        inside -= 1

    sink = CallbackSink(callback)
    threads = [
        threading.Thread(target=lambda: [sink.write(FRAME, RESULT, LATENCY) for _ in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_what_a_callback_raises_comes_through() -> None:
    def callback(*_: object) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        CallbackSink(callback).write(FRAME, RESULT, LATENCY)


def test_the_ending_chooses_the_sink(tmp_path: Path) -> None:
    assert isinstance(open_sink(tmp_path / "a.mp4"), Mp4Sink)
    assert isinstance(open_sink(str(tmp_path / "a.JSONL")), JsonlSink)
    assert isinstance(open_sink("-"), JsonlSink)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("out.avi", "end it in .mp4 or .jsonl"),
        ("out", "end it in .mp4 or .jsonl"),
        ("rtmp://user:secret@host/live", "there are no rtmp:// sinks"),
        ("out.jsonl?max_mb=0", "out.jsonl: max_mb should be a number above 0, not '0'"),
        ("out.jsonl?keep=none", "out.jsonl: keep should be a whole number from 1 to 1000, not 'none'"),
        ("out.jsonl?keep=2", "out.jsonl: keep is for files with max_mb"),
        ("out.jsonl?max=1", "out.jsonl: unknown option 'max'; did you mean 'max_mb'?"),
        ("no/such/folder/out.jsonl", "cannot write no/such/folder/out.jsonl: No such file or directory"),
        ("no/such/folder/out.mp4", "cannot write no/such/folder/out.mp4: No such file or directory"),
    ],
)
def test_a_target_that_cannot_be_is_refused_in_one_line(target: str, expected: str) -> None:
    with pytest.raises(SinkError) as caught:
        open_sink(target)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("display", ["", ":987"])
def test_no_screen_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, display: str) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", display)
    with pytest.raises(SinkError, match="screen"):
        DisplaySink()

"""JSON lines: a file, a rotated file, standard output, and what fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.sinks import (
    JsonlSink,
    SinkError,
    open_sink,
)
from tests.support import REPO
from tests.support.results import FRAME, LATENCY, RECORD, RESULT


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
from tests.support.results import FRAME, RESULT, LATENCY
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


def test_a_lost_reader_closes_the_sink() -> None:
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
def test_a_full_disk_is_one_line() -> None:
    sink = JsonlSink("/dev/full")
    with pytest.raises(SinkError, match="cannot write /dev/full: No space left on device"):
        sink.write(FRAME, RESULT, LATENCY)
    with pytest.raises(SinkError, match="cannot finish /dev/full"):
        sink.close()
    sink.close()


def numbered(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_bytes().splitlines()]


def test_a_file_is_rotated_between_lines_and_the_oldest_deleted(tmp_path: Path) -> None:
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


def test_a_rotated_file_is_continued_after_a_torn_line(tmp_path: Path) -> None:
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


def test_a_line_longer_than_the_file_limit_is_still_written(tmp_path: Path) -> None:
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


def test_an_impossible_rotation_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.1").mkdir()
    sink = JsonlSink(tmp_path / "out.jsonl", max_bytes=1, keep=1)
    sink.write(FRAME, RESULT, LATENCY)
    for _ in range(2):  # other streams write to it as well, and get the same error
        with pytest.raises(SinkError, match=r"^cannot write .+out.jsonl: Is a directory$"):
            sink.write(FRAME, RESULT, LATENCY)
    (tmp_path / "out.jsonl.1").rmdir()
    sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    assert [len(path.read_bytes().splitlines()) for path in sorted(tmp_path.iterdir())] == [1, 1]

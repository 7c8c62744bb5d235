"""JSON lines: a file, a rotated file, standard output, and what fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.sinks import (
    JsonlSink,
    SinkError,
    SupportsEvents,
    open_sink,
)
from saccade.sinks.record import to_json
from tests.support import REPO
from tests.support.sinks.disk import FullDisk
from tests.support.sinks.results import FRAME, LATENCY, RECORD, RESULT
from tests.support.sinks.rule_events import BEGIN, END, RULES


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = JsonlSink(path)
    for count in (1, 2, 3):
        sink.write(FRAME, RESULT, LATENCY)
        assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [RECORD] * count
    sink.close()
    sink.close()


def test_a_file_that_is_being_written_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = JsonlSink(path)
    first.write(FRAME, RESULT, LATENCY)
    with pytest.raises(SinkError, match=r"cannot write .*out\.jsonl: another run writes to this file"):
        JsonlSink(path)
    for sink in (JsonlSink(path, max_bytes=10_000), JsonlSink(path, max_bytes=10_000)):  # these only append
        sink.write(FRAME, RESULT, LATENCY)
        sink.close()
    first.write(FRAME, RESULT, LATENCY)
    first.close()
    assert path.read_text().count("\n") == 4
    JsonlSink(path).close()
    assert not path.read_text()


def test_any_number_of_runs_write_to_a_device() -> None:
    sinks = [JsonlSink(os.devnull), JsonlSink(os.devnull)]
    for sink in sinks:
        sink.write(FRAME, RESULT, LATENCY)
        sink.close()


def test_events_have_a_file_of_their_own(tmp_path: Path) -> None:
    frames, events = open_sink(tmp_path / "frames.jsonl"), open_sink(tmp_path / "events.jsonl?send=events")
    for sink in (frames, events):
        assert isinstance(sink, SupportsEvents)
        sink.write(FRAME, RESULT, LATENCY)
        for event in (RULES, BEGIN, END):
            sink.write_event(event)
        sink.close()
    assert [json.loads(line) for line in (tmp_path / "frames.jsonl").read_text().splitlines()] == [RECORD]
    assert [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [BEGIN, END]


STDOUT = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support.sinks.results import FRAME, RESULT, LATENCY
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


def test_a_full_disk_is_one_line_and_no_line_is_torn(full_disk: FullDisk) -> None:
    path = full_disk.folder / "out.jsonl"
    sink = JsonlSink(path)
    sink.write(FRAME, RESULT, LATENCY)
    full_disk.fill()
    refused, reasons = 0, set()
    for _ in range(200):  # the first few fill the last page
        try:
            sink.write(FRAME, RESULT, LATENCY)
        except SinkError as error:
            reasons.add(str(error).rpartition(": ")[0])
            refused += 1
    assert reasons == {f"cannot write {path}"}
    assert refused > 100
    assert all(json.loads(line) == RECORD for line in path.read_bytes().splitlines())
    full_disk.free()
    sink.write(replace(FRAME, index=7), RESULT, LATENCY)
    sink.close()
    assert numbered(path)[-1] == 7
    assert len(numbered(path)) == 202 - refused


@pytest.mark.parametrize("gone", ["unlinked", "moved", "replaced"])
def test_a_file_that_disappears_is_created_anew(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "out.jsonl"
    sink = JsonlSink(path)
    sink.write(replace(FRAME, index=1), RESULT, LATENCY)
    if gone == "unlinked":
        path.unlink()
    else:
        path.rename(tmp_path / "old.jsonl")
    if gone == "replaced":
        path.write_bytes(b'{"frame": 0}\n')
    sink.write(replace(FRAME, index=2), RESULT, LATENCY)
    sink.close()
    assert numbered(path) == ([0, 2] if gone == "replaced" else [2])


def test_a_deleted_folder_is_one_line_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    sink = JsonlSink(folder / "out.jsonl")
    sink.write(FRAME, RESULT, LATENCY)
    shutil.rmtree(folder)
    for _ in range(3):
        with pytest.raises(SinkError, match=r"^cannot write .+out.jsonl: the folder .+ does not exist$"):
            sink.write(FRAME, RESULT, LATENCY)
    folder.mkdir()
    sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    assert len(numbered(folder / "out.jsonl")) == 1


def test_old_records_are_deleted_by_age_and_total_size(tmp_path: Path) -> None:
    line = len(to_json(RECORD)) + 1
    sink = open_sink(f"{tmp_path}/out.jsonl?max_mb={2.5 * line / 1e6}&max_gb={6.5 * line / 1e9}")
    for index in range(20):
        sink.write(replace(FRAME, index=1000 + index), RESULT, LATENCY)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.jsonl", "out.jsonl.1", "out.jsonl.2"]
    assert numbered(tmp_path / "out.jsonl") == [1018, 1019]
    sink.close()
    week = time.time() - 8 * 86400
    os.utime(tmp_path / "out.jsonl.2", (week, week))
    (tmp_path / "out.jsonl.copy").touch()
    sink = open_sink(f"{tmp_path}/out.jsonl?max_mb={2.5 * line / 1e6}&keep=7d")
    sink.write(FRAME, RESULT, LATENCY)
    sink.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["out.jsonl", "out.jsonl.1", "out.jsonl.2", "out.jsonl.copy"]  # .2 is the .1 of before


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


@pytest.mark.parametrize(
    ("limits", "words"), [({"max_bytes": 0}, "max_bytes must be at least 1"), ({"keep": -1}, "keep must be at least 0")]
)
def test_a_limit_out_of_range_is_refused(tmp_path: Path, limits: dict[str, int], words: str) -> None:
    with pytest.raises(SinkError, match=words):
        JsonlSink(tmp_path / "out.jsonl", **limits)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []

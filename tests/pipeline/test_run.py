from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pytest
from rich.console import Console

from saccade.engine.model_loader import DTYPES
from saccade.pipeline.cli.live_view import table_of
from saccade.pipeline.config import RunConfig, StreamConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.run import OpenedRun, opened_run
from saccade.pipeline.runtime.stream import load_engine
from saccade.pipeline.runtime.targets import shown_targets
from saccade.sinks import SinkError
from tests.support import REPO
from tests.support.command import Command, start_saccade

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
LONG_S = 90  # far beyond what any of these needs; only so that a hang fails


def config_of(**values: Any) -> RunConfig:
    return load(None, {"detect": "person", "end": 1.0, **values})


def two(**values: Any) -> RunConfig:
    streams = [{"source": str(CLIP), "name": "door"}, {"source": str(CLIP), "name": "yard", "end": 0.5}]
    return config_of(streams=streams, **values)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def frames_in(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def finish(opened: OpenedRun) -> None:
    assert all(run.join(LONG_S) for run in opened.controller.start())


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("saccade")]
    assert left == []


def test_streams_share_outputs_that_can_be_shared(tmp_path: Path) -> None:
    with opened_run(two(out="{stream}.mp4", jsonl="all.jsonl", sinks=["{stream}-own.jsonl"])) as opened:
        finish(opened)
    assert {path.name for path in tmp_path.iterdir()} == {
        "door.mp4", "yard.mp4", "all.jsonl", "door-own.jsonl", "yard-own.jsonl",
    }  # fmt: skip
    everything = records(tmp_path / "all.jsonl")
    for name, count in (("door", 10), ("yard", 5)):
        assert [record["frame"] for record in everything if record["stream"] == name] == list(range(count))
        assert [record["stream"] for record in records(tmp_path / f"{name}-own.jsonl")] == [name] * count
        assert frames_in(tmp_path / f"{name}.mp4") == count


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_the_model_computes_in_the_dtype_of_the_configuration(dtype: str | None) -> None:
    with load_engine(config_of(source=str(CLIP), device="cpu", dtype=dtype)) as engine:
        by_itself = ("float32", "float32 with bfloat16 products")  # as this CPU multiplies
        assert engine.model.dtype in ((dtype,) if dtype else by_itself)


def test_a_stream_has_outputs_of_its_own(tmp_path: Path) -> None:
    streams = [{"source": str(CLIP), "sinks": ["first.jsonl"]}, {"source": str(CLIP), "sinks": ["{stream}.mp4"]}]
    with opened_run(config_of(streams=streams)) as opened:
        finish(opened)
    assert [record["stream"] for record in records(tmp_path / "first.jsonl")] == ["demo"] * 10
    assert frames_in(tmp_path / "demo-2.mp4") == 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"out": "a.mp4"}, r"--out: a\.mp4 supports only one stream; for several streams, use {stream}"),
        ({"display": True}, "no display|is for one stream"),
        ({"sinks": ["a.jsonl", "a.jsonl"]}, "--sink and --sink name the same file"),
        ({"sinks": ["{stream}.jsonl", "yard.jsonl"]}, "name the same file, yard.jsonl"),
        ({"sinks": ["a.xyz"]}, "a.xyz"),
        ({"sinks": ["none/a.mp4?segment=1m"]}, "none"),
        ({"http": "0.0.0.0:0"}, "requires a token"),
    ],
)
def test_an_invalid_output_leaves_every_file_as_it_was(
    tmp_path: Path, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    (tmp_path / "kept.jsonl").write_text("precious\n")
    with (
        pytest.raises((ConfigError, SinkError), match=message),
        opened_run(two(jsonl="kept.jsonl", **values)),
    ):
        pytest.fail("it was opened")
    assert list(tmp_path.glob("*.mp4")) == []
    assert (tmp_path / "kept.jsonl").read_text() == "precious\n"


def test_a_session_that_never_begins_leaves_no_video_behind(tmp_path: Path) -> None:
    with opened_run(two(out="{stream}.mp4")):
        pass
    assert list(tmp_path.iterdir()) == []


def wait_all(opened: OpenedRun) -> None:
    """Wait until no stream runs."""
    wait = time.monotonic() + LONG_S
    while not opened.controller.streams.idle:
        assert time.monotonic() < wait
        time.sleep(0.02)


def test_a_stream_that_is_added_gets_what_every_stream_gets(tmp_path: Path) -> None:
    for folder in ("demo", "demo-2"):
        (tmp_path / folder).mkdir()
    with opened_run(config_of(source=str(CLIP), jsonl="all.jsonl", sinks=["{stream}/seen.mp4"])) as opened:
        runs = opened.controller.start()
        opened.controller.add(StreamConfig(source=str(CLIP), detect=["person"], end=0.5))
        with pytest.raises(SinkError, match=r"other/seen\.mp4"):
            opened.controller.add(StreamConfig(source=str(CLIP), name="other", detect=["person"]))
        assert opened.controller.streams.names == ["demo", "demo-2"]
        wait_all(opened)
    assert {record["stream"] for record in records(tmp_path / "all.jsonl")} == {"demo", "demo-2"}
    assert [frames_in(tmp_path / run.name / "seen.mp4") for run in runs] == [10]
    assert frames_in(tmp_path / "demo-2" / "seen.mp4") == 5


def test_an_added_stream_overwrites_no_results(tmp_path: Path) -> None:
    def added(name: str, **more: Any) -> StreamConfig:
        return StreamConfig.model_validate({"source": str(CLIP), "name": name, "detect": "person", "end": 0.5, **more})

    sinks = ["{stream}.jsonl", "on-{stream}.jsonl?max_mb=1", "{stream}-%H.mp4"]
    with opened_run(two(jsonl="all.jsonl", sinks=sinks)) as opened:
        runs = opened.controller.start()
        wait = time.monotonic() + LONG_S
        while not (tmp_path / "door.jsonl").stat().st_size:
            assert time.monotonic() < wait
            time.sleep(0.02)
        with pytest.raises(StreamError, match="'door' already"):
            opened.controller.add(added("door"))
        with pytest.raises(
            ConfigError,
            match=r"^--sink: all\.jsonl already contains results of every stream; .* another file or stream name$",
        ):
            opened.controller.add(added("all"))
        assert all(run.join(LONG_S) for run in runs)
        with pytest.raises(ConfigError, match=r"door\.jsonl already contains results of door"):
            opened.controller.add(added("door"))
        opened.controller.add(added("gate"))
        wait_all(opened)
    assert [len(records(tmp_path / f"{name}.jsonl")) for name in ("all", "door", "yard", "gate")] == [20, 10, 5, 5]


def test_a_stream_that_appends_may_be_added_again(tmp_path: Path) -> None:
    again = StreamConfig(source=str(CLIP), name="door", detect=["person"], end=0.5)
    with opened_run(config_of(http="127.0.0.1:0", sinks=["{stream}.jsonl?max_mb=1", "{stream}-%H.mp4"])) as opened:
        for _ in range(2):
            opened.controller.add(again)
            wait_all(opened)
    assert len(records(tmp_path / "door.jsonl")) == 10
    assert [frames_in(path) for path in tmp_path.glob("*.mp4")] == [5, 5]


def test_unnamed_streams_added_at_once_get_a_name_each(tmp_path: Path) -> None:
    unnamed = StreamConfig(source=str(CLIP), detect=["person"], end=0.2)
    with opened_run(config_of(http="127.0.0.1:0", sinks=["{stream}.jsonl"])) as opened:
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda _: opened.controller.add(unnamed), range(8)))
        wait_all(opened)
    assert [len(records(tmp_path / f"{run.name}.jsonl")) for run in runs] == [2] * 8
    assert len({run.name for run in runs}) == 8


def test_one_stream_alone_may_have_a_video_and_a_server(tmp_path: Path) -> None:
    with opened_run(config_of(source=str(CLIP), out="a.mp4", http="127.0.0.1:0")) as opened:
        finish(opened)
    assert frames_in(tmp_path / "a.mp4") == 10


# ---- the command


@contextmanager
def running(*arguments: object, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """`saccade run …`, killed in the end if it has not ended."""
    process = start_saccade("run", *arguments, start_new_session=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_sink_that_fails_stops_nothing_but_fails_the_run(tmp_path: Path, saccade: Command) -> None:
    (tmp_path / "full.jsonl").symlink_to("/dev/full")  # a disk that is full from the first byte on
    (tmp_path / "two.yaml").write_text(
        f"detect: person\nend: 1\njsonl: all.jsonl\nstreams:\n"
        f"  - {{name: good, source: {CLIP}}}\n  - {{name: bad, source: {CLIP}, sinks: [full.jsonl]}}\n"
    )
    done = saccade("run", "--config", "two.yaml", cwd=tmp_path)
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "saccade: cannot write full.jsonl: No space left on device; dropping results until a retry succeeds"
    assert last == "saccade: bad: cannot write full.jsonl: No space left on device; dropped results: 10"
    assert done.stdout.splitlines()[0].startswith("good: 10 frames in ")
    for stream in ("good", "bad"):  # nothing else is stopped by it
        assert sum(record["stream"] == stream for record in records(tmp_path / "all.jsonl")) == 10


def test_interrupting_two_leaves_whole_files(tmp_path: Path) -> None:
    with running(CLIP, CLIP, "--detect", "person", "--out", "{stream}.mp4", "--jsonl", "all.jsonl") as process:
        everything = tmp_path / "all.jsonl"
        wait_for(lambda: everything.exists() and everything.read_text().count("\n") >= 8, process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stderr) == (130, "")
    for name in ("demo", "demo-2"):
        mine = [record["frame"] for record in records(everything) if record["stream"] == name]
        assert mine == list(range(len(mine)))
        assert 0 < frames_in(tmp_path / f"{name}.mp4") == len(mine) < 200
        assert f"{name}: {len(mine)} frames in " in stdout


def test_a_server_alone_waits_for_streams_until_a_signal(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    with running("--http", f"127.0.0.1:{port}", "--sink", "{stream}.jsonl") as process:
        wait_for(listens, process)
        body = json.dumps({"source": str(CLIP), "name": "door", "detect": ["person"], "end": 0.5}).encode()
        request = urllib.request.Request(f"{url}/streams", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            assert answer.status == 201
        seen = tmp_path / "door.jsonl"
        wait_for(lambda: seen.exists() and seen.read_text().count("\n") == 5, process)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stderr) == (0, f"saccade: HTTP server at {url}  (Ctrl-C stops it)\n")


def test_warnings_are_shown_while_it_runs(tmp_path: Path) -> None:
    with running("--http", "127.0.0.1:0", "--sink", "mqtt://me:secret@127.0.0.1:1/home") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("saccade: HTTP server at http://127.0.0.1:")
        line = process.stderr.readline()  # while it runs: it has no end of its own
        assert line == "saccade: mqtt://127.0.0.1:1: MQTT broker not connected: Connection refused; retrying\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == 130
    assert "Connection refused" not in stderr  # not twice


def test_a_terminal_shows_a_table_of_the_streams(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with running(CLIP, CLIP, "--detect", "person", "--end", "2", stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:
            pass  # so a terminal ends on Linux
        finally:
            os.close(ours)
        process.communicate(timeout=LONG_S)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for heading in ("stream", "state", "fps", "age", "dropped", "p50", "p99", "objects"):
        assert heading in text
    assert re.search(r"demo-2 +running +\d+\.\d +– +0 +\d+ ms +\d+ ms +\d+", text)


def test_the_table_shows_why_a_stream_is_unhealthy() -> None:
    with opened_run(config_of(streams=[{"source": "rtsp://me:secret@127.0.0.1:1/x", "name": "door"}], end=None)) as one:
        (run,) = one.controller.start()
        while one.controller.streams.snapshot()[0].reason is None:
            time.sleep(0.02)
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(table_of(one.controller.streams.snapshot()))
        run.stop()
    assert re.search(r"door +connecting \(connection failed\) +0\.0 +– +0 +– +– +0", console.export_text())


def test_a_heatmap_without_a_folder_is_refused_at_the_start() -> None:
    with (
        pytest.raises(ConfigError, match=r"--heatmap: cannot write nowhere/door\.png"),
        opened_run(two(heatmap="nowhere/{stream}.png")),
    ):
        pass


def test_the_summary_shows_whole_names_and_no_options() -> None:
    targets = ["what?.mp4", "a.jsonl?max_mb=1", "mqtt://me:s?2@host/x", "whep:8082?token=secret"]
    assert shown_targets(two(sinks=targets)) == ["what?.mp4", "a.jsonl", "mqtt://host", "whep:8082"]


def test_a_heatmap_overwrites_nothing_that_a_run_needs(tmp_path: Path) -> None:
    (tmp_path / "street.png").write_bytes(b"")
    with (
        pytest.raises(ConfigError, match="--heatmap and --heatmap name the same file"),
        opened_run(two(heatmap="heat.png")),
    ):
        pass
    with opened_run(two(heatmap="{stream}.png")) as opened:
        finish(opened)
    assert {path.name for path in tmp_path.glob("*.png")} == {"door.png", "yard.png", "street.png"}
    assert shown_targets(two(heatmap="{stream}.png")) == ["{stream}.png"]

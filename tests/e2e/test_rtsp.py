"""RTSP against real servers: latency, faults and bad targets. SACCADE_LONG=1 runs in full what is shortened here.

Nothing asserts milliseconds, which are the machine's; `python -m benchmarks ingest` prints them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.ingest import burnt_in_age_ms, time_ingest
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.runtime.bounded_queue import BoundedQueue, QueueClosed
from saccade.sources import Frame, LiveError, LiveSource, open_source
from tests.support import cameras
from tests.support.cameras import LONG_S, Camera, Watcher, wait_for
from tests.support.command import Command, start_saccade

LONG = os.environ.get("SACCADE_LONG") == "1"
SLACK_S = 2.0  # for a machine with other things to do

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def servers() -> None:
    cameras.need_servers()


@pytest.fixture(scope="module")
def camera() -> Iterator[Camera]:
    """A camera that no test may harm."""
    with Camera() as one:
        yield one


def live(url: str, **options: object) -> LiveSource:
    source = open_source(url, **options)  # type: ignore[arg-type]
    assert isinstance(source, LiveSource)
    return source


def resident_mb(pid: int | str = "self") -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def note(title: str, text: str) -> None:
    """For `pytest -s`, and for those who run the long ones."""
    print(f"\n{title}: {text}", file=sys.stderr)


@pytest.mark.parametrize("fps", [10, 25, 50])
def test_frames_arrive_one_interval_earlier_than_with_pyav(
    fps: int,
) -> None:
    with Camera("--fps", fps) as one:
        for seconds in (10,) if LONG else (2, 4, 8):
            found = time_ingest(one.url(), seconds=seconds, transport="tcp")
            if found.pyav_median_ms is not None and found.median_ms < found.pyav_median_ms - 500 / fps:
                break  # PyAV may take seconds to begin; a busy machine makes two seconds too few
    note(f"{fps} fps", found.as_text())
    assert found.clock == "burnt in"
    assert found.median_ms is not None
    assert found.pyav_median_ms is not None
    assert found.median_ms < found.pyav_median_ms - 500 / fps  # PyAV's are an interval older; half of one is generous
    assert found.frames >= 10


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_a_fast_consumer_gets_every_frame(camera: Camera, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine with other things to do no consumer is fast all the time: frames that are late are handed on as well.
    monkeypatch.setattr("saccade.sources.rtsp.connection.CATCH_UP_S", 10.0)
    with Watcher(live(camera.url(), rtsp_transport=transport)) as watcher:
        wait_for(lambda: len(watcher.pts) >= (1500 if LONG else 100), 90)
    assert watcher.error is None
    assert watcher.bad == 0
    assert watcher.lost == 0
    # By the sender's own numbers. Its clock has gaps as well when a busy machine lets it make fewer frames.
    assert watcher.numbers == list(range(watcher.numbers[0], watcher.numbers[0] + len(watcher.numbers)))


@pytest.mark.parametrize("path", ["hevc", "jpeg", "srtp"])
def test_other_codecs_are_decoded(camera: Camera, path: str) -> None:
    with Watcher(live(camera.url(path))) as watcher:
        wait_for(lambda: len(watcher.pts) >= 10, LONG_S)
    assert watcher.error is None
    assert watcher.source.info.codec == {"hevc": "hevc", "jpeg": "mjpeg", "srtp": "h264"}[path]
    assert all(before < after for before, after in itertools.pairwise(watcher.pts))


def test_capture_time_is_the_senders_once_it_has_reported(camera: Camera) -> None:
    with Watcher(live(camera.url())) as watcher:
        wait_for(lambda: watcher.clocks >= {"rtcp"}, LONG_S)
    frames: list[tuple[float, float]] = []
    for frame in (source := live(camera.url())):
        if frame.capture_clock == "rtcp":
            burnt = time.time() - (burnt_in_age_ms(frame.image, time.time()) or 0) / 1000
            frames.append((frame.captured_at, burnt))
        if len(frames) == 10:
            source.close()
    off = statistics.median(captured - burnt for captured, burnt in frames)
    note("rtcp", f"capture time is off by {1000 * off:.1f} ms")
    assert abs(off) < 0.5


def test_a_slow_consumer_sees_new_frames(camera: Camera) -> None:
    """10 a second of 25, through the queue that live sources have by default."""
    source = live(camera.url())
    slot: BoundedQueue[Frame] = BoundedQueue(NEWEST)

    def read() -> None:
        try:
            for frame in source:
                slot.put(frame, frame.dropped_before)
        except QueueClosed:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    watcher = Watcher(source)  # for its measures only
    lost = 0
    for number in range(600 if LONG else 40):
        taken = slot.get()
        watcher.take(taken.item)
        lost += taken.lost_before if number else 0
        time.sleep(0.1)
    source.close()
    slot.discard()
    reader.join(LONG_S)
    ages = [age for _, age in watcher.ages]
    third = len(ages) // 3
    early, late = statistics.median(ages[:third]), statistics.median(ages[-third:])
    note("slow consumer", f"median age {early:.1f} ms at first, {late:.1f} at last; {lost} dropped")
    assert late < early + 80  # flat: no backlog grows; a FIFO would be at seconds
    assert watcher.indices[-1] - watcher.indices[0] + 1 == len(watcher.indices) + lost  # every drop is counted


def test_a_frozen_camera_is_stalled_and_comes_back() -> None:
    with Camera() as one, Watcher(live(one.url())) as watcher:
        wait_for(lambda: watcher.state == "live", LONG_S)
        one.freeze()
        frozen_at = time.monotonic()
        try:
            stalled_s = wait_for(lambda: watcher.state == "stalled", 5 + SLACK_S)
            reason = watcher.source.status.reason
            wait_for(lambda: watcher.state == "reconnecting", LONG_S)
            if LONG:
                time.sleep(max(0.0, frozen_at + 10 - time.monotonic()))
        finally:
            one.thaw()
        back_s = wait_for(lambda: watcher.state == "live", 5 + SLACK_S)
        note("frozen", f"stalled after {stalled_s:.1f} s, live {back_s:.1f} s after it was thawed")
        assert reason == "timeout"
        assert watcher.source.status.connections == 2
        before = len(watcher.pts)
        wait_for(lambda: len(watcher.pts) > before + 20, LONG_S)
        assert all(before < after for before, after in itertools.pairwise(watcher.pts))
        assert watcher.bad == 0


def test_a_camera_killed_again_and_again_comes_back_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without 10 good seconds between them it would soon wait 30 s each time, as it should.
    monkeypatch.setattr("saccade.sources.live.reconnect.LAST_DELAY_S", 1.0)
    with Camera() as one, Watcher(live(one.url())) as watcher:
        begun = 0.0
        times = 50 if LONG else 3
        for number in range(times):
            wait_for(lambda number=number: watcher.source.status.connections == number + 1, LONG_S)  # type: ignore[misc]
            seen = len(watcher.pts)
            wait_for(lambda seen=seen: len(watcher.pts) >= seen + 5, LONG_S)  # type: ignore[misc]
            assert one.clients == 1
            if number == min(9, times // 2):
                begun = resident_mb()
            one.off()
            wait_for(lambda: watcher.state == "reconnecting", LONG_S)
            one.on()
        wait_for(lambda: watcher.source.status.connections == times + 1, LONG_S)
        grown = resident_mb() - begun
        note("restarts", f"{times}, memory grew by {grown:.1f} MB after the first ones")
        assert grown < 30
        assert watcher.bad == 0
        assert all(before < after for before, after in itertools.pairwise(watcher.pts))


def test_a_camera_that_is_down_at_the_start_is_not_there_yet() -> None:
    one = Camera()
    with Watcher(live(one.url())) as watcher:
        wait_for(lambda: watcher.source.status.reason == "connection failed", LONG_S)
        assert watcher.state == "connecting"
        with one:
            wait_for(lambda: watcher.state == "live", LONG_S)


def test_one_frozen_camera_of_four_leaves_the_others_alone() -> None:
    with ExitStack() as stack:
        four = [stack.enter_context(Camera()) for _ in range(4)]
        watchers = [stack.enter_context(Watcher(live(one.url()))) for one in four]
        wait_for(lambda: all(watcher.state == "live" and len(watcher.pts) > 25 for watcher in watchers), LONG_S)
        seconds = 10 if LONG else 5.5
        time.sleep(seconds / 3)
        middle = time.monotonic()
        four[0].freeze()
        try:
            time.sleep(seconds)
            frozen = watchers[0].state
        finally:
            four[0].thaw()
        end = time.monotonic()
        for watcher in watchers[1:]:
            came = [middle, *(at for at, _ in watcher.ages if middle <= at < end), end]
            longest = max(after - before for before, after in itertools.pairwise(came))
            note("beside a frozen one", f"{len(came) - 2} frames, the longest gap {longest:.2f} s")
            assert watcher.state == "live"
            # Something that waits for the frozen camera would wait all the time; a busy machine is slow for less.
            assert longest < seconds / 2
        assert frozen in ("stalled", "reconnecting")


def test_lost_packets_cost_frames_but_corrupt_none() -> None:
    with (
        Camera("--lose", 0.01, "--gop", 10) as one,
        Watcher(live(one.url(), rtsp_transport="udp")) as watcher,
        Watcher(live(one.url())) as joined_later,
    ):
        wait_for(lambda: watcher.source.corrupt_packets >= (50 if LONG else 4), 10 * LONG_S)
        seen = len(watcher.pts)
        wait_for(lambda: len(watcher.pts) > seen + 10 and len(joined_later.pts) > 10, LONG_S)
    note("1 % lost", f"{watcher.source.corrupt_packets} packets, {watcher.lost} of {len(watcher.pts)} frames, "
         f"{watcher.bad} bad")  # fmt: skip
    for one_of in (watcher, joined_later):
        assert one_of.error is None
        assert one_of.bad == 0
        assert one_of.source.status.connections == 1
    assert watcher.lost > 0


def test_joining_between_two_keys_starts_with_a_whole_frame() -> None:
    with Camera("--gop", 50) as one, Watcher(live(one.url())) as first:
        wait_for(lambda: len(first.pts) > 20, LONG_S)
        with Watcher(live(one.url())) as second:
            wait_for(lambda: len(second.pts) > 20, LONG_S)
    assert (first.bad, second.bad, second.lost) == (0, 0, 0)


@pytest.mark.parametrize(
    ("path", "user", "reason"),
    [
        ("live", "bob:wrongsecret@", "auth failed"),
        ("live", "", "auth failed"),
        ("nothing", "bob:p%40ss@", "not found"),
        ("sound", "bob:p%40ss@", "codec unsupported"),
        ("j2k", "bob:p%40ss@", "codec unsupported"),
    ],
)
def test_a_bad_target_gives_one_line_without_the_password(locked: Camera, path: str, user: str, reason: str) -> None:
    with pytest.raises(LiveError) as caught:
        next(iter(live(locked.url(path, user), retry=False)))
    assert caught.value.reason == reason
    line = str(caught.value)
    assert line.startswith(f"{reason}: ")
    assert "\n" not in line
    assert not re.search("wrongsecret|p%40ss|p@ss", line)


@pytest.fixture(scope="module")
def locked() -> Iterator[Camera]:
    """A camera with a password, by digest."""
    with Camera("--user", "bob", "--password", "p@ss") as one:
        yield one


@pytest.mark.parametrize("user", ["bob:p%40ss@", "bob:p@ss@"])
def test_the_right_password_opens_it(locked: Camera, user: str) -> None:
    with Watcher(live(locked.url(user=user))) as watcher:
        wait_for(lambda: watcher.state == "live", LONG_S)
    assert watcher.source.info.url == locked.url()


def test_probe_says_what_a_camera_sends_and_saves_a_frame(camera: Camera, tmp_path: Path, saccade: Command) -> None:
    done = saccade("probe", camera.url(user="bob:secret@"), "--seconds", 1, "--out", "seen.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{camera.url()}: h264 640x360" in done.stdout
    assert (tmp_path / "seen.png").stat().st_size > 1000


def test_probe_of_a_camera_that_is_not_there_fails_with_the_code(tmp_path: Path, saccade: Command) -> None:
    done = saccade("probe", f"rtsp://bob:secret@127.0.0.1:{cameras.free_port()}/live", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("saccade: connection failed: ")
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


def test_a_run_waits_for_its_camera_and_drops_old_frames() -> None:
    one = Camera()
    with start_saccade("run", one.url(user="bob:secret@"), "--detect", "person", "--jsonl", "-") as run:
        try:
            assert run.stdout is not None
            assert run.stderr is not None
            lines = [run.stderr.readline()]
            while "failed" not in lines[-1] and lines[-1]:  # it may have been seen connecting before that
                lines.append(run.stderr.readline())
            with one:
                records = [json.loads(run.stdout.readline()) for _ in range(20)]
                lines.append(run.stderr.readline())
                run.send_signal(signal.SIGINT)
                more, rest = run.communicate(timeout=LONG_S)
        finally:
            run.kill()
    name = f"saccade: 127.0.0.1-{one.port}-live"
    assert lines[-2] == f"{name}: connecting (connection failed): 127.0.0.1:{one.port}: Connection refused\n"
    assert lines[-1].startswith(f"{name}: live, h264 640x360, decoded by h264")
    records += [json.loads(line) for line in more.splitlines()]
    # Every frame that has a number is a record, or counted; those that came too late to be decoded have none.
    assert all(b["frame"] - a["frame"] <= b["dropped_since_last"] + 1 for a, b in itertools.pairwise(records))
    assert {record["capture_clock"] for record in records} <= {"arrival", "rtcp"}
    assert run.returncode == 130
    assert "secret" not in "".join(lines) + rest

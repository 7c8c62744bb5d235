"""Recorded packets: nothing is lost or coded again, whatever becomes of the camera, its clock and the disk."""

from __future__ import annotations

import io
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from saccade.sinks import SinkError
from saccade.sinks.recording import Archive, ArchiveError, PacketRecorder, RecordingPlace
from saccade.sinks.recording import recorder as module
from saccade.sinks.retention import elapsed_s
from saccade.sinks.video.audio import AudioWriter
from saccade.sinks.video.fragments import length_prefixed
from saccade.sources.live.packets import AudioPacket, CodedPacket
from tests.support.packets import coded, shown
from tests.support.sinks.disk import FullDisk

LONG_S = 60  # far beyond what any of these needs; only so that a hang fails
ALWAYS = (0.0, 1e12)


def place(folder: Path, options: str = "") -> RecordingPlace:
    return RecordingPlace.parse(f"{folder}{options}", "door")


def record(
    folder: Path, packets: Sequence[CodedPacket | AudioPacket], options: str = "?segment=2"
) -> tuple[Archive, PacketRecorder]:
    where = place(folder, options)
    recorder = PacketRecorder("door", where)
    for packet in packets:
        recorder.take(packet)
    recorder.close()
    return Archive(where), recorder


def numbers(archive: Archive) -> list[int]:
    """Of the frames in all files, in order."""
    return [number for one in archive.files(*ALWAYS) for _, number in shown(one.path)]


def until(what: object) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("codec", "frames_ahead"), [("h264", 0), ("h264", 3), ("hevc", 0), ("hevc", 2)])
def test_every_frame_is_in_a_file_of_its_time(tmp_path: Path, codec: str, frames_ahead: int) -> None:
    began = time.time() - (time.monotonic() - 1000.0)
    packets = coded(65, codec=codec, frames_ahead=frames_ahead)
    archive, recorder = record(tmp_path, packets)
    files = archive.files(*ALWAYS)
    assert [len(shown(one.path)) for one in files] == [20, 20, 20, 5]
    assert numbers(archive) == list(range(65))
    for one in files:
        steps = np.diff([at for at, _ in shown(one.path)])
        assert steps == pytest.approx(0.1, abs=1e-4)
    starts = [one.began for one in files]
    assert np.diff(starts) == pytest.approx(2.0, abs=0.3)
    assert starts[0] == pytest.approx(began, abs=0.5)
    (span,) = archive.spans(*ALWAYS)
    assert (span.after, span.end - span.begin) == ("the recording began", pytest.approx(6.5, abs=0.3))
    assert recorder.status().lost == 0
    data = b"".join(one.path.read_bytes() for one in files)
    assert all(length_prefixed(packet.data) in data for packet in packets), "copied"


def test_another_size_or_codec_begins_another_file(tmp_path: Path) -> None:
    parts = [coded(15), coded(15, size=(320, 240)), coded(15, codec="hevc", size=(320, 240))]
    packets = [
        replace(packet, pts=packet.pts + number * 135_000, arrived_at=packet.arrived_at + 1.5 * number)
        for number, part in enumerate(parts)
        for packet in part
    ]
    archive, _ = record(tmp_path, packets, "")
    files = archive.files(*ALWAYS)
    assert [one.codecs[:4] for one in files] == ["avc1", "avc1", "hvc1"]
    assert numbers(archive) == [*range(15)] * 3
    assert len(archive.spans(*ALWAYS)) == 1, "nothing is missing in between"
    with pytest.raises(ArchiveError, match="the video format changes at 20"):
        archive.write(*ALWAYS, tmp_path / "all.mp4")
    archive.write(files[0].began, files[0].ended - 0.1, tmp_path / "one.mp4")
    assert [number for _, number in shown(tmp_path / "one.mp4")] == list(range(15))


def test_a_gap_lies_between_files_and_is_explained(tmp_path: Path) -> None:
    packets = coded(60)
    away = [replace(packet, pts=packet.pts + 900_000, arrived_at=packet.arrived_at + 10) for packet in packets[30:]]
    lost = [replace(packet, arrived_at=packet.arrived_at - 1.5) for packet in away]  # they came in a burst
    for name, later, why in (("a", away, "the camera sent no data"), ("b", lost, "the camera sent no data")):
        archive, _ = record(tmp_path / name, [*packets[:30], *later], "")
        first, second = archive.spans(*ALWAYS)
        assert second.begin - first.end == pytest.approx(10, abs=2)
        assert second.after == why
        assert numbers(archive) == list(range(60))


def test_a_clock_that_jumps_begins_another_file(tmp_path: Path) -> None:
    packets = coded(60)
    later = [replace(packet, pts=packet.pts - 10_000_000) for packet in packets[33:]]
    archive, _ = record(tmp_path, [*packets[:33], *later], "")
    assert numbers(archive) == [*range(33), *range(40, 60)]  # from the next key frame on
    assert len(archive.files(*ALWAYS)) == 2
    assert archive.spans(*ALWAYS)[0].after == "the recording began"


def test_files_of_an_earlier_run_come_first_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, coded(20), "")
    now = time.time
    monkeypatch.setattr("saccade.sinks.recording.recorder.time.time", lambda: now() - 7200)
    archive, _ = record(tmp_path, coded(25), "")
    assert [len(one.fragments) for one in archive.files(*ALWAYS)] == [2, 3]


def test_a_full_disk_is_said_once_and_leaves_what_was_written(
    tmp_path: Path, full_disk: FullDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.sinks.recording.recorder.backoff_s", lambda failures: 0.1)
    monkeypatch.setattr(module, "_SETTLE_S", 0.2)
    caplog.set_level(logging.WARNING)
    where = place(full_disk.folder, "?segment=2")
    recorder = PacketRecorder("door", where)
    packets, number = coded(60), 0

    def play(seconds: int) -> None:
        nonlocal number
        for _ in range(seconds * 10):
            packet = packets[number % 60]
            at = number / 10 - 1000
            recorder.take(replace(packet, pts=number * 9000, arrived_at=at))
            number += 1
        until(lambda: recorder._waiting == 0)

    play(6)
    before = recorder.bytes
    assert before > 0
    full_disk.fill()
    play(6)
    time.sleep(0.2)
    play(6)
    assert recorder.status().state == "paused"
    assert "No space left" in (recorder.status().reason or "")
    full_disk.free()
    time.sleep(0.3)
    play(6)
    time.sleep(0.3)
    play(2)
    until(lambda: recorder.status().state == "ok")
    recorder.close()
    said = [record.getMessage() for record in caplog.records if "saccade.sinks.recording" in record.name]
    assert len(said) == 2, said
    assert "cannot record" in said[0]
    assert "works again" in said[1]
    files = Archive(where).files(*ALWAYS)
    whole = [shown(one.path) for one in files]
    assert all(whole)
    assert len(list(itertools.chain(*whole))) >= 100
    assert sum(one.after is not None and "No space left" in one.after for one in files) == 1
    assert not list(full_disk.folder.rglob("*.part"))


def test_a_slow_disk_delays_nothing_and_drops_up_to_a_key_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, stuck, write = threading.Event(), threading.Event(), os.write

    def slowly(descriptor: int, data: bytes) -> int:
        stuck.set()
        assert free.wait(LONG_S)
        return write(descriptor, data)

    packets = coded(250)
    monkeypatch.setattr(os, "write", slowly)
    monkeypatch.setattr(module, "_MOST_BYTES", sum(len(packet.data) for packet in packets[:60]))
    where = place(tmp_path, "?segment=2")
    recorder = PacketRecorder("door", where)
    for packet in packets[:30]:
        recorder.take(packet)
    assert stuck.wait(LONG_S)
    for packet in packets[30:185]:
        recorder.take(packet)
    free.set()
    until(lambda: recorder._waiting == 0)
    for packet in packets[185:]:
        recorder.take(packet)
    recorder.close()
    archive = Archive(where)
    kept = numbers(archive)
    assert len(kept) + recorder.status().lost == 250
    assert kept[0] == 0
    assert kept[-1] == 249
    assert [record.getMessage() for record in caplog.records].count(
        "recording of stream door: the disk is too slow: frames are dropped until the next keyframe"
    ) == 1
    assert [span.after for span in archive.spans(*ALWAYS)][-1] == "the disk was too slow"


def test_retention_deletes_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, _ = record(tmp_path, coded(100))
    day = archive.files(*ALWAYS)[0].path.parent
    others = [day / "holiday.mp4", tmp_path / "door" / "12-00-00.mp4", tmp_path / "gate" / day.name / "12-00-00.mp4"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10_000_000))
    kept = sum(path.stat().st_size for path in archive._place.files()) // 2
    archive, _ = record(tmp_path, coded(100), f"?segment=2&max_gb={kept / 1e9:.9f}")
    assert all(path.exists() for path in others)
    assert archive.files(*ALWAYS)[0].number > 3
    later = elapsed_s() + 3 * 86400
    monkeypatch.setattr("saccade.sinks.retention.elapsed_s", lambda: later)
    monkeypatch.setattr("saccade.sinks.retention.time.time", lambda: time.monotonic() + 9e9)
    archive, _ = record(tmp_path, coded(20), "?segment=2&keep=1d")
    assert [one.number for one in archive.files(*ALWAYS)] == [11]
    assert all(path.exists() for path in others)


def sounds(codec: str, rate: int, seconds: int) -> list[AudioPacket]:
    """A tick at each full second from 1 on."""
    at = np.arange(rate * seconds) / rate
    wave = ((at % 1 < 0.02) & (at > 0.5)) * np.sin(2 * np.pi * 1000 * at) * 0.8
    coder = av.CodecContext.create(codec, "w")
    coder.sample_rate, coder.layout, coder.time_base = rate, "mono", Fraction(1, rate)
    coder.format = {"pcm_alaw": "s16", "libopus": "flt"}.get(codec, "fltp")
    coder.open()
    size = coder.frame_size or rate // 50
    made = []
    for begin in range(0, len(wave), size):
        part = wave[begin : begin + size][None]
        data = (part * 32000).astype(np.int16) if coder.format.name == "s16" else part.astype(np.float32)
        frame = av.AudioFrame.from_ndarray(data, format=coder.format.name, layout="mono")
        frame.sample_rate, frame.pts = rate, begin
        made += coder.encode(frame)
    config = bytes(coder.extradata or b"") if codec == "aac" else b""
    name = "opus" if codec == "libopus" else codec
    return [AudioPacket(name, config, rate, 1, bytes(one), round((one.pts or 0) * 90_000 / rate), size) for one in made]


@pytest.mark.parametrize(("codec", "rate"), [("aac", 48000), ("aac", 16000), ("libopus", 48000), ("pcm_alaw", 8000)])
def test_sound_stays_at_its_time_over_files(tmp_path: Path, codec: str, rate: int) -> None:
    video = coded(65)
    packets: list[CodedPacket | AudioPacket] = sorted([*video, *sounds(codec, rate, 6)], key=lambda one: one.pts)
    archive, _ = record(tmp_path, packets)
    assert [one.codecs.partition(",")[2] for one in archive.files(*ALWAYS)] == [
        "opus" if codec == "libopus" else "mp4a.40.2"
    ] * 4
    archive.write(*ALWAYS, tmp_path / "all.mp4")
    with av.open(str(tmp_path / "all.mp4")) as whole:
        frames = list(whole.decode(audio=0))
    rate = frames[0].sample_rate
    loud = [
        (frame.time or 0.0) + float(at) / rate
        for frame in frames
        for at in np.flatnonzero(np.abs(frame.to_ndarray()[0]) > 0.2)
    ]
    ticks = [at for before, at in itertools.pairwise([-1.0, *loud]) if at - before > 0.5]
    assert ticks == pytest.approx([1, 2, 3, 4, 5], abs=0.03)


def test_what_is_no_h264_or_h265_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive, recorder = record(tmp_path, coded(20, codec="vp8"))
    assert archive.files(*ALWAYS) == []
    assert [record.getMessage() for record in caplog.records] == [
        "recording of stream door: video codec vp8 cannot be recorded; set the camera to H.264 or H.265"
    ]
    assert recorder.bytes == 0


def test_a_deleted_folder_is_not_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = place(tmp_path / "disk")
    recorder = PacketRecorder("door", where)
    where.names.root.rmdir()
    for packet in coded(30):
        recorder.take(packet)
    recorder.close()
    assert not where.names.root.exists()
    assert "no longer exists" in caplog.text


def test_a_file_cut_off_counts_up_to_its_last_whole_fragment(tmp_path: Path) -> None:
    archive, _ = record(tmp_path, coded(50), "")
    (one,) = archive.files(*ALWAYS)
    with one.path.open("r+b") as file:
        file.truncate(one.fragments[-1].offset + one.fragments[-1].size - 5)
    (again,) = Archive(place(tmp_path)).files(*ALWAYS)
    assert len(again.fragments) == len(one.fragments) - 1
    (one.path.parent / "00-00-00.mp4").write_bytes(b"somebody else's")
    (one.path.parent / "00-00-01.mp4").write_bytes(b"")
    assert len(Archive(place(tmp_path)).files(*ALWAYS)) == 1


def test_a_playlist_lists_ranges_that_are_whole_videos(tmp_path: Path) -> None:
    archive, _ = record(tmp_path, coded(120), "?segment=6")
    text = archive.playlist(*ALWAYS, lambda name: f"files/{name}", ended=True)
    assert text.count("#EXT-X-DISCONTINUITY") == 1
    assert text.endswith("#EXT-X-ENDLIST\n")
    seen, head, lines = [], b"", text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("#EXT-X-MAP"):
            name, place_of = line.split('"')[1], line.split('"')[3]
            with archive.open_file(name.removeprefix("files/")) as file:
                head = file.read()[: int(place_of.partition("@")[0])]
        if line.startswith("#EXT-X-BYTERANGE"):
            size, at = map(int, line.partition(":")[2].split("@"))
            with archive.open_file(lines[number + 1].removeprefix("files/")) as file:
                data = file.read()[at : at + size]
            path = tmp_path / "segment.mp4"
            path.write_bytes(head + data)
            seen += [value for _, value in shown(path)]
    assert seen == list(range(120))
    with pytest.raises(ArchiveError, match="the recording has no file"):
        archive.open_file("../../etc/passwd")
    with pytest.raises(ArchiveError, match="nothing was recorded"):
        archive.playlist(0, 1, str, ended=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("/video/door.mp4", "must be a folder"),
        ("/video/%H.mp4", "must contain {stream}"),
        ("rtsp://x/y", "is not a folder"),
        ("/video?keep=7", "keep should be"),
        ("/video?kep=7d", "did you mean 'keep'"),
        ("/video?segment=0", "segment should be"),
    ],
)
def test_a_wrong_place_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(SinkError, match=complaint):
        RecordingPlace.parse(text, "door")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/video", "/video/door/%Y-%m-%d/%H-%M-%S.mp4"),
        ("/a%q/c?keep=7d", "/a%%q/c/door/%Y-%m-%d/%H-%M-%S.mp4"),
        ("/v/{stream}-%Y%m%d-%H%M%S.mp4?max_gb=5", "/v/door-%Y%m%d-%H%M%S.mp4"),
    ],
)
def test_files_have_the_name_of_the_stream(text: str, names: str) -> None:
    assert RecordingPlace.parse(text, "door").names.pattern == names


def test_the_head_tells_browsers_the_codecs(tmp_path: Path) -> None:
    archive, _ = record(tmp_path, coded(12, codec="hevc"))
    (one,) = archive.files(*ALWAYS)
    with av.open(io.BytesIO(one.path.read_bytes())) as container:
        stream = container.streams.video[0]
        assert one.codecs.startswith("hvc1.1.6.L")
        assert stream.codec_context.codec_tag == "hvc1"


def test_sound_follows_a_better_alignment_and_a_lost_packet() -> None:
    packets = sounds("pcm_alaw", 8000, 20)
    for off in (5400, -5400):  # 60 ms, after 4 s
        writer = AudioWriter(packets[0], copied=("pcm_alaw",))
        for packet in packets:
            writer.push(replace(packet, pts=packet.pts + (off if packet.pts > 360_000 else 0)))
        last, end = writer._waiting[-1], packets[-1].pts + off
        assert last[0] / 8000 == pytest.approx(end / 90_000, abs=0.021)
    writer = AudioWriter(packets[0], copied=("pcm_alaw",))
    for packet in packets[:100] + packets[103:]:  # 60 ms are lost
        writer.push(packet)
    assert writer._waiting[-1][0] / 8000 == pytest.approx(packets[-1].pts / 90_000, abs=0.021)

"""FileSource on real clips: exact clocks, upright frames, damage survived, bad input refused in one line."""

from __future__ import annotations

import gc
import os
import struct
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest

from saccade.sinks import Mp4Sink
from saccade.sources import FileSource, SourceError, open_source
from tests.support.clips import MakeClip, number_of
from tests.support.sinks.results import LATENCY, NOTHING

VFR = [0, 33, 100, 101, 150, 400, 433, 1200, 1233, 1299]  # milliseconds


def test_every_frame_comes_once_in_order_with_its_clock(make_clip: MakeClip) -> None:
    with FileSource(make_clip(frames=30, rate=25)) as source:
        frames = list(source)
    assert [f.index for f in frames] == list(range(30))
    assert [number_of(f.image) for f in frames] == list(range(30))
    assert [f.pts * f.time_base for f in frames] == [Fraction(n, 25) for n in range(30)]
    first, last = frames[0], frames[-1]
    assert (first.stream, first.capture_clock, first.dropped_before) == ("clip", "file", 0)
    assert last.captured_at == pytest.approx(29 / 25)
    assert first.image.shape == (120, 160, 3)
    assert first.image.dtype == np.uint8
    assert first.image.flags["C_CONTIGUOUS"]
    assert all(f.decode_ms > 0 for f in frames)
    assert source.corrupt_packets == 0


def test_info_tells_what_is_in_the_file(make_clip: MakeClip) -> None:
    path = make_clip(frames=50, rate=25, audio="aac")
    info = FileSource(path).info
    assert (info.codec, info.width, info.height) == ("h264", 160, 120)
    assert (info.average_rate, info.frames, info.time_base) == (25, 50, Fraction(1, 25))
    assert (info.live, info.audio, info.url) == (False, True, str(path))
    assert info.duration_s == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.mov"])
def test_variable_frame_rate_is_kept_exactly(make_clip: MakeClip, name: str) -> None:
    path = make_clip(name, pts=VFR, time_base=Fraction(1, 1000))
    assert [f.pts * f.time_base * 1000 for f in FileSource(path)] == VFR


def test_integers_of_an_odd_time_base_are_kept(make_clip: MakeClip) -> None:
    path = make_clip(pts=[1001 * n for n in range(20)], time_base=Fraction(1, 30000))
    frames = list(FileSource(path))
    assert [f.pts for f in frames] == [1001 * n for n in range(20)]
    assert {f.time_base for f in frames} == {Fraction(1, 30000)}


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("clip.ts", "libx264"),
        ("clip.mkv", "libx264"),
        ("clip.webm", "libvpx"),
        ("clip.avi", "mpeg4"),
        ("clip.h264", "libx264"),
        ("clip.mpg", "mpeg2video"),
        ("clip.mov", "mjpeg"),
    ],
)
def test_any_container_and_codec(make_clip: MakeClip, name: str, codec: str) -> None:
    frames = list(FileSource(make_clip(name, codec=codec, frames=25)))
    assert len(frames) == 25
    steps = np.diff([float(f.pts * f.time_base) for f in frames])
    assert np.allclose(steps, 1 / 25, atol=0.001)
    assert [number_of(f.image) for f in frames] == list(range(25))


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_rotation_is_honoured(make_clip: MakeClip, turn: int) -> None:
    path = make_clip(rotation=turn, frames=3)
    with FileSource(path) as source:
        image = next(iter(source)).image
    info = source.info
    assert (info.height, info.width) == image.shape[:2] == ((120, 160) if turn % 180 == 0 else (160, 120))
    # OpenCV reads the display matrix by itself: a second opinion on which way is up.
    capture = cv2.VideoCapture(str(path))
    _, expected = capture.read()
    capture.release()
    assert np.abs(image.astype(int) - expected[..., ::-1]).mean() < 3


def with_matrix(path: Path, x_to_x: int, x_to_y: int, y_to_x: int, y_to_y: int) -> Path:
    """The clip with another display matrix in its track header."""
    fixed = [number % (1 << 32) for number in (x_to_x << 16, x_to_y << 16, 0, y_to_x << 16, y_to_y << 16)]
    data = path.read_bytes()
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = data.rindex(upright)
    path.write_bytes(data[:at] + struct.pack(">5I", *fixed) + data[at + 20 :])
    return path


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ((1, 0, 0, 1), lambda image: image),
        ((-1, 0, 0, 1), lambda image: image[:, ::-1]),  # as front cameras of phones have it
        ((1, 0, 0, -1), lambda image: image[::-1]),
        ((-1, 0, 0, -1), lambda image: image[::-1, ::-1]),
        ((0, 1, -1, 0), lambda image: np.rot90(image, -1)),
        ((0, -1, 1, 0), lambda image: np.rot90(image)),
        ((0, 1, 1, 0), lambda image: image.transpose(1, 0, 2)),
        ((0, -1, -1, 0), lambda image: np.rot90(image, 2).transpose(1, 0, 2)),
    ],
)
def test_mirrored_and_turned_clips_come_out_upright(
    make_clip: MakeClip, matrix: tuple[int, int, int, int], expected: Callable[[Any], Any]
) -> None:
    upright = next(iter(FileSource(make_clip(frames=1)))).image
    source = FileSource(with_matrix(make_clip("turned.mp4", frames=1), *matrix))
    assert np.array_equal(next(iter(source)).image, expected(upright))


def frames_alive() -> int:
    return sum(isinstance(one, av.VideoFrame) for one in gc.get_objects())


@pytest.mark.parametrize("rotation", [None, 90])
def test_decoded_frames_are_freed_without_the_cyclic_collector(make_clip: MakeClip, rotation: int | None) -> None:
    source = FileSource(make_clip(frames=30, rotation=rotation))
    gc.collect()
    gc.disable()
    before = frames_alive()  # of other tests, in images that they keep
    try:
        for _ in source:
            pass
        assert frames_alive() < before + 5
    finally:
        gc.enable()


def test_the_aspect_of_pixels_is_kept(tmp_path: Path) -> None:
    path, copy = tmp_path / "anamorphic.mp4", tmp_path / "copy.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(16, 15)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8))))
        container.mux(stream.encode(None))
    frames = list(FileSource(path))
    assert {frame.pixel_aspect for frame in frames} == {Fraction(16, 15)}
    sink = Mp4Sink(copy)
    sink.write(frames[0], NOTHING, LATENCY)
    sink.close()
    assert [frame.pixel_aspect for frame in FileSource(copy)] == [Fraction(16, 15)]


def test_vid_stride_keeps_numbers_and_clock(make_clip: MakeClip) -> None:
    source = FileSource(make_clip(frames=30), vid_stride=4)
    frames = list(source)
    assert [f.index for f in frames] == list(range(0, 30, 4))
    assert [f.pts for f in frames] == list(range(0, 30, 4))
    assert {f.dropped_before for f in frames} == {0}
    assert source.info.frames == len(frames)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (None, 0.4, range(10)),
        (0.5, None, range(13, 50)),  # 0.5 s lies between frames 12 (0.48 s) and 13
        (0.52, 1.0, range(13, 25)),
        (1.96, None, range(49, 50)),
        (0, 99, range(50)),
    ],
)
@pytest.mark.parametrize("name", ["clip.mp4", "clip.ts", "clip.h264"])
def test_start_and_end_cut_between_key_frames(
    make_clip: MakeClip, name: str, start: float | None, end: float | None, expected: range
) -> None:
    source = FileSource(make_clip(name, frames=50, gop=10), start=start, end=end)
    frames = list(source)
    assert [number_of(f.image) for f in frames] == list(expected)
    assert [f.index for f in frames] == list(range(len(expected)))
    if name == "clip.mp4":
        assert [f.pts for f in frames] == list(expected)
        assert source.info.frames == pytest.approx(len(expected), abs=1)


def test_it_can_be_read_twice(make_clip: MakeClip) -> None:
    source = FileSource(make_clip(frames=5))
    assert [f.pts for f in source] == [f.pts for f in source]


def damage(path: Path, share: float, length: int) -> None:
    """Overwrite `length` bytes, `share` of the way into the coded frames."""
    data = bytearray(path.read_bytes())
    begin = data.index(b"mdat") + 4 if b"mdat" in data else 0
    middle = begin + int((len(data) - begin) * share)
    data[middle : middle + length] = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8).tobytes()
    path.write_bytes(data)


def test_damage_in_the_middle_is_skipped_and_counted(make_clip: MakeClip) -> None:
    path = make_clip(frames=100, noise=True)
    damage(path, 0.4, 12_000)
    source = FileSource(path)
    frames = list(source)
    assert source.corrupt_packets > 0
    assert sum(f.dropped_before for f in frames) == source.corrupt_packets
    assert 80 <= len(frames) < 100
    assert frames[-1].pts == 99
    assert np.all(np.diff([f.pts for f in frames]) > 0)


@pytest.mark.parametrize("name", ["clip.ts", "clip.mkv"])
def test_a_cut_off_file_gives_what_it_has(make_clip: MakeClip, name: str) -> None:
    path = make_clip(name, frames=60, noise=True)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert 20 <= len(list(FileSource(path))) < 60


@pytest.mark.parametrize("name", ["clip.ts", "clip.mkv"])
def test_a_hole_in_the_container_does_not_end_the_stream(make_clip: MakeClip, name: str) -> None:
    path = make_clip(name, frames=100, noise=True)
    damage(path, 0.4, 8_000)
    frames = list(FileSource(path))
    assert number_of(frames[-1].image) == 99
    assert len(frames) >= 70


def test_close_from_another_thread_ends_iteration(make_clip: MakeClip) -> None:
    source = FileSource(make_clip(frames=200))
    seen: list[int] = []
    started = threading.Event()

    def read() -> None:
        for frame in source:
            seen.append(frame.index)
            started.set()
            gate.wait(10)

    gate = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(10)
    source.close()
    gate.set()
    reader.join(10)
    assert not reader.is_alive()
    assert len(seen) <= 2
    assert list(source) == []


def test_demo_clips_are_read_to_the_end(shared_clips: Path) -> None:
    for name, count in (("one-by-one-person.mp4", 200), ("bottles.mp4", 478)):
        path = shared_clips / name
        with av.open(str(path)) as container:
            expected = [f.pts for f in container.decode(video=0)]
        source = FileSource(path)
        pts = [f.pts for f in source]
        assert pts == expected
        assert source.info.frames == len(pts) == count


def write_text(folder: Path) -> Path:
    path = folder / "notes.mp4"
    path.write_text("These are notes, not a video.\n" * 50)
    return path


def write_text_by_name(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("FFmpeg would render this as a frame of text.\n" * 50)
    return path


def write_empty(folder: Path) -> Path:
    path = folder / "empty.mp4"
    path.touch()
    return path


def write_cut_mp4(folder: Path) -> Path:
    path = folder / "cut.mp4"
    path.write_bytes(b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2avc1mp41" + bytes(4000))
    return path


BAD_FILES = {
    "missing": (lambda folder: folder / "no.mp4", "no such file"),
    "empty": (write_empty, "empty (0 bytes)"),
    "text named mp4": (write_text, "cannot be read as a video"),
    "text": (write_text_by_name, "the content is text"),
    "cut off before its index": (write_cut_mp4, "cannot be read as a video"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused_in_one_line_that_names_them(tmp_path: Path, kind: str) -> None:
    make, expected = BAD_FILES[kind]
    path = make(tmp_path)
    with pytest.raises(SourceError) as caught:
        open_source(path)
    message = str(caught.value)
    assert expected in message
    assert path.name in message
    assert "\n" not in message


def test_sound_alone_is_no_video(make_clip: MakeClip) -> None:
    with pytest.raises(SourceError, match=r"no video stream found; the content is audio"):
        open_source(make_clip("song.mp4", video=False, audio="aac"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(make_clip: MakeClip) -> None:
    path = make_clip()
    path.chmod(0)
    with pytest.raises(SourceError, match="permission denied"):
        open_source(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"vid_stride": 0}, r"vid_stride \(use every Nth frame\) must be 1 or more"),
        ({"start": -1}, "start must be at least 0 s"),
        ({"start": 2, "end": 1}, "must be later than start"),
        ({"start": 1000}, "past the end"),
    ],
)
def test_bad_windows_are_refused(make_clip: MakeClip, options: dict[str, float], expected: str) -> None:
    with pytest.raises(SourceError, match=expected):
        FileSource(make_clip(frames=3), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("admin:secret@10.0.0.9:554/stream", "10.0.0.9:554/stream"),
        ("admin:sec/ret@camera.local/stream", "camera.local/stream"),
        ("rtsp:/admin:secret@10.0.0.9/stream", "10.0.0.9/stream"),
        ("10.0.0.9/stream", "10.0.0.9/stream"),
        ("camera:554/stream", "camera:554/stream"),
    ],
)
def test_an_address_without_its_beginning_is_named(target: str, shown: str) -> None:
    with pytest.raises(SourceError) as error:
        open_source(target)
    assert str(error.value) == f"no such file: {shown}; an address begins with rtsp:// or http://"


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("", {}, "a source must be a path"),
        (b"clip.mp4", {}, "a source must be a path"),
        ("x" * 300, {}, "x{100}… cannot be read: File name too long"),
        ("clip.mp4", {"hwaccel": "gpu"}, "hwaccel must be one of auto, cuda, none; got 'gpu'"),
        ("rtsp://h/x", {"rtsp_transport": "TCP"}, "rtsp_transport must be one of .*; got 'TCP'"),
        ("rtsp://h/x", {"loss": "drop"}, "loss must be one of hide, show; got 'drop'"),
    ],
)
def test_what_no_source_can_be_made_of_is_refused(target: Any, options: Any, expected: str) -> None:
    with pytest.raises(SourceError, match=expected):
        open_source(target, **options)


def test_spaces_around_an_address_do_not_matter() -> None:
    with open_source(" rtsp://h/x\n") as source:
        assert source.name == "h-x"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("rtsp://admin:secret@10.0.0.9:port/stream", "is not an RTSP URL"),
        ("gopher://admin:secret@x/y", "gopher:// sources are not supported"),
    ],
)
def test_what_is_no_source_says_so_and_repeats_no_password(target: str, expected: str) -> None:
    with pytest.raises(SourceError, match=expected) as caught:
        open_source(target)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("target", [None, 1.5, ["a.mp4"]])
def test_what_is_no_target_is_refused_in_one_line(target: object) -> None:
    with pytest.raises(SourceError, match="a source must be a path, a URL or a webcam index"):
        open_source(target)  # type: ignore[arg-type]

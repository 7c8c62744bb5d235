"""Clips of files are cut on the clock that the frames were read on, and shown as the file is: turned and stretched."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from saccade.pipeline.events.storage.clips import Moment, PacketRing, copy_clip, write_clip
from saccade.sinks import Mp4Sink
from saccade.sources import FileSource, LiveSource, open_source
from saccade.sources.errors import LiveError
from tests.support.cameras.http_camera import http
from tests.support.clips import MakeClip, number_of, numbered_image
from tests.support.remux import joined, moved_by, remux
from tests.support.sinks.results import LATENCY, NOTHING


def read(source: FileSource) -> list[tuple[float, int]]:
    return [(frame.captured_at, number_of(frame.image)) for frame in source]


def shown(path: Path) -> list[int]:
    return [number for _, number in read(FileSource(path))]


@pytest.mark.parametrize("begins", [0, 10, 50_000])
@pytest.mark.parametrize(
    ("name", "codec"),
    [("moved.ts", "libx264"), ("moved.mkv", "libx264"), ("moved.mp4", "libx264"), ("moved.ts", "mpeg2video")],
)
def test_a_clip_is_of_its_time_wherever_the_clock_begins(
    make_clip: MakeClip, tmp_path: Path, name: str, codec: str, begins: float
) -> None:
    path = remux(make_clip("clip.mp4", frames=100, codec=codec), tmp_path / name, moved_by(begins))
    source = FileSource(path)
    copy_clip(source.index, 2, 3, tmp_path / "unread.mp4")  # nothing has been read yet, as with --start
    frames = read(source)
    copy_clip(source.index, 2, 3, tmp_path / "read.mp4")
    between = [number for time, number in frames if 2 <= time <= 3]
    for clip in ("unread.mp4", "read.mp4"):
        numbers = shown(tmp_path / clip)
        assert set(between) <= set(numbers)
        assert 25 <= len(numbers) <= 45


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
@pytest.mark.parametrize("second", [5, 30, 20_000, 95_000])
def test_a_clip_of_joined_recordings(make_clip: MakeClip, tmp_path: Path, codec: str, second: float) -> None:
    clip = make_clip("clip.mp4", frames=100, codec=codec)
    high, low = (remux(clip, tmp_path / name, moved_by(begins)) for name, begins in (("a.ts", 30), ("b.ts", second)))
    source = FileSource(joined(tmp_path / "joined.ts", high, low))
    frames = read(source)
    assert len(frames) == 200
    for begin in (0.5, 3.5, 4.5, 6):
        copy_clip(source.index, begin, begin + 1, tmp_path / "clip.mp4")
        numbers = shown(tmp_path / "clip.mp4")
        between = [number for time, number in frames if begin <= time <= begin + 1]
        assert set(between) <= set(numbers)
        assert len(numbers) <= 45
        assert FileSource(tmp_path / "clip.mp4").info.duration_s == pytest.approx(len(numbers) / 25, abs=0.2)


MATRICES = {
    "upright": (1, 0, 0, 1),
    "90": (0, 1, -1, 0),
    "180": (-1, 0, 0, -1),
    "270": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "upside down in a mirror": (1, 0, 0, -1),
    "90, mirrored": (0, 1, 1, 0),
}


def filmed(path: Path, codec: str, matrix: str, aspect: Fraction) -> Path:
    """A clip of numbered images that is to be turned and stretched."""
    a, b, c, d = MATRICES[matrix]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height = 160, 120
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        stream.codec_context.gop_size = 10
        if matrix != "upright":
            stream.set_display_matrix([a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30])
        for number in range(50):
            frame = av.VideoFrame.from_ndarray(numbered_image(number, 160, 120), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def look(path: Path) -> tuple[NDArray[np.uint8], Fraction]:
    """The last frame as a player shows it, and the aspect of its pixels."""
    *_, frame = FileSource(path)  # a live clip may lack the first ones
    return frame.image, frame.pixel_aspect


def check_alike(path: Path, other: Path) -> None:
    image, aspect = look(path)
    expected, expected_aspect = look(other)
    assert image.shape == expected.shape
    assert aspect == expected_aspect
    assert np.abs(image.astype(int) - expected).mean() < 6


WIDE = Fraction(64, 45)


@pytest.mark.parametrize("aspect", [Fraction(1), WIDE], ids=["square", "wide"])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(
    ("name", "codec"), [("in.mp4", "libx264"), ("in.mp4", "mpeg4"), ("in.mov", "mjpeg"), ("in.mkv", "libx264")]
)
def test_every_way_out_of_a_file_is_shown_alike(
    tmp_path: Path, name: str, codec: str, matrix: str, aspect: Fraction
) -> None:
    path = filmed(tmp_path / name, codec, matrix, aspect)
    source = FileSource(path)
    sink = Mp4Sink(tmp_path / "out.mp4")
    for frame in source:
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    check_alike(tmp_path / "out.mp4", path)
    copy_clip(source.index, 0, 2, tmp_path / "clip.mp4")
    check_alike(tmp_path / "clip.mp4", path)
    image, shown_aspect = look(path)
    sideways = image.shape[0] > image.shape[1]
    assert shown_aspect == (1 / aspect if sideways else aspect)


@pytest.mark.parametrize("aspect", [Fraction(1), WIDE], ids=["square", "wide"])
@pytest.mark.parametrize("matrix", ["90", "mirrored", "upside down in a mirror"])
@pytest.mark.parametrize(("name", "codec"), [("in.mp4", "libx264"), ("in.mp4", "mpeg4")])
def test_so_is_a_live_stream(tmp_path: Path, name: str, codec: str, matrix: str, aspect: Fraction) -> None:
    path = filmed(tmp_path / name, codec, matrix, aspect)
    ring, sink = PacketRing(60), Mp4Sink(tmp_path / "out.mp4")
    with http(lambda handler: serve(handler, path)) as url, open_source(f"{url}/in.mp4") as source:
        assert isinstance(source, LiveSource)
        source.taps.video.append(ring.add)
        for frame in source:
            sink.write(frame, NOTHING, LATENCY)
    sink.close()
    check_alike(tmp_path / "out.mp4", path)
    write_clip(ring.cut(Moment(0), Moment(9e9)), tmp_path / "clip.mp4")
    check_alike(tmp_path / "clip.mp4", path)


def serve(handler: Any, path: Path) -> None:
    data = path.read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Type", "video/mp4")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.mark.parametrize("second", [5, 60, 20_000])
def test_a_live_clip_of_joined_recordings(make_clip: MakeClip, tmp_path: Path, second: float) -> None:
    clip = make_clip("clip.mp4", frames=50)
    high, low = (remux(clip, tmp_path / name, moved_by(begins)) for name, begins in (("a.ts", 30), ("b.ts", second)))
    data = joined(tmp_path / "joined.ts", high, low).read_bytes()

    def stream(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "video/mp2t")
        handler.end_headers()
        for at in range(0, len(data), 1880):
            handler.wfile.write(data[at : at + 1880])
            time.sleep(4 / (len(data) / 1880))

    ring = PacketRing(60)
    with http(stream) as url, open_source(f"{url}/joined.ts", retry=False) as source:
        assert isinstance(source, LiveSource)
        source.taps.video.append(ring.add)
        with pytest.raises(LiveError, match="has ended"):
            for _ in source:
                pass
    assert write_clip(ring.cut(Moment(0), Moment(9e9)), tmp_path / "clip.mp4") == pytest.approx(4, abs=1)
    assert set(range(12, 48)) <= set(shown(tmp_path / "clip.mp4"))
    assert len(shown(tmp_path / "clip.mp4")) >= 80

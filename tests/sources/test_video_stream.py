"""One choice of the video stream: the one a player shows, from files, live addresses and clips."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import av
import numpy as np
import pytest
from av.stream import Discard, Disposition

from saccade.pipeline.events.storage.clips import copy_clip
from saccade.sources import FileSource, SourceError, open_source
from saccade.sources.video_stream import NoVideoError, choose_video
from tests.support.cameras.http_camera import http
from tests.support.clips import numbered_image

SMALL, LARGE = (160, 96), (320, 192)


@dataclass
class Track:
    size: tuple[int, int]
    codec: str = "libx264"
    flags: int = 0
    frames: int = 20


def write(path: Path, *tracks: Track) -> Path:
    with av.open(str(path), "w") as container:
        streams = []
        for track in tracks:
            stream = container.add_stream(track.codec, rate=10)
            stream.width, stream.height = track.size
            stream.pix_fmt = {"mjpeg": "yuvj420p", "png": "rgb24"}.get(track.codec, "yuv420p")
            stream.codec_context.max_b_frames = 0
            stream.disposition = Disposition(track.flags)
            streams.append(stream)
        for number in range(max(track.frames for track in tracks)):
            for track, stream in zip(tracks, streams, strict=True):
                if number < track.frames:
                    frame = av.VideoFrame.from_ndarray(numbered_image(number, *track.size), format="rgb24")
                    frame.pts, frame.time_base = number, Fraction(1, 10)
                    container.mux(stream.encode(frame))
        for stream in streams:
            container.mux(stream.encode(None))
    return path


DEFAULT, COVER, THUMBNAILS = Disposition.default, Disposition.attached_pic, Disposition.timed_thumbnails
CASES = {
    "larger, flags say nothing": ("mkv", [Track(SMALL), Track(LARGE)], 1),
    "first of equals": ("mkv", [Track(LARGE), Track(LARGE)], 0),
    "larger, in a transport stream": ("ts", [Track(SMALL), Track(LARGE)], 1),
    "default, although smaller": ("mkv", [Track(LARGE), Track(SMALL, flags=DEFAULT)], 1),
    "default, after a preview": ("mkv", [Track(SMALL), Track(LARGE, flags=DEFAULT)], 1),
    "larger of two defaults": ("mkv", [Track(SMALL, flags=DEFAULT), Track(LARGE, flags=DEFAULT)], 1),
    "not for the impaired": ("mkv", [Track(LARGE, flags=Disposition.visual_impaired), Track(SMALL)], 1),
    "no cover": ("mp4", [Track(LARGE, "mjpeg", COVER, 1), Track(SMALL)], 1),
    "no cover without a flag": ("mkv", [Track(LARGE, "mjpeg", frames=1), Track(SMALL)], 1),
    "no cover that is flagged as default": ("mp4", [Track(LARGE, "png", DEFAULT, 1), Track(SMALL)], 1),
    "no timed thumbnails": ("mkv", [Track(LARGE, "mjpeg", THUMBNAILS, 5), Track(SMALL)], 1),
    "Motion JPEG that moves": ("avi", [Track(SMALL), Track(LARGE, "mjpeg")], 1),
    "a single frame, where there is nothing else": ("mp4", [Track(SMALL, "mjpeg", frames=1)], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_stream_of_a_file(case: str, tmp_path: Path) -> None:
    suffix, tracks, expected = CASES[case]
    path = write(tmp_path / f"clip.{suffix}", *tracks)
    with av.open(str(path)) as container:
        if case == "no timed thumbnails":  # Matroska cannot write the flag
            container.streams[0].disposition = THUMBNAILS
        chosen = choose_video(container)
        assert len(container.streams) == len(tracks)
        assert (chosen.width, chosen.height) == tracks[expected].size
        if len({track.size for track in tracks}) == 1:
            assert chosen.index == expected
        assert [stream.discard == Discard.all for stream in container.streams] == [
            stream is not chosen for stream in container.streams
        ]


def test_files_and_clips_show_the_same_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "clip.mkv", Track(SMALL), Track(LARGE, flags=DEFAULT))
    with open_source(path) as source:
        assert (source.info.width, source.info.height) == LARGE
        assert {frame.image.shape[1] for frame in source} == {LARGE[0]}
    copy_clip(FileSource(path).index, 0, 1, tmp_path / "part.mp4")
    with open_source(tmp_path / "part.mp4") as source:
        assert (source.info.width, source.info.height) == LARGE


def test_only_a_cover_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "song.m4a"
    with av.open(str(path), "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=48000)
        picture = container.add_stream("mjpeg", rate=1)
        picture.width, picture.height, picture.pix_fmt = 64, 64, "yuvj420p"
        picture.disposition = COVER
        image = av.VideoFrame.from_ndarray(numbered_image(1, 64, 64), format="rgb24")
        container.mux(picture.encode(image))
        container.mux(picture.encode(None))
        silence = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        silence.sample_rate = 48000
        container.mux(sound.encode(silence))
        container.mux(sound.encode(None))
    with pytest.raises(SourceError, match=r"song\.m4a: no video stream found"):
        open_source(path)


def test_variants_of_hls_that_are_not_used_are_not_fetched(tmp_path: Path) -> None:
    for name, size in (("low", SMALL), ("high", LARGE)):
        write(tmp_path / f"{name}.ts", Track(size, frames=5))
        parts = "".join(f"#EXTINF:0.5,\n{name}.ts?part={n}\n" for n in range(12))
        (tmp_path / f"{name}.m3u8").write_text(
            "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-PLAYLIST-TYPE:VOD\n"
            + parts
            + "#EXT-X-ENDLIST\n"
        )
    (tmp_path / "all.m3u8").write_text(
        "#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=100000\nlow.m3u8\n#EXT-X-STREAM-INF:BANDWIDTH=500000\nhigh.m3u8\n"
    )
    asked: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        data = (tmp_path / Path(request.path.partition("?")[0]).name).read_bytes()
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    with http(answer) as url, open_source(f"{url}/all.m3u8") as source:
        frames = list(itertools.islice(source, 25))
        assert {frame.image.shape[1] for frame in frames} == {LARGE[0]}
    segments = [path for path in asked if ".ts" in path]
    assert sum("high" in path for path in segments) >= 5
    assert sum("low" in path for path in segments) <= 2  # to find out what it is


@pytest.mark.parametrize("thumbnail", [False, True])
def test_a_photo_in_tiles_is_refused_and_its_thumbnail_not_taken_for_it(tmp_path: Path, thumbnail: bool) -> None:
    path = write(tmp_path / "photo.mkv", *(Track(SMALL) for _ in range(4)))
    with av.open(str(path)) as container:
        for stream in container.streams.video[: 3 if thumbnail else 4]:
            stream.disposition = Disposition.dependent
        photo = type("Photo", (), {"streams": container.streams, "format": container.format, "duration": None})
        with pytest.raises(NoVideoError, match=rf"{3 if thumbnail else 4} tiles .* convert the image to JPEG"):
            choose_video(photo)  # type: ignore[arg-type]

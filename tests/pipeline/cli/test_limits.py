"""What cannot be written or read is said in one line before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import av
import pytest
from PIL import Image

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sinks import SinkError
from saccade.sinks.video.mp4_writer import check_size
from tests.support.command import LONG_S, Command, environment

PERSON = ["--detect", "person"]


def fails(saccade: Command, folder: Path, message: str, *arguments: object) -> None:
    before = sorted(os.listdir(folder))
    done = saccade(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("name", "width", "limit"), [("w.gif", 70_000, "65535"), ("w.jpg", 66_000, "65500"), ("w.webp", 17_000, "16383")]
)
def test_an_image_too_wide_for_a_format(
    tmp_path: Path, saccade: Command, monkeypatch: pytest.MonkeyPatch, name: str, width: int, limit: str
) -> None:
    Image.new("RGB", (width, 8)).save(tmp_path / "wide.png")
    monkeypatch.setattr("saccade.pipeline.cli.commands.image.load_engine", lambda *_: pytest.fail("work was done"))
    message = f"cannot write {name}: the image is {width} x 8 pixels, and "
    fails(saccade, tmp_path, message, "image", "wide.png", *PERSON, "--out", name)
    fails(saccade, tmp_path, f"allows {limit} pixels per side", "probe", "wide.png", "--out", name)


@pytest.mark.parametrize("size", [(16_386, 4), (4, 16_386), (20_000, 2)])
@pytest.mark.parametrize("out", [["--out", "o.mp4"], ["--sink", "o-%H.mp4"], ["--sink", "{stream}.mp4?segment=1m"]])
def test_a_video_too_wide_for_h264(
    tmp_path: Path, saccade: Command, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], out: list[str]
) -> None:
    Image.new("RGB", size).save(tmp_path / "wide.png")
    monkeypatch.setattr("saccade.pipeline.control.local.load_engine", lambda *_: pytest.fail("work was done"))
    message = f"the frames are {size[0]} x {size[1]} pixels, and H.264 allows 16384 pixels per side"
    fails(saccade, tmp_path, message, "run", "wide.png", *PERSON, *out)


def test_a_heatmap_too_wide_for_a_jpeg(tmp_path: Path, saccade: Command) -> None:
    Image.new("RGB", (66_000, 2)).save(tmp_path / "wide.png")
    fails(saccade, tmp_path, "JPEG allows 65500 pixels per side", "run", "wide.png", *PERSON, "--heatmap", "heat.jpg")


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (641, 361), (16_383, 3), (2, 16_384)])
def test_any_other_size_is_written(tmp_path: Path, saccade: Command, size: tuple[int, int]) -> None:
    Image.new("RGB", size, "red").save(tmp_path / "odd.png")
    done = saccade("run", "odd.png", *PERSON, "--out", "o.mp4", "-q", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    with av.open(str(tmp_path / "o.mp4")) as video:
        (frame,) = video.decode(video=0)
    assert (frame.width, frame.height) == (size[0] + size[0] % 2, size[1] + size[1] % 2)


def test_the_area_of_a_video_has_a_limit() -> None:
    with pytest.raises(SinkError, match="260 million in total"):
        check_size(Path("o.mp4"), 16_384, 16_384)
    check_size(Path("o.mp4"), 16_384, 15_200)


@pytest.mark.parametrize("command", [["run", DEMO_CLIP, *PERSON, "--out", "w.mp4"], ["configs"], ["doctor"]])
def test_a_working_directory_that_is_gone(tmp_path: Path, command: list[object]) -> None:
    words = " ".join(map(str, command))
    line = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m saccade {words}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "saccade: the working directory no longer exists: change to an existing directory\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: none.mp4\n", "source: no such file: none.mp4"),
        ("streams:\n  - source: here.png\n  - source: none\n", "streams[1].source: no such file: none"),
        ("source: here.png\nhttp_token_file: none.txt\n", "http_token_file: no such file: none.txt"),
        ("source: here.png\nhttp_cert: none.pem\n", "http_cert: no such file: none.pem"),
        ("source: here.png\nhttp_access: none.yaml\n", "http_access: no such file: none.yaml"),
        ("source: here.png\nmodel: ./none\n", "model: no such file: ./none"),
    ],
)
def test_a_file_that_is_not_there_is_a_mistake_of_a_configuration(
    tmp_path: Path, saccade: Command, text: str, message: str
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "here.png")
    (tmp_path / "cameras.yaml").write_text(f"{text}detect: person\n")
    fails(saccade, tmp_path, message, "config", "check", "cameras.yaml")


@pytest.mark.parametrize("source", ["here.png", ".", "0", "webrtc:8081", "rtsp://192.0.2.7/door"])
def test_what_is_there_or_no_file_is_fine(tmp_path: Path, saccade: Command, source: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "here.png")
    (tmp_path / "cameras.yaml").write_text(f"source: '{source}'\ndetect: person\n")
    assert saccade("config", "check", "cameras.yaml", cwd=tmp_path).returncode == 0

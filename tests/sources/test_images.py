"""ImageSource: order, orientation and what cannot be read."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.sources import ImageSource, SourceError, open_source


def save(
    path: Path, color: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (40, 20), **options: object
) -> Path:
    Image.new("RGB", size, color).save(path, **options)  # type: ignore[arg-type]
    return path


def test_a_folder_is_read_in_the_order_people_expect(tmp_path: Path) -> None:
    for n in (10, 9, 1, 100):
        save(tmp_path / f"shot{n}.png", (n, 0, 0))
    (tmp_path / "notes.txt").write_text("not an image")
    source = open_source(tmp_path, stream="album")
    frames = list(source)
    assert [int(f.image[0, 0, 0]) for f in frames] == [1, 9, 10, 100]
    assert [(f.index, f.pts) for f in frames] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert {(f.stream, f.time_base, f.capture_clock) for f in frames} == {("album", Fraction(1), "file")}
    assert (source.info.codec, source.info.frames, source.info.width, source.info.height) == ("png", 4, 40, 20)


def test_stride_and_window_count_images(tmp_path: Path) -> None:
    for n in range(8):
        save(tmp_path / f"{n}.png", (n, 0, 0))
    assert [f.index for f in ImageSource(tmp_path, vid_stride=2, start=1, end=6)] == [2, 4]
    with pytest.raises(SourceError, match="between start and end; the 8 images last one second each"):
        ImageSource(tmp_path, start=8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(tmp_path: Path, orientation: int) -> None:
    # The upright image has a red corner top left; store it as a camera held that way would.
    upright = np.full((32, 64, 3), 200, np.uint8)
    upright[:16, :16] = (220, 0, 0)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.jpg"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif, quality=95)
    (frame,) = ImageSource(path)
    assert frame.image.shape == (32, 64, 3)
    assert np.abs(frame.image.astype(int) - upright).mean() < 5


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_any_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "image.tif"
    Image.new("RGB", (30, 20), (255, 255, 255)).convert(mode).save(path)
    (frame,) = ImageSource(path)
    assert frame.image.shape == (20, 30, 3)
    assert frame.image.dtype == np.uint8
    assert frame.image.min() == 255


def test_sixteen_bits_of_grey_keep_their_shades(tmp_path: Path) -> None:
    path = tmp_path / "thermal.png"
    Image.fromarray(np.array([[0, 20000], [40000, 65535]], np.uint16)).save(path)
    (frame,) = ImageSource(path)
    assert frame.image[..., 0].tolist() == [[0, 78], [156, 255]]


def test_damaged_images_of_a_folder_are_skipped_and_counted(tmp_path: Path) -> None:
    for n in range(4):
        save(tmp_path / f"{n}.jpg", (50 * n, 0, 0))
    (tmp_path / "0.jpg").write_bytes(b"no jpeg at all")
    whole = (tmp_path / "2.jpg").read_bytes()
    (tmp_path / "2.jpg").write_bytes(whole[: len(whole) // 2])
    source = ImageSource(tmp_path)
    frames = list(source)
    assert [(f.index, f.dropped_before) for f in frames] == [(1, 1), (3, 1)]
    assert source.corrupt_packets == 2


def test_close_ends_iteration(tmp_path: Path) -> None:
    for n in range(5):
        save(tmp_path / f"{n}.png")
    with ImageSource(tmp_path) as source:
        frames = iter(source)
        next(frames)
        source.close()
        assert list(frames) == []


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("photo.jpg", None, "no such file"),
        ("photo.jpg", b"", "is empty"),
        ("photo.jpg", b"hello", "not an image|cannot be read as a video"),
        ("photo.webp", bytes(100), "not an image|cannot be read as a video"),
    ],
)
def test_bad_images_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None, expected: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=expected) as caught:
        open_source(path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="contains no images"):
        open_source(tmp_path)
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "b.png").write_bytes(b"x")
    with pytest.raises(SourceError, match="none of the 2 images can be read"):
        open_source(tmp_path)

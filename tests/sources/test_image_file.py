"""What an image file is, by its content: format, number of images, shades, limits."""

from __future__ import annotations

import io
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade.sources import FileSource, ImageSource, SourceError, open_source
from saccade.sources.image_file import ImageFile, image_format, read_image
from tests.support.clips import MakeClip

RED, GREEN, BLUE = (Image.new("RGB", (40, 30), color) for color in ("red", "lime", "blue"))
FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
ANIMATED = ("AVIF", "GIF", "PNG", "WEBP")


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def several(kind: str, **options: object) -> bytes:
    return encoded(RED, kind, save_all=True, append_images=[GREEN, BLUE], **options)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "name", ["still", "still.jpg", "still.png", "still.mp4", "still.txt", "still.gif", "st%03d.tga"]
)
def test_a_still_is_an_image_whatever_its_name(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(encoded(RED, kind))
    with open_source(path) as source:
        (frame,) = source
        assert (source.info.codec, source.info.frames) == (kind.lower(), 1)
    height, width, _ = frame.image.shape
    assert np.abs(frame.image[height // 2, width // 2].astype(int) - (255, 0, 0)).max() < 12


@pytest.mark.parametrize("name", ["clip.jpg", "clip.tif", "clip", "clip.gif"])
def test_a_video_is_a_video_whatever_its_name(tmp_path: Path, make_clip: MakeClip, name: str) -> None:
    path = tmp_path / name
    shutil.move(make_clip(frames=7), path)
    with open_source(path) as source:
        assert isinstance(source, FileSource)
        assert len(list(source)) == 7


@pytest.mark.parametrize("kind", ANIMATED)
def test_every_frame_of_an_animation_comes_at_its_time(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "moving.jpg"
    path.write_bytes(several(kind, duration=[100, 250, 40]))
    with ImageSource(path) as source:
        frames = list(source)
        assert (source.info.frames, source.info.codec) == (3, kind.lower())
    assert [frame.image[15, 20].argmax() for frame in frames] == [0, 1, 2]
    assert [float(frame.pts * frame.time_base) for frame in frames] == [0, 0.1, 0.35]
    assert [frame.captured_at for frame in frames] == [0, 0.1, 0.35]
    assert [frame.index for frame in ImageSource(path, vid_stride=2)] == [0, 2]
    assert [frame.index for frame in ImageSource(path, start=0.1, end=0.3)] == [1]


def test_every_page_of_a_tiff_is_an_image_but_not_its_thumbnail(tmp_path: Path) -> None:
    path = tmp_path / "scan.tif"
    small = RED.resize((10, 8))
    small.encoderinfo = {"tiffinfo": {254: 1}}
    RED.save(path, save_all=True, append_images=[small, GREEN])
    with Image.open(path) as saved:
        assert saved.n_frames == 3  # type: ignore[attr-defined]
    frames = list(ImageSource(path))
    assert [(f.index, f.pts, f.image.shape[1], int(f.image[5, 5].argmax())) for f in frames] == [
        (0, 0, 40, 0),
        (1, 1, 40, 1),
    ]


def test_an_image_for_programs_without_animations_is_not_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "moving.png"
    path.write_bytes(several("PNG", duration=50, default_image=True))
    assert [int(frame.image[5, 5].argmax()) for frame in ImageSource(path)] == [1, 2]


def test_images_behind_a_photo_are_no_frames(tmp_path: Path) -> None:
    (tmp_path / "listed.jpg").write_bytes(several("MPO"))
    gain_map = encoded(RED.resize((20, 15)), "JPEG")
    (tmp_path / "gain-map.jpg").write_bytes(encoded(RED, "JPEG") + gain_map)
    (tmp_path / "motion.jpg").write_bytes(encoded(RED, "JPEG") + b"\0\0\0\x18ftypmp42" + bytes(100))
    for name in ("listed.jpg", "gain-map.jpg", "motion.jpg"):
        (frame,) = open_source(tmp_path / name)
        assert frame.image.shape == (30, 40, 3)
    assert [frame.index for frame in ImageSource(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["cam.mjpeg", "cam.jpg", "cam"])
@pytest.mark.parametrize("padding", [b"", b"\0" * 5, b"\xff"])
def test_jpegs_one_behind_the_other_are_a_video(tmp_path: Path, name: str, padding: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(b"".join(encoded(image, "JPEG") + padding for image in (RED, GREEN, BLUE)))
    assert [int(frame.image[5, 5].argmax()) for frame in open_source(path)] == [0, 1, 2]


def test_a_folder_goes_by_content_and_takes_every_image_of_a_file(tmp_path: Path, make_clip: MakeClip) -> None:
    (tmp_path / "1").write_bytes(encoded(RED, "PNG"))
    (tmp_path / "2.dat").write_bytes(several("GIF", duration=100))
    (tmp_path / "3.jpg").write_bytes(b"damaged")
    (tmp_path / "4.jpg").write_bytes(encoded(BLUE, "TIFF"))
    (tmp_path / "notes.txt").write_text("BMP, P6, GIF")
    make_clip("5.mp4")
    source = ImageSource(tmp_path)
    frames = list(source)
    found = [(f.index, f.pts, f.dropped_before, int(f.image[5, 5].argmax())) for f in frames]
    assert found == [(0, 0, 0, 0), (1, 1, 0, 0), (2, 2, 0, 1), (3, 3, 0, 2), (5, 5, 1, 2)]
    assert source.info.frames == 6
    assert [frame.index for frame in ImageSource(tmp_path, vid_stride=2)] == [0, 2]
    assert [frame.index for frame in ImageSource(tmp_path, start=2, end=4)] == [2, 3]


def _deep(kind: str, *channels: int) -> Callable[[], bytes]:
    pixels = np.full((30, 40, len(channels)) if len(channels) > 1 else (30, 40), channels, np.uint16)
    return lambda: bytes(cv2.imencode(kind, pixels)[1])


def _palette() -> bytes:
    image = Image.new("P", (40, 30))
    image.putpalette([9, 200, 9] * 256)
    return encoded(image, "PNG")


def _clear_palette() -> bytes:
    image = Image.new("P", (40, 30))
    image.putpalette([9, 200, 9] * 256)
    return encoded(image, "PNG", transparency=bytes(256))


SHADES: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
    "16 bits of grey": (_deep(".png", 30000), (117, 117, 117)),
    "16 bits of grey in a TIFF": (_deep(".tif", 30000), (117, 117, 117)),
    "16 bits of colour": (_deep(".png", 2560, 25600, 51200), (200, 100, 10)),
    "16 bits of colour in a TIFF": (_deep(".tif", 2560, 25600, 51200), (200, 100, 10)),
    "16 bits in a PGM": (lambda: encoded(Image.fromarray(np.full((30, 40), 30000, np.uint16)), "PPM"), (117, 117, 117)),
    "fractions": (lambda: encoded(Image.new("F", (40, 30), 0.5), "TIFF"), (128, 128, 128)),
    "palette": (_palette, (9, 200, 9)),
    "clear palette": (_clear_palette, (255, 255, 255)),
    "cmyk": (lambda: encoded(Image.new("CMYK", (40, 30), (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
    "grey with alpha": (lambda: encoded(Image.new("LA", (40, 30), (0, 0)), "PNG"), (255, 255, 255)),
    "half clear": (lambda: encoded(Image.new("RGBA", (40, 30), (0, 0, 0, 128)), "PNG"), (127, 127, 127)),
    "clear WebP": (lambda: encoded(Image.new("RGBA", (40, 30), (0, 0, 0, 0)), "WEBP"), (255, 255, 255)),
    "clear GIF": (lambda: encoded(Image.new("RGBA", (40, 30), (0, 0, 0, 0)), "GIF"), (255, 255, 255)),
    "a clear shade of grey": (lambda: encoded(Image.new("L", (40, 30), 7), "PNG", transparency=7), (255, 255, 255)),
    "black and white": (lambda: encoded(Image.new("1", (40, 30), 1), "TIFF"), (255, 255, 255)),
    "lab": (lambda: encoded(Image.new("LAB", (40, 30), (255, 128, 128)), "TIFF"), (255, 255, 255)),
}


@pytest.mark.parametrize("kind", SHADES)
def test_shades_are_as_a_viewer_shows_them(kind: str) -> None:
    make, color = SHADES[kind]
    image = read_image(make())
    assert (image.shape, image.dtype) == ((30, 40, 3), np.uint8)
    assert np.abs(image.astype(int) - color).max() <= 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP", "AVIF"])
def test_too_many_pixels_are_refused_with_limit_and_size(kind: str) -> None:
    with pytest.raises(SourceError, match=r"has 40 x 30 = 0\.0012 million pixels; the limit is 0\.0011 million"):
        ImageFile(io.BytesIO(encoded(RED, kind)), max_pixels=1100)


def test_a_large_photo_is_read_and_a_larger_one_refused_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(_png_header(20_000, 15_000))
    with pytest.raises(
        SourceError, match=r"photo.png: the image has 20000 x 15000 = 300 million pixels; the limit is 250 million"
    ):
        open_source(path)
    Image.new("L", (12_000, 8_000)).save(path, compress_level=1)
    (frame,) = open_source(path)
    assert frame.image.shape == (8_000, 12_000, 3)


def _png_header(width: int, height: int) -> bytes:
    small = bytearray(encoded(RED, "PNG"))
    small[16:24] = width.to_bytes(4) + height.to_bytes(4)
    small[29:33] = zlib.crc32(small[12:29]).to_bytes(4)
    return bytes(small)


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_one_line(kind: str, tmp_path: Path) -> None:
    whole = encoded(Image.effect_noise((40, 30), 90).convert("RGB"), kind)
    path = tmp_path / "cut.png"
    path.write_bytes(whole[:25])
    with pytest.raises(SourceError, match=r"\A[^\n]*cut\.png[^\n]*\Z"):
        list(open_source(path))
    for length in range(30, len(whole), len(whole) // 7):
        path.write_bytes(whole[:length])
        with suppress(SourceError):
            assert len(list(open_source(path))) <= 1


@given(st.binary(max_size=64))
def test_any_bytes_have_a_format_or_none(data: bytes) -> None:
    assert image_format(data) in (None, *FORMATS, "PSD", "QOI", "ICNS")


@pytest.mark.parametrize(
    "head", [b"", b"BM", b"BMW is a car", b"P6", b"GIF", b"\0\0\1\xba", b"\0\0\1\0\0\0\1\x20", b"\0\0\0\x18ftypheic"]
)
def test_what_only_begins_like_an_image_is_none(head: bytes) -> None:
    assert image_format(head + bytes(100)) is None

"""Images written in the format of their suffix, or refused before any work."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.sinks import SinkError
from saccade.sinks.still import check_still, jpeg, save_still

IMAGE = np.full((5, 7, 3), (200, 40, 10), np.uint8)


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG", "webp", "gif", "bmp", "tif", "tiff", "avif", "ppm", "tga"])
def test_every_format_is_written_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"found.{suffix}"
    path.write_bytes(b"an older one")
    save_still(path, IMAGE)
    with Image.open(path) as written:
        assert written.size == (7, 5)
        assert np.abs(np.asarray(written.convert("RGB")).astype(int) - IMAGE).max() < 40
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("suffix", "longest"), [("gif", 65_535), ("jpg", 65_500), ("webp", 16_383), ("tga", 65_535), ("avif", 32_768)]
)
def test_the_limit_of_a_format_is_that_of_its_writer(tmp_path: Path, suffix: str, longest: int) -> None:
    path = tmp_path / f"wide.{suffix}"
    for size in ((longest + 1, 2), (2, longest + 1)):
        with pytest.raises(
            SinkError, match=rf"the image is {size[0]} x {size[1]} pixels, and .* allows {longest} pixels per side"
        ):
            check_still(path, *size)
    with pytest.raises(SinkError, match=r"use \.png"):
        save_still(path, np.zeros((1, longest + 1, 3), np.uint8))
    assert not path.exists()
    if suffix != "avif":  # which takes its time
        save_still(path, np.zeros((1, longest, 3), np.uint8))
        with Image.open(path) as written:
            assert written.size == (longest, 1)


@pytest.mark.parametrize("name", ["found", "found.xyz", "found.pdf", "found.ico", "folder.png", "none/found.png"])
def test_what_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SinkError, match=rf"\Acannot write [^\n]*{name}: [^\n]*\Z"):
        check_still(tmp_path / name, 7, 5)


def test_a_link_stays_a_link_and_a_failure_leaves_the_old_image(tmp_path: Path) -> None:
    save_still(tmp_path / "real.png", IMAGE)
    (tmp_path / "link.png").symlink_to("real.png")
    save_still(tmp_path / "link.png", IMAGE[:3])
    assert (tmp_path / "link.png").is_symlink()
    before = (tmp_path / "real.png").read_bytes()
    (tmp_path / ".real.png.part").mkdir()  # so that nothing can be written beside it
    with pytest.raises((SinkError, OSError)):
        save_still(tmp_path / "real.png", IMAGE)
    assert (tmp_path / "real.png").read_bytes() == before


@pytest.mark.parametrize(
    ("shape", "size"), [((4, 70_000, 3), (65_500, 3)), ((70_000, 1, 3), (1, 65_500)), ((5, 7, 3), (7, 5))]
)
def test_a_jpeg_in_memory_is_made_to_fit(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(jpeg(np.full(shape, (200, 40, 10), np.uint8), 90))) as shown:
        assert shown.size == size
        assert np.abs(np.asarray(shown)[0, 0].astype(int) - (200, 40, 10)).max() < 8

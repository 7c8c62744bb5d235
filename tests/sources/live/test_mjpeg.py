"""JPEGs are found whatever a camera writes between them, and however the bytes are cut."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from saccade.sources.live.mjpeg import JpegSplitter, NoJpegError, is_mjpeg
from tests.support.clips import numbered_image


def photo(number: int, **options: object) -> bytes:
    data = io.BytesIO()
    Image.fromarray(numbered_image(number, 160, 96)).save(data, "JPEG", **options)
    return data.getvalue()


def with_thumbnail() -> bytes:
    plain = photo(3)
    segment = b"Exif\0\0" + photo(4)
    return plain[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2) + segment + plain[2:]


IMAGES = [
    photo(1),
    photo(2, progressive=True),
    with_thumbnail(),
    photo(5, restart_marker_blocks=1),
    photo(6, quality=5),
]


def head(image: bytes) -> bytes:
    return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(image)


def split(data: bytes, size: int = 1 << 20) -> list[bytes]:
    splitter = JpegSplitter()
    return [image for at in range(0, len(data), size) for image, _ in splitter.feed(data[at : at + size], float(at))]


BETWEEN = {
    "usual": lambda image: head(image) + image + b"\r\n",
    "nothing": lambda image: image,
    "no type": lambda image: b"--frame\r\n\r\n" + image + b"\r\n",
    "lines end in LF": lambda image: b"--frame\nContent-Type: image/jpg\n\n" + image + b"\n",
    "wrong length": lambda image: b"--frame\r\nContent-Length: 7\r\n\r\n" + image + b"\r\n",
    "long headers": lambda image: b"--frame\r\nX-Long: " + b"a" * 5000 + b"\r\n\r\n" + image,
    "zeros behind": lambda image: head(image) + image + bytes(1000),
    "fill bytes": lambda image: head(image) + image[:2] + b"\xff\xff\xff" + image[2:] + b"\r\n",
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_whatever_is_between(name: str, size: int) -> None:
    found = split(b"\r\nhello\r\n" + b"".join(BETWEEN[name](image) for image in IMAGES), size)
    assert len(found) == len(IMAGES)
    for data, image in zip(found, IMAGES, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), np.asarray(Image.open(io.BytesIO(image))))


def test_an_image_is_given_with_its_last_byte_and_the_time_of_its_first() -> None:
    splitter = JpegSplitter()
    image = IMAGES[0]
    assert list(splitter.feed(head(image) + image[:500], 1.0)) == []
    assert list(splitter.feed(image[500:-1], 2.0)) == []
    assert list(splitter.feed(image[-1:], 3.0)) == [(image, 1.0)]
    assert list(splitter.feed(image, 4.0)) == [(image, 4.0)]


def test_images_that_lack_their_end_are_given_without_the_boundary() -> None:
    cut = [image[:-2] for image in IMAGES]
    found = split(b"".join(head(image) + image + b"\r\n" for image in [*cut, IMAGES[0]]))
    assert found == [*cut, IMAGES[0]]


def test_after_damage_the_next_images_are_found() -> None:
    broken = bytearray(IMAGES[0])
    broken[4:6] = b"\xff\xff"  # a segment that is as long as all that follows
    data = b"".join(head(image) + image + b"\r\n" for image in [IMAGES[1], bytes(broken), *IMAGES * 20])
    found = split(data)
    assert found[0] == IMAGES[1]
    assert found[-20:] == (IMAGES * 20)[-20:]


def test_what_is_no_jpeg_ends() -> None:
    with pytest.raises(NoJpegError):
        split(bytes(100 << 20))


@given(
    st.lists(st.sampled_from([*IMAGES, b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\xff\xda\0\2", b"--frame\r\n"])),
    st.integers(),
)
def test_any_mixture_gives_the_same_however_it_is_cut(pieces: list[bytes], seed: int) -> None:
    data, chance = b"".join(pieces), random.Random(seed)
    splitter, found, at = JpegSplitter(), [], 0
    while at < len(data):
        size = chance.choice([1, 3, 100, 2000])
        found += [image for image, _ in splitter.feed(data[at : at + size], 0.0)]
        at += size
    assert found == split(data)


@pytest.mark.parametrize(
    ("content_type", "data", "expected"),
    [
        ("multipart/x-mixed-replace", b"", True),
        ("multipart/x-mixed-replace boundary=x", b"", True),
        ("video/x-motion-jpeg", b"", True),
        ("image/jpeg", b"", True),
        ("", b"\r\n--frame\r\nContent-Length: 7\r\nContent-type: image/jpg\r\n\r\n", True),
        ("application/octet-stream", b"--x\ncontent-type: image/jpeg\n\n", True),
        ("application/octet-stream", b"\x47" * 188, False),
        ("text/html", b"<html>", False),
        ("video/mp2t", b"", False),
    ],
)
def test_motion_jpeg_is_known_by_its_type_or_its_head(content_type: str, data: bytes, expected: bool) -> None:
    assert is_mjpeg(content_type, lambda size: data[:size]) is expected

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from saccade.pipeline.api import images
from saccade.pipeline.api.images import contact_sheet, decode_image


def url_of(image: Image.Image, kind: str, **how: object) -> str:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


RED = Image.new("RGB", (30, 20), (250, 10, 10))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_every_usual_format_is_read(kind: str) -> None:
    image = decode_image(url_of(RED, kind))
    assert (image.shape, image.dtype) == ((20, 30, 3), np.uint8)
    assert np.abs(image.astype(int) - (250, 10, 10)).max() < 12


def test_a_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    assert decode_image(url_of(RED, "JPEG", exif=exif)).shape == (30, 20, 3)


@pytest.mark.parametrize(
    "url", ["", "cat.jpg", "data:image/png,AAAA", "data:image/png;base64,!", "data:;base64,AAAA", "https://192.0.2.1/a"]
)
def test_what_is_no_image_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="image"):
        decode_image(url)


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 500)
    with pytest.raises(ValueError, match=r"the image has 30 x 20 = .* million pixels; the limit is"):
        decode_image(url_of(RED, "PNG"))


def test_what_is_clear_is_white_and_sixteen_bits_keep_their_shades() -> None:
    assert decode_image(url_of(Image.new("RGBA", (30, 20), (0, 0, 0, 0)), "PNG")).min() == 255
    grey = Image.fromarray(np.full((20, 30), 30000, np.uint16))
    assert set(np.unique(decode_image(url_of(grey, "PNG")))) == {117}


def test_several_images_are_put_in_rows() -> None:
    one = np.full((20, 30, 3), 200, np.uint8)
    assert contact_sheet([one]) is one
    sheet = contact_sheet([one] * 3)
    assert sheet.shape == (1536, 1536, 3)
    lit = [bool(sheet[y, x].any()) for y in (384, 1152) for x in (384, 1152)]
    assert lit == [True, True, True, False]

"""NOTICE names what is passed on with Saccade, and nano's model card is about the weights that ship."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import av
import pytest

from tests.support import REPO

NANO = REPO / "engine" / "models" / "nano"
CARD = (NANO / "README.md").read_text(encoding="utf-8")
NOTICE = (REPO / "NOTICE").read_text(encoding="utf-8")
COPYLEFT = {"libx264": "x264", "libx265": "x265", "libgnutls": "GnuTLS", "libgmp": "GMP", "libmp3lame": "LAME"}


@pytest.mark.parametrize("library", COPYLEFT)
def test_what_pyav_carries_is_named(library: str) -> None:
    carried = [path.name for path in (Path(av.__file__).parents[1] / "av.libs").glob(f"{library}*")]
    if not carried:
        pytest.skip(f"this build of PyAV carries no {library}")
    assert re.search(rf"\b{COPYLEFT[library]}\b.*GPL", NOTICE, re.DOTALL)


def test_an_image_says_so() -> None:
    dockerfile = (REPO / "Dockerfile").read_text()
    assert re.search(r"^LABEL org.opencontainers.image.licenses=.*GPL-2.0-or-later", dockerfile, re.MULTILINE)
    assert "COPY LICENSE NOTICE " in dockerfile


def test_the_card_is_of_the_weights_that_ship() -> None:
    digest = hashlib.sha256((NANO / "model.safetensors").read_bytes()).hexdigest()
    assert f"`{digest}`" in CARD
    for title in ("Origin of the weights", "Training images", "Out-of-scope uses"):
        assert f"## {title}" in CARD


def test_the_card_has_the_figures_of_the_benchmark_page() -> None:
    def rows(text: str) -> dict[str, tuple[str, ...]]:
        found = re.findall(r"^\| ([a-z ]+|all 30[^|]*) \| (\d+) \|(.*)\|$", text.replace("*", ""), re.MULTILINE)
        return {name: (boxes, *(one.strip() for one in rest.split("|")[:4])) for name, boxes, rest in found}

    card, page = rows(CARD), rows((REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    assert len(card) == 10
    assert card == {name: page[name] for name in card}


def test_the_counts_of_pictures_add_up() -> None:
    sources = re.findall(r"^\| (train|val) \| [^|]+ \| ([\d,]+) \|", CARD, re.MULTILINE)
    for split, total in (("train", "13,841"), ("val", "908")):
        assert sum(int(count.replace(",", "")) for one, count in sources if one == split) == int(total.replace(",", ""))
        assert total in CARD

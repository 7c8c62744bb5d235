"""`--segment` from the command line and from a file, to records and to an image."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.command import run_saccade
from tests.support.engine import TINY_3, noise, random_model, write_model

CONFIG = dataclasses.replace(
    TINY_3,
    text=dataclasses.replace(TINY_3.text, vocab_size=1100, max_context=200),
    region=dataclasses.replace(TINY_3.region, reads="ln"),
    tokenizer=dataclasses.replace(
        TINY_3.tokenizer,
        templates={**TINY_3.tokenizer.templates, "segment": {"prefix": [1, 17, 2], "suffix": [3]}},
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose words are a few commands, a minus sign and numbers."""
    found = write_model(tmp_path / "tiny", CONFIG, random_model(CONFIG))
    words = {21: "M", 22: "L", 23: "C", 24: "Z", 25: "-", **{30 + number: str(number) for number in range(961)}}
    tokenizer = Tokenizer(models.WordLevel({words.get(n, f"o{n}"): n for n in range(1100)}, unk_token="o11"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.save(str(found / "tokenizer.json"))
    return found


def test_records_of_a_file_have_segments(folder: Path, tmp_path: Path) -> None:
    photo, out = tmp_path / "photo.png", tmp_path / "out.jsonl"
    Image.fromarray(noise(40, 60)).save(photo)
    config = tmp_path / "run.yaml"
    config.write_text(f"source: {photo}\nmodel: {folder}\ndevice: cpu\nsegment: [cat, dog]\npolygons: true\n")
    assert run_saccade("run", "--config", config, "--jsonl", out).returncode == 0
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["label"] for one in record["segments"]] == ["cat", "dog"]
    for one in record["segments"]:
        assert sorted(one) == ["bbox", "complete", "label", "path", "polygon", "refined", "rle"]
        assert one["path"].startswith("M ")
        assert one["rle"]["size"] == [40, 60]
        assert one["refined"] is False


def test_an_image_is_outlined(folder: Path, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.fromarray(noise(40, 60)).save(photo)
    found = run_saccade("image", photo, "--segment", "cat", "--model", folder, "--device", "cpu")
    assert found.returncode == 0
    assert "cat  outline " in found.stdout


def test_nano_says_that_it_cannot_outline(tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.fromarray(noise(40, 60)).save(photo)
    found = run_saccade("image", photo, "--segment", "person")
    assert found.returncode != 0
    said = found.stderr.strip()
    assert "nano can detect and point, not segment" in said
    assert len(said.splitlines()) == 1

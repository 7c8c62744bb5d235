"""`--segment` from the command line and from a file, to records and to an image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.support.command import run_saccade
from tests.support.engine.material import noise, write_enclosing_model, write_outlining_model, write_refiner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_outlining_model(tmp_path / "tiny")


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


def test_a_refiner_redraws_outlines(tmp_path: Path) -> None:
    photo, out = tmp_path / "photo.png", tmp_path / "out.jsonl"
    Image.fromarray(noise(40, 60)).save(photo)
    folder, refiner = write_enclosing_model(tmp_path / "tiny"), write_refiner(tmp_path / "refiner.pt")
    asked = ("run", photo, "--segment", "200", "--model", folder, "--device", "cpu", "--jsonl", out)
    records = []
    for given in ((), ("--refiner", refiner)):
        assert run_saccade(*asked, *given).returncode == 0
        (outline,) = json.loads(out.read_text())["segments"]
        records.append(outline)
    assert [one["refined"] for one in records] == [False, True]
    assert records[0]["path"] != records[1]["path"]
    found = run_saccade(*asked, "--refiner", tmp_path / "none.pt")
    assert found.returncode != 0
    assert "unknown refiner" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_nano_says_that_it_cannot_outline(tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.fromarray(noise(40, 60)).save(photo)
    found = run_saccade("image", photo, "--segment", "person")
    assert found.returncode != 0
    said = found.stderr.strip()
    assert "nano does not support segment; it supports detect and point" in said
    assert len(said.splitlines()) == 1

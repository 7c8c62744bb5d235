"""`saccade doctor --model`: which published model a folder holds, and what is unusual about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from saccade.pipeline.cli.commands.doctor import examine_model
from tests.engine.models.moondream.test_moondream_3_1 import CONFIG, as_3_1, fp8, write_3_1
from tests.support.engine import random_model, write_model
from tests.support.engine.material import write_outlining_model, write_refiner


def test_the_family_and_the_types_of_a_file_are_named(tmp_path: Path) -> None:
    newer = write_3_1(tmp_path / "3.1", fp8(as_3_1(random_model(CONFIG))))
    found = {one.what: one for one in examine_model(str(newer))}
    assert found["model file"].detail == (
        "Moondream 3.1: stored as F32 and F8_E4M3, experts in FP8 (kept on Ada and later GPUs), context 32768"
    )
    assert "reads ln" in found


def test_a_refiner_that_fits_is_named(tmp_path: Path) -> None:
    folder, refiner = write_outlining_model(tmp_path / "tiny"), write_refiner(tmp_path / "refiner.pt")
    found = {one.what: one for one in examine_model(str(folder), str(refiner))}
    assert (found["refiner"].ok, found["refiner"].detail) == (True, f"{refiner} fits the model's vision encoder")
    refiner.write_bytes(b"nothing like it")
    broken = {one.what: one for one in examine_model(str(folder), str(refiner))}["refiner"]
    assert (broken.ok, broken.needed) == (False, True)
    assert "not a PyTorch file" in broken.detail
    none = {one.what: one for one in examine_model("nano", str(refiner))}["refiner"]
    assert none.detail == "this model does not support a mask refiner; use Moondream 3"


def test_an_unknown_tensor_is_one_line(tmp_path: Path) -> None:
    held = as_3_1(random_model(CONFIG))
    held["text_model.transformer.h.0.other"] = held["text_model.lm_head.ln.weight"].clone()
    (found,) = examine_model(str(write_3_1(tmp_path / "3.1", held)))
    assert not found.ok
    assert "'model.text_model.transformer.h.0.other' of shape [32] is not part of the model" in found.detail
    assert "\n" not in found.detail


@pytest.mark.parametrize(("reads", "unusual"), [("ln", False), ("post_ln_ln", True)])
def test_an_unusual_reading_is_named(tmp_path: Path, reads: str, unusual: bool) -> None:
    config = dataclasses.replace(CONFIG, region=dataclasses.replace(CONFIG.region, reads=reads))
    folder = write_model(tmp_path / "3.0", config)
    detail = {one.what: one for one in examine_model(str(folder))}["model file"].detail
    assert detail.startswith("Moondream 3 (preview)")
    assert ("region heads use the input post_ln_ln, unlike the published model" in detail) == unusual

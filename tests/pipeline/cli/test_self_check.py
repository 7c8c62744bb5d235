"""What `saccade doctor --gpu` and `saccade golden` report of a machine that computes otherwise."""

from __future__ import annotations

import pytest
import torch

from saccade.engine.golden import self_check
from saccade.engine.golden.check_engine import Quantity
from saccade.engine.golden.self_check import Agreement
from saccade.pipeline.cli.commands import doctor
from saccade.pipeline.cli.formatting import golden_table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_its_check_fails_with_one_line() -> None:
    (finding,) = doctor.examine_gpu()
    assert (finding.ok, finding.needed) == (False, True)
    assert "no CUDA device" in finding.detail


def test_a_device_that_answers_otherwise_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "compare_devices", lambda device, dtype: Agreement(100, 40, 0.25))
    wanted = (
        r"only 60 of 100 answers match those of the CPU; .* from those of the CPU by up to 25\.0% of the image size"
    )
    with pytest.raises(RuntimeError, match=wanted):
        doctor.agreement("cuda:0", "float32")
    assert doctor.agreement("cuda:0", "bfloat16") == "60 of 100 answers match those of the CPU"


def test_crops_that_differ_name_the_release_of_pillow() -> None:
    crops, boxes = Quantity("crops", 0.0), Quantity("boxes", 0.0)
    boxes.add(1.0, "0.png")
    crops.add(0.0, "0.png")
    assert "Pillow" not in golden_table([crops, boxes])
    crops.add(0.25, "1.png")
    last = golden_table([crops, boxes]).splitlines()[-1]
    from PIL import __version__ as release

    assert last.startswith(f"Pillow {release} resized these crops")

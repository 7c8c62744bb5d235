"""Compares the inference time of Saccade and onnxruntime for the "nano" model's detector, with the same weights."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_rounds, require
from saccade.engine import Detect, Engine
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import images_of

_SIZE = 640, 360
_NOTE = (
    "Both run the same weights on the same 416×288 crops of a 640×360 image. Saccade computes in bfloat16 and "
    "onnxruntime in float32. The whole frame is nano from the image to its boxes; "
    "onnxruntime has no such row."
)


def compare(rounds: int, frames: int, threads: int) -> Comparison:
    """Measure the inference time of the "nano" model's detector in onnxruntime and in Saccade.

    Args:
        rounds: number of rounds.
        frames: number of images per round.
        threads: number of threads of each runtime.

    Raises:
        ConfigError: if onnxruntime or a package for the ONNX export is missing.
    """
    require("onnxruntime", "onnx", "onnxscript", install="onnxruntime onnx onnxscript")
    import onnxruntime

    images = images_of(str(DEMO_CLIP), *_SIZE)
    torch.set_num_threads(threads)
    with Engine.load("nano", "cpu", "float32") as plain, tempfile.TemporaryDirectory() as folder:
        tower = plain._loaded.model.vision
        assert isinstance(tower, DetectorTower)
        tower.quick_crops = True
        crops = [tower.normalize(torch.from_numpy(tower.make_crops(image).pixels[:1])) for image in images]
        with Engine.load("nano", "cpu") as engine, torch.inference_mode():
            path = _export(crops[0], Path(folder))
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            fused = engine._loaded.model.vision
            assert isinstance(fused, DetectorTower)
            _require_equal(session, tower, crops[0])
            shown, cropped = cycle(images), cycle(crops)

            def ours() -> Measured:
                network = _cpu_ms(lambda: fused.stem(next(cropped)), frames)
                return {
                    "detector network": network,
                    "whole frame": _cpu_ms(lambda: engine.submit(next(shown), [Detect("person")]).result(), frames),
                }

            def theirs() -> Measured:
                return {"detector network": _cpu_ms(lambda: session.run(None, {"x": next(cropped).numpy()}), frames)}

            units = dict.fromkeys(("detector network", "whole frame"), f"ms of CPU time, threads: {threads}")
            title = "nano's detector: Saccade's CPU path and onnxruntime"
            packages = ("onnxruntime", "onnx")
            made = begin("onnxruntime", title, _NOTE, units, packages)
            return in_rounds(made, {OURS: ours, "onnxruntime": theirs}, rounds)


class _Network(torch.nn.Module):
    """The "nano" model's detector as a PyTorch module for the ONNX export."""

    def __init__(self, stem: torch.nn.Module) -> None:
        super().__init__()
        self.stem = stem

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.stem(x)
        return found.classes, found.sides, found.features, found.grid


def _export(crop: torch.Tensor, folder: Path) -> Path:
    """Export the detector of the "nano" model to an ONNX file, and return its path."""
    from saccade.engine.model_loader import open_model

    path = folder / "nano.onnx"
    tower = open_model("nano", "cpu", "float32")[0].model.vision
    assert isinstance(tower, DetectorTower)
    torch.onnx.export(_Network(tower.stem).eval(), (crop.clone(),), str(path), input_names=["x"], verbose=False)
    gc.collect()
    return path


def _require_equal(session: Any, tower: DetectorTower, crop: torch.Tensor) -> None:
    """Check that the exported ONNX model and the original PyTorch model return the same values."""
    theirs, ours = session.run(None, {"x": crop.numpy()})[0], tower.stem(crop).classes.numpy()
    apart = float(np.abs(theirs - ours).max())
    if not apart < 1e-2:
        raise RuntimeError(
            f"the exported ONNX network and nano differ by up to {apart:.3g} in their outputs; the limit is 0.01"
        )


def _cpu_ms(run: Callable[[], object], frames: int) -> float:
    """Call `run` once per frame. Return the median CPU time of a call in milliseconds, summed over all threads."""
    took = []
    for _ in range(frames):
        begun = time.process_time()
        run()
        took.append(1000 * (time.process_time() - begun))
    return float(np.median(took))

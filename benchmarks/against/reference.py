"""Compares the inference time of the engine with a plain PyTorch implementation of Moondream 2.

The PyTorch implementation is `engine/golden/reference.py`: one image at a time, a contiguous KV cache, no CUDA graphs.
"""

from __future__ import annotations

import time
from itertools import cycle

import numpy as np

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_rounds, require_gpu
from saccade.engine import Detect, Engine
from saccade.engine.golden.random_model import MOONDREAM_2
from saccade.engine.golden.reference import Generator
from saccade.engine.model_loader import choose_device, choose_dtype, open_model
from saccade.engine.models import registry
from saccade.engine.models.protocol import LoadedModel
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import images_of
from saccade.pipeline.bench.load_generator import open_engine

_NOTE = (
    "Both find the same number of objects in each image, with the same weights and dtype. The reference loop is the "
    "project's own code in plain PyTorch, without torch.compile."
)


def compare(model: str, device: str, dtype: str | None, objects: int, rounds: int, frames: int) -> Comparison:
    """Measure the time per image of the engine and of a plain PyTorch implementation, from the pixels to the answer.

    Args:
        model: folder of a Moondream 2 model, or `moondream-2-random`, which needs a GPU.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        dtype: name of the dtype, or None for the device's default.
        objects: number of boxes in each answer.
        rounds: number of rounds.
        frames: number of images per round.

    Raises:
        ConfigError: if `moondream-2-random` is requested and there is no GPU.
        EngineError: if the model cannot be loaded.
    """
    if model == MOONDREAM_2 and device != "cpu":
        require_gpu(f"{MOONDREAM_2} (or pass --model FOLDER for a smaller model)")
    images = images_of(str(DEMO_CLIP), 640, 360)
    loaded = _load(model, device, dtype)
    generator = Generator(loaded.model, loaded.prompts.eos_id)
    task = Detect("person", objects, conf=0.0)
    prompt = loaded.prompts.objects("detect", "person")
    with open_engine(model, device, dtype=dtype) as engine:
        shown, also = cycle(images), cycle(images)

        def ours() -> Measured:
            return _times(lambda: engine.submit(next(shown), [task]).result(), frames)

        def theirs() -> Measured:
            def answer() -> None:
                prefix = generator.prefix(generator.image_tokens(next(also)))
                state = generator.prefill(prefix, [prompt], 3 * objects)
                generator.objects(state, True, [objects], [0.0])

            return _times(answer, frames)

        _require_equal(engine, generator, images[0], task, prompt)
        info = engine.model
        title = f"{info.name} on {info.device} in {info.dtype}: the engine and the reference loop"
        units = {"median": f"ms for an image and {objects} objects", "p99": "ms"}
        return in_rounds(begin("reference", title, _NOTE, units, ()), {OURS: ours, "reference loop": theirs}, rounds)


def _load(model: str, device: str, dtype: str | None) -> LoadedModel:
    """Load the model without an engine, for the plain PyTorch implementation."""
    if model in registry.RANDOM:
        import torch

        place = choose_device(device)
        return registry.load_random(
            model, place, choose_dtype(dtype, torch.float32 if place.type == "cpu" else torch.bfloat16)
        )
    return open_model(model, device, dtype, None)[0]


def _require_equal(engine: Engine, generator: Generator, image: np.ndarray, task: Detect, prompt: list[int]) -> None:
    state = generator.prefill(generator.prefix(generator.image_tokens(image)), [prompt], 3 * task.max_objects)
    theirs = len(generator.objects(state, True, [task.max_objects], [task.conf])[0])
    ours = len(engine.submit(image, [task]).result().detections)
    if ours != theirs:
        raise RuntimeError(
            f"object counts must be equal; Saccade's engine detected {ours}, the reference implementation {theirs}"
        )


def _times(run: object, frames: int) -> Measured:
    took = []
    assert callable(run)
    for _ in range(frames):
        begun = time.perf_counter()
        run()
        took.append(1000 * (time.perf_counter() - begun))
    return {"median": float(np.median(took)), "p99": float(np.percentile(took, 99))}

"""Compares a model with stored results of a reference implementation, and reports the largest difference per quantity.

A golden folder contains config.json, model.safetensors, cases.json and images/. There are two kinds of golden folders:

- With arrays.safetensors: intermediate tensors, logits for a question, and answers. The answers were decoded greedily
  with at most 6 objects and 24 tokens. A bias was added to the logit of the end token, so the score
  threshold was sigmoid(bias). The reference decoder (`reference.Generator`) and the engine are both compared.
- Without arrays.safetensors: calls of the reference's public API, with prompt token IDs and answers. Only the engine is
  compared (`check_engine`).

The engine processes all prompts on an image concurrently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from saccade.engine.errors import EngineError, ModelFilesError
from saccade.engine.golden.check_engine import (
    ANY_NUMBER,
    ANYTHING,
    MAX_OBJECTS,
    MAX_TOKENS,
    Quantity,
    compare_engine,
    read_image,
)
from saccade.engine.golden.reference import DenseCache, Generator
from saccade.engine.model_loader import choose_device, load_folder
from saccade.engine.models.protocol import Prompts, ReadableHeads
from saccade.engine.tasks.objects import DecodedObject

QUESTION, FIRST_OBJECT = "how many?", "person"


def check(
    folder: Path,
    device: str = "cpu",
    dtype: str = "float32",
    tolerance: float | None = None,
    *,
    through_engine: bool = True,
) -> list[Quantity]:
    """Compare a model with the stored results in a golden folder. Return one `Quantity` for each kind of result.

    In float32, boxes, points and texts must be equal. Embeddings, hidden states and logits must be within a tolerance.
    In other dtypes, differences are only reported. Image crops must be equal in every dtype.

    Args:
        folder: the golden folder, computed in float32.
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'bfloat16', 'float16' or 'fp8'. The reference decoder uses the PyTorch modules of the model
            without Triton kernels.
        tolerance: tolerance for embeddings, hidden states and logits. The default is 1e-4 in float32 (3e-4 for hidden
            states and logits of Moondream 3), and unlimited in other dtypes.
        through_engine: whether to compare the engine too.

    Raises:
        EngineError: if the device or dtype does not exist.
        ModelFilesError: if a file is missing, corrupt or inconsistent.
    """
    place = choose_device(device)
    try:
        loaded = load_folder(folder, place, dtype, torch.float32)
        _read_as_made(loaded.model.region, folder / "checks.json")
        cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        if not cases:
            raise ModelFilesError(f"{folder / 'cases.json'} contains no test cases")
        exact, compared = loaded.model.dtype == torch.float32, []
        if "calls" not in cases[0]:
            arrays = load_file(folder / "arrays.safetensors")
            generator = Generator(loaded.model, loaded.prompts.eos_id)
            quantities = _quantities(exact, tolerance, 3e-4 if "queries" in cases[0] else 1e-4)
            compared = _Checker(generator, loaded.prompts, folder, arrays, quantities).run(cases)
        return compared + (compare_engine(loaded, folder, cases, exact) if through_engine else [])
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelFilesError(
            f"{folder} is not a valid folder of golden tests: {type(error).__name__}: {error}"
        ) from error


def _read_as_made(heads: object, path: Path) -> None:
    """Select the normalization of the hidden states that checks.json names, if this file exists."""
    if path.is_file() and isinstance(heads, ReadableHeads):
        made = json.loads(path.read_text(encoding="utf-8")).get("region")
        reading = {"vllm": "post_ln_ln"}.get(made, made)
        if reading in heads.readings:
            heads.read_as(reading)


def _quantities(reproducible: bool, tolerance: float | None, of_states: float) -> dict[str, Quantity]:
    allowed = dict.fromkeys(("tiling", "crops"), 0.0)
    allowed |= dict.fromkeys(("boxes", "points", "texts"), 0.0 if reproducible else ANYTHING)
    if reproducible and of_states > 1e-4:
        allowed |= dict.fromkeys(("boxes", "points"), 1e-6)  # `exp2` differs between GPU and CPU
    for names, default in ((("image embeddings",), 1e-4), (("hidden states", "logits"), of_states)):
        usual = default if reproducible else ANY_NUMBER
        allowed |= dict.fromkeys(names, usual if tolerance is None else tolerance)
    return {name: Quantity(name, largest) for name, largest in allowed.items()}


class _Checker:
    def __init__(
        self,
        generator: Generator,
        prompts: Prompts,
        folder: Path,
        arrays: dict[str, torch.Tensor],
        quantities: dict[str, Quantity],
    ) -> None:
        self.generator, self.prompts, self.folder, self.arrays = generator, prompts, folder, arrays
        self.quantities = quantities

    def run(self, cases: list[dict[str, Any]]) -> list[Quantity]:
        for number, case in enumerate(cases):
            self._case(number, case)
        return [quantity for quantity in self.quantities.values() if quantity.compared]

    def _case(self, number: int, case: dict[str, Any]) -> None:
        generator, prompts = self.generator, self.prompts
        where = str(case["image"])
        image = read_image(self.folder / where)
        cut = generator.model.vision.make_crops(image)
        crops = (
            np.repeat(cut.pixels, 2, axis=0) if cut.tiling == (1, 1) else cut.pixels
        )  # the reference stores a single crop twice
        self._exact("tiling", (*cut.tiling, len(crops)), (*case["tiling"], case["crops"]), where)
        self._close("crops", torch.from_numpy(crops.reshape(len(crops), -1).mean(1)), f"{number}.crops_mean", where)
        # The larger set has this tensor for two images only.
        if "queries" not in case or f"{number}.crop_last" in self.arrays:
            self._close("crops", torch.from_numpy(crops[-1]), f"{number}.crop_last", where)
        tokens = generator.image_tokens(image)
        self._close("image embeddings", tokens, f"{number}.image_embeddings", where)
        prefix = generator.prefix(tokens)
        hidden = generator.prefill(prefix, [prompts.objects("detect", FIRST_OBJECT)], 0).hidden[0]
        self._close("hidden states", hidden, f"{number}.detect_prefill_hidden", where)
        hidden = generator.prefill(prefix, [prompts.wrap("query", QUESTION)], 0).hidden[0]
        self._close("logits", generator.model.text.logits(hidden), f"{number}.query_prefill_logits", where)
        self._objects("boxes", "detect", case, prefix, _corners)
        self._objects("points", "point", case, prefix, lambda one: {"x": one.x, "y": one.y})
        for key, ids, text in _texts(prompts, case):
            answer = list(islice(generator.tokens(generator.prefill(prefix, [ids], MAX_TOKENS)), MAX_TOKENS))
            self._exact("texts", prompts.text(answer), text, f"{where} {key}")

    def _objects(
        self,
        quantity: str,
        skill: str,
        case: dict[str, Any],
        prefix: DenseCache,
        plain: Callable[[DecodedObject], dict[str, float]],
    ) -> None:
        """Compare detected boxes or points with the stored ones, for each label and each score threshold."""
        sized = skill == "detect"
        rows = [(name, bias) for name, by_bias in case[skill].items() for bias in by_bias]
        ids = [self.prompts.objects(skill, name) for name, _ in rows]
        conf = [1 / (1 + math.exp(-float(bias))) for _, bias in rows]
        state = self.generator.prefill(prefix, ids, MAX_OBJECTS * (3 if sized else 2))
        for (name, bias), found in zip(
            rows, self.generator.objects(state, sized, [MAX_OBJECTS] * len(rows), conf), strict=True
        ):
            where = f"{case['image']} {skill} '{name}' at {bias}"
            wanted, got = case[skill][name][bias], [plain(one) for one in found]
            if len(wanted) != len(got):
                self.quantities[quantity].add(math.inf, where)
                continue
            for mine, theirs in zip(got, wanted, strict=True):
                for key, number in mine.items():
                    self.quantities[quantity].add(abs(number - theirs[key]), where)

    def _exact(self, quantity: str, mine: object, theirs: object, where: str) -> None:
        self.quantities[quantity].add(0.0 if mine == theirs else math.inf, where)

    def _close(self, quantity: str, mine: torch.Tensor, key: str, where: str) -> None:
        theirs = self.arrays[key]
        if mine.shape != theirs.shape:
            self.quantities[quantity].add(math.inf, where)
            return
        difference = (mine.double().cpu() - theirs.double()).abs().max().item()
        self.quantities[quantity].add(difference, where)


def _texts(prompts: Prompts, case: dict[str, Any]) -> Iterator[tuple[str, list[int], str]]:
    """Yield the text answers of a case in cases.json: name, token IDs of the prompt, and expected text."""
    yield "query", prompts.query(QUESTION), case["query"]
    yield "caption_short", prompts.caption("short"), case["caption_short"]
    for question, answer in case.get("queries", {}).items():
        yield f"query '{question}'", prompts.query(question), answer["text"]
    for length, answer in case.get("captions", {}).items():
        yield f"caption '{length}'", prompts.caption(length), answer["text"]


def _corners(one: DecodedObject) -> dict[str, float]:
    return {
        "x_min": one.x - one.width / 2,
        "y_min": one.y - one.height / 2,
        "x_max": one.x + one.width / 2,
        "y_max": one.y + one.height / 2,
    }


def require_folder(path: Path) -> Path:
    """Return `path` if it is a golden folder: model files and stored results of a reference implementation.

    Raises:
        EngineError: if `path` is not a folder, or a file is missing.
    """
    if not path.is_dir():
        raise EngineError(f"{path} is not a folder; give a folder with config.json, model.safetensors and cases.json")
    for name in ("config.json", "cases.json"):
        if not (path / name).is_file():
            raise EngineError(f"{path} has no {name}; give a folder with config.json, model.safetensors and cases.json")
    return path

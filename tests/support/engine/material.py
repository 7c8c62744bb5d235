"""What the tests of the engine share: tiny random models, synthetic images, data packs made of them. Needs no av."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import shutil
import tarfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from saccade.engine import Detect, Engine, Result
from saccade.engine.models.moondream.config import (
    ExpertsConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.refiner import MaskRefiner
from tests.support import REPO

GOLDEN = REPO / "tests" / "data" / "golden-tiny"
GOLDEN_3 = REPO / "tests" / "data" / "golden3-tiny"
NANO = REPO / "engine" / "models" / "nano"
_WAIT_S = 60

TINY = MoondreamConfig(
    text=TextConfig(
        dim=32, ff_dim=48, n_layers=2, vocab_size=400, max_context=96, n_heads=4, n_kv_heads=2, prefix_attn=17
    ),
    vision=VisionConfig(
        enc_dim=16,
        enc_patch_size=4,
        enc_n_layers=1,
        enc_ff_dim=24,
        enc_n_heads=2,
        proj_out_dim=32,
        crop_size=16,
        max_crops=6,
        overlap_margin=1,
        proj_inner_dim=24,
    ),
    region=RegionConfig(dim=32, coord_feat_dim=8, size_feat_dim=8, inner_dim=24),
    tokenizer=TokenizerConfig(
        templates={
            "caption": {"short": [1, 30, 2, 49, 3], "normal": [1, 30, 2, 38, 3], "long": [1, 30, 2, 59, 3]},
            "query": {"prefix": [1, 38, 2], "suffix": [3]},
            "detect": {"prefix": [1, 23, 47, 2], "suffix": [3]},
            "point": {"prefix": [1, 81, 2], "suffix": [3]},
        }
    ),
)
"""Every part of the family, small enough for hundreds of examples: 4×4 image tokens, grouped keys, tiles."""

TINY_3 = replace(
    TINY,
    text=replace(
        TINY.text,
        n_layers=3,
        n_kv_heads=4,
        moe=ExpertsConfig(num_experts=6, start_layer=1, experts_per_token=2, expert_inner_dim=20),
        rope_theta=1.5e6,
        tau=1,
    ),
    region=replace(TINY.region, inner_dim=0, reads="post_ln_ln"),
    tokenizer=replace(TINY.tokenizer, query_suffixes=1),
)
"""The same as Moondream 3 has it: experts behind a dense layer, attention with a temperature, linear region heads."""


OUTLINING = replace(
    TINY_3,
    text=replace(TINY_3.text, vocab_size=1100, max_context=200),
    region=replace(TINY_3.region, reads="ln"),
    tokenizer=replace(
        TINY_3.tokenizer,
        templates={**TINY_3.tokenizer.templates, "segment": {"prefix": [1, 17, 2], "suffix": [3]}},
    ),
)
"""One that outlines; `write_outlining_model` gives it words."""


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
"""For fixtures and tests that hold on both."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a few hundred numbers: several threads only wait for each other, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(config: MoondreamConfig, seed: int = 0) -> Moondream:
    """A model in evaluation mode whose weights are random and large enough that every part matters."""
    generator = torch.Generator().manual_seed(seed)
    model = Moondream(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        spread = 0.5 if parameter.ndim < 2 else 1.5 / parameter[0].numel() ** 0.5
        if name.endswith("_features"):
            spread = 3.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        if ".ln" in name and name.endswith("weight"):
            parameter.add_(1.0)
    return model


def write_model(folder: Path, config: MoondreamConfig, model: Moondream | None = None) -> Path:
    """Leave config.json and model.safetensors in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
    state = (model or random_model(config)).state_dict()
    save_file({f"model.{name}": tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def write_outlining_model(folder: Path) -> Path:
    """A model whose words are the commands of a path, a minus sign and the numbers up to 960."""
    write_model(folder, OUTLINING, random_model(OUTLINING))
    words = {21: "M", 22: "L", 23: "C", 24: "Z", 25: "-", **{30 + number: str(number) for number in range(961)}}
    vocabulary = {words.get(number, f"other{number}"): number for number in range(1100)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="other11"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_enclosing_model(folder: Path) -> Path:
    """One of the same whose boxes are large and whose paths enclose something."""
    state = load_file(write_outlining_model(folder) / "model.safetensors")
    state["model.text.wte"] *= 6.0  # what was written before matters
    state["model.text.lm_head.bias"][[0, 24]] -= 9.0  # the end, and Z
    state["model.text.lm_head.bias"][22] += 2.0  # L
    for sizes in state["model.region.size_decoder.bias"].view(2, -1):
        sizes[900:950] += 50.0
    save_file(state, folder / "model.safetensors")
    return folder


def random_refiner(enc: int = 16, dim: int = 64, grid: int = 4, fused: int = 64) -> MaskRefiner:
    """A refiner, by default for `OUTLINING`, whose weights are random and large enough that every part matters."""
    dice = torch.Generator().manual_seed(0)
    model = MaskRefiner(enc, dim, grid, fused).eval().requires_grad_(False)
    for name, one in model.named_parameters():
        spread = 0.5 if one.ndim < 2 else 1.5 / one[0].numel() ** 0.5
        one.copy_(torch.randn(one.shape, generator=dice) * spread)
        if one.ndim == 1 and name.endswith("weight"):
            one.add_(1.0)  # of a norm
    return model


def write_refiner(path: Path) -> Path:
    """The file of a random refiner for `OUTLINING`."""
    torch.save({"head": random_refiner().state_dict()}, path)
    return path


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """An image of smooth random colours."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


SCREEN = (0.2, 0.2, 0.8, 0.8)  # a `square` that nano takes for a tv


def square(
    height: int, width: int, box: tuple[float, float, float, float], colour: tuple[int, int, int] = (250, 250, 250)
) -> NDArray[np.uint8]:
    """A dark image with one bright box, x1 y1 x2 y2 as fractions."""
    image = np.full((height, width, 3), 20, np.uint8)
    x1, y1, x2, y2 = box
    image[round(y1 * height) : round(y2 * height), round(x1 * width) : round(x2 * width)] = colour
    return image


class Held:
    """Keeps an engine's loop waiting until `release`: what is submitted meanwhile waits.

    Attributes:
        first: of a request that was done before.
    """

    def __init__(self, engine: Engine, image: NDArray[np.uint8]) -> None:
        self._gate, held = threading.Event(), threading.Event()
        self.first = engine.submit(image, [Detect("x", 3, 0.0)])
        self.first.result(_WAIT_S)

        def hold() -> None:
            held.set()
            self._gate.wait(_WAIT_S)

        engine._loop._post(hold)
        assert held.wait(_WAIT_S)

    def release(self) -> None:
        self._gate.set()


def label(image: int, split: str = "val", **groups: Any) -> dict[str, Any]:
    """One line of a pack's labels; `groups` are `boxes`, `maybe` and `unknown` as the pack has them."""
    return {"id": f"{image:06d}", "split": split, "tar": image % 2, "source": "synthetic", "licence": "none"} | {
        "boxes": groups.get("boxes", {}),
        "unknown": groups.get("unknown", []),
        "maybe": groups.get("maybe", {}),
    }


def write_golden_case(folder: Path) -> Path:
    """The first case of the golden set alone, in a new folder, which is returned."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, folder / name)
    shutil.copytree(GOLDEN / "images", folder / "images")
    cases = json.loads((GOLDEN / "cases.json").read_text())
    (folder / "cases.json").write_text(json.dumps(cases[:1]))
    arrays = load_file(GOLDEN / "arrays.safetensors")
    save_file({name: t for name, t in arrays.items() if name.startswith("0.")}, folder / "arrays.safetensors")
    return folder


def write_pack(
    folder: Path, classes: Iterable[str], images: Iterable[tuple[NDArray[np.uint8], dict[str, Any]]]
) -> Path:
    """A data pack: two tars of lossless webp, labels.jsonl.gz and classes.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
    records = []
    with tarfile.open(folder / "images-00.tar", "w") as even, tarfile.open(folder / "images-01.tar", "w") as odd:
        for image, record in images:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "webp", lossless=True)
            member = tarfile.TarInfo(f"{record['id']}.webp")
            member.size = buffer.tell()
            buffer.seek(0)
            (odd if record["tar"] else even).addfile(member, buffer)
            records.append(record | {"height": image.shape[0], "width": image.shape[1]})
    with gzip.open(folder / "labels.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return folder


def same(a: Result, b: Result) -> bool:
    """The same places, labels and texts; scores to the rounding that depends on what shares a batch."""

    def places(result: Result) -> object:
        boxes = [replace(box, score=0.0) for box in result.detections.boxes]
        return boxes, [replace(spot, score=0.0) for spot in result.points.points], result.texts

    def scores(result: Result) -> list[float]:
        return [one.score for one in (*result.detections.boxes, *result.points.points)]

    return places(a) == places(b) and scores(a) == pytest.approx(scores(b), abs=1e-5)

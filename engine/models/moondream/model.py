"""A whole model of the family: vision encoder, text decoder, region heads under their published names, its files.

Knows nothing of prompts, sampling or scheduling.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional as F

from saccade.engine.errors import ModelFilesError
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.detector_tower import DetectorTower
from saccade.engine.models.moondream.region import RegionHeads
from saccade.engine.models.moondream.text import TextDecoder, rotation_table
from saccade.engine.models.moondream.vision import VisionTower
from saccade.engine.models.protocol import ModelLimits

_PREFIX = "model."


class CheckpointError(ModelFilesError):
    """A weights file that cannot be read or does not fit its config."""


class Moondream(nn.Module):
    """Vision encoder, text decoder and region heads; parameter names are the published ones less `model.`.

    Attributes:
        fp8: its blocks' weights are exact in FP8, so that kernels may store them so.
    """

    def __init__(self, config: MoondreamConfig) -> None:
        super().__init__()
        self.config = config
        self.fp8 = False
        self.vision: VisionTower | DetectorTower
        self.vision = DetectorTower(config.vision) if config.vision.stem == "picodet" else VisionTower(config.vision)
        self.text = TextDecoder(config.text)
        self.region = RegionHeads(config.region, self.text.post_ln)

    @property
    def limits(self) -> ModelLimits:
        """What the engine plans with."""
        return self.config.limits

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.text.wte.device

    def coord_eos_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (2, dim) and bias (2,) of the coord and eos rows: all of the head that detect and point need."""
        ids, head = self.config.tokenizer, self.text.lm_head
        # By numbers, not by a list of them, which would be copied to the device: a graph cannot capture that.
        weight, bias = ((part[ids.coord_id], part[ids.eos_id]) for part in (head.weight, head.bias))
        return torch.stack(weight), torch.stack(bias)

    def coord_eos_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., 2) float32 of the coordinate token and of the end token."""
        return F.linear(self.text.post_ln(hidden), *self.coord_eos_head()).float()

    def n_parameters(self) -> int:
        """How many numbers its weights are."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        return self.text.wte.dtype


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> Moondream:
    """Load config.json and model.safetensors, or the shards of a model.safetensors.index.json, from a folder.

    Raises:
        ModelConfigError: if config.json does not describe a model of this family.
        CheckpointError: naming the first tensor, in the model's order, that is missing, unknown or of another shape.
    """
    config = MoondreamConfig.from_file(folder / "config.json")
    path, names = _files(folder)
    try:
        with ExitStack() as files:
            opened = [files.enter_context(safe_open(name, framework="pt")) for name in names]
            held = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
            if not config.region.reads:
                reads = "post_ln_ln" if f"{_PREFIX}region.ln.weight" in held else "raw"
                config = replace(config, region=replace(config.region, reads=reads))
            elif config.region.reads == "raw":  # what the user chose not to read is no error
                held = {name: file for name, file in held.items() if not name.startswith(f"{_PREFIX}region.ln.")}
            with torch.device("meta"):
                model = Moondream(config)
            wanted = model.state_dict()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in held.items()}
            _compare({_PREFIX + name: tuple(tensor.shape) for name, tensor in wanted.items()}, shapes, path)
            state = {name: held[_PREFIX + name].get_tensor(_PREFIX + name).to(device, dtype) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    model.load_state_dict(state, assign=True)
    if isinstance(model.vision, DetectorTower):  # as the crops are in memory: a third faster on a CPU
        model.vision.stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.text.cosine, model.text.sine = (table.to(device) for table in rotation_table(config.text))  # not stored
    return model.eval().requires_grad_(False)


def _files(folder: Path) -> tuple[Path, list[Path]]:
    """What names the weights of a folder, and the files they are in."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if path.is_file() or not index.is_file():
        return path, [path]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(Path(name).name == name for name in names):
            raise ValueError("a shard is not beside it")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error})") from error
    return index, [folder / name for name in names]


def _compare(wanted: dict[str, tuple[int, ...]], held: dict[str, tuple[int, ...]], path: Path) -> None:
    for name, shape in wanted.items():
        if name not in held:
            raise CheckpointError(f"{path}: tensor '{name}' {list(shape)} is missing")
        if held[name] != shape:
            raise CheckpointError(f"{path}: tensor '{name}' is {list(held[name])}, the config says {list(shape)}")
    for name in held:
        if name not in wanted:
            raise CheckpointError(f"{path}: tensor '{name}' {list(held[name])} has no place in the config's model")

"""The Moondream model (vision encoder, text decoder and region heads), and functions that load its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F

from saccade.engine.kernels import supports_fp8
from saccade.engine.models.checkpoint import CheckpointError, StoredTensor, compare, decoded, stored_tensors
from saccade.engine.models.moondream import names_3_1
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.region import RegionHeads
from saccade.engine.models.moondream.text import TextDecoder, rotation_table
from saccade.engine.models.moondream.vision import VisionTower
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.protocol import ModelLimits

_ALIGNMENT = 64  # in bytes, as in torch's allocator


class Moondream(nn.Module):
    """The Moondream model. Parameter names are the published names without the prefix `model.`.

    Attributes:
        fp8: whether all block weights have FP8 values. They can then be stored in FP8 without loss.
        family: name of the published model and its file format, for display.
    """

    def __init__(self, config: MoondreamConfig) -> None:
        super().__init__()
        self.config = config
        self.fp8 = False
        self.family = ""
        self.vision: VisionTower | DetectorTower
        self.vision = DetectorTower(config.vision) if config.vision.stem == "picodet" else VisionTower(config.vision)
        self.text = TextDecoder(config.text)
        self.region = RegionHeads(config.region, self.text.post_ln)

    @property
    def limits(self) -> ModelLimits:
        """Model sizes and token IDs that the scheduler needs."""
        return self.config.limits

    @property
    def device(self) -> torch.device:
        """Device on which the weights are stored."""
        return self.text.wte.device

    def coord_eos_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight (2, dim) and bias (2,) of the output head for the coordinate token and the end token."""
        ids, head = self.config.tokenizer, self.text.lm_head
        # Do not index by a list: it would be copied to the device, which CUDA graphs cannot capture.
        weight, bias = ((part[ids.coord_id], part[ids.eos_id]) for part in (head.weight, head.bias))
        return torch.stack(weight), torch.stack(bias)

    def coord_eos_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., 2) float32 of the coordinate token and the end token for hidden states (..., dim)."""
        return F.linear(self.text.post_ln(hidden), *self.coord_eos_head()).float()

    def n_parameters(self) -> int:
        """Return the number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of the weights."""
        return self.text.wte.dtype


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> Moondream:
    """Load a Moondream model from a folder with config.json and weights (model.safetensors or shards).

    Raises:
        ModelConfigError: if config.json is not a valid Moondream configuration.
        CheckpointError: for the first tensor that is missing, unknown or has another shape.
    """
    with ExitStack() as files:
        model, stored, path = open_checkpoint(folder, files)
        try:
            kept = _keeps_fp8(device, dtype)
            state = {name: _aligned(_read(stored[name], device, dtype, kept)) for name in model.state_dict()}
            for name, module in model.named_modules():
                if isinstance(module, Experts):
                    scales = [stored[f"{name}.{part}.weight"].scale for part in ("fc1", "fc2")]
                    if scales[0] is not None and scales[1] is not None:
                        module.scales = scales[0].read().to(device), scales[1].read().to(device)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    model.load_state_dict(state, assign=True)
    if isinstance(model.vision, DetectorTower):  # the memory format of the crops, which is a third faster on a CPU
        model.vision.stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.text.cosine, model.text.sine = (table.to(device) for table in rotation_table(model.config.text))  # not stored
    return model.eval().requires_grad_(False)


def _keeps_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether FP8 experts remain in FP8 after loading: on a CUDA GPU with FP8 support and a 16-bit `dtype`."""
    return device.type == "cuda" and dtype.itemsize == 2 and supports_fp8(device)


def _read(stored: StoredTensor, device: torch.device, dtype: torch.dtype, kept: bool) -> torch.Tensor:
    """Read a tensor to a device, and convert it to `dtype`. If `kept` is True, FP8 expert weights stay FP8."""
    return stored.codes().to(device) if kept and stored.codes is not None else stored.read().to(device, dtype)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if its address is not a multiple of 64. GEMM results can depend on the alignment."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def open_checkpoint(folder: Path, files: ExitStack) -> tuple[Moondream, dict[str, StoredTensor], Path]:
    """Open a checkpoint, and check that its tensors match config.json.

    Args:
        folder: the model folder.
        files: exit stack that closes the weight files.

    Returns:
        Model on the meta device (without weights), stored tensors, and path of the weights file.

    Raises:
        ModelConfigError: if config.json is not a valid Moondream configuration.
        CheckpointError: for the first tensor that is missing, unknown or has another shape.
    """
    MoondreamConfig.from_file(folder / "config.json")  # report errors in the configuration first
    try:
        path, held = stored_tensors(folder, files)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / 'model.safetensors'}: {error}") from error
    newer = names_3_1.is_3_1(held)
    if newer:
        held = names_3_1.translate(held)
    stored = decoded(held, path)
    config = MoondreamConfig.from_file(folder / "config.json", names_3_1.facts(held) if newer else {})
    if not config.region.reads:
        reads = "ln" if "region.ln.weight" in stored else "raw"
        config = replace(config, region=replace(config.region, reads=reads))
    elif config.region.reads == "raw":  # the user chose not to use these tensors
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith("region.ln.")}
    with torch.device("meta"):
        model = Moondream(config)
    model.family = _family(config, newer, stored)
    compare({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, stored, path)
    return model, stored, path


def _family(config: MoondreamConfig, newer: bool, stored: Mapping[str, StoredTensor]) -> str:
    """Return one line for display: the name of the published model, its dtypes and features such as experts."""
    if config.vision.stem == "picodet":
        return ""
    name = "Moondream 3.1" if newer else "Moondream 3 (preview)" if config.text.moe else "Moondream 2"
    kinds = Counter(tensor.dtype for tensor in stored.values())
    notes = [f"stored as {' and '.join(kind or '4 bit' for kind, _ in kinds.most_common())}"]
    if any(tensor.scale is not None for tensor in stored.values()):
        notes.append("experts in FP8 (kept on Ada and later GPUs)")
    if config.region.reads != ("ln" if "region.ln.weight" in stored else "raw"):
        notes.append(f"region heads use the input {config.region.reads}, unlike the published model")
    notes.append(f"context {config.text.max_context}")
    return f"{name}: {', '.join(notes)}"

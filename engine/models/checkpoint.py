"""Reads the tensors of a checkpoint by name.

A checkpoint is one safetensors file or several shards. Tensor names may have the prefix `model.`. Weights may be
quantized to 4 bits or FP8. The output head and the embedding table may be the same tensor (tied weights). Opening a
checkpoint reads only names and shapes. Tensor data is read on demand.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from saccade.engine.errors import ModelFilesError

_PREFIX = "model."
_BUFFERS = re.compile(
    r"attn_mask|text\.freqs_cis|text\.blocks\.\d+\.kv_cache\.[kv]_cache|text\.blocks\.\d+\.kv_quantizer\.[kv]_scale"
)
"""Buffers in checkpoints that are skipped: masks, RoPE tables, KV caches and per-layer FP8 KV scales.

The engine's FP8 KV cache has one scale per key and value instead.
"""
_EXPERTS = {"up_scale": "fc1.weight", "down_scale": "fc2.weight"}
_E4M3 = "F8_E4M3"
_OLDER = ("text_model.", "vision_encoder.", "vision_tower.", "transformer.")
_GROUP = 128  # 4-bit weights per scale and zero point

log = logging.getLogger(__name__)


class CheckpointError(ModelFilesError):
    """Error: a weights file cannot be read or does not match its config.json."""


@dataclass(slots=True, frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that is read on demand.

    Attributes:
        shape: shape of the tensor that `read` returns.
        read: function that reads and returns the dequantized tensor.
        dtype: stored dtype, as named in safetensors files.
        scale: for FP8 experts (experts, outputs, inputs), their float32 scales (experts, outputs); otherwise None.
        codes: for FP8 experts, a function that reads them without dequantization; otherwise None.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    dtype: str = ""
    scale: StoredTensor | None = None
    codes: Callable[[], torch.Tensor] | None = None


def stored_tensors(folder: Path, files: ExitStack) -> tuple[Path, dict[str, StoredTensor]]:
    """Find the stored tensors of a model folder. Their names have no prefix `model.`.

    Args:
        folder: folder with model.safetensors, or with model.safetensors.index.json and its shards.
        files: exit stack that closes the files. They must stay open while tensors are read.

    Returns:
        The path of the weights file or shard index, and the tensors by name.

    Raises:
        CheckpointError: if the index of shards is invalid.
        OSError: if a file cannot be read.
        SafetensorError: if a file is not a valid safetensors file.
    """
    path, names = _files(folder)
    held: dict[str, StoredTensor] = {}
    for name in names:
        opened: Any = files.enter_context(safe_open(name, framework="pt"))
        for key in opened.keys():  # noqa: SIM118
            plain = key.replace("._orig_mod", "")  # torch.compile adds this
            part = opened.get_slice(key)
            held[plain] = StoredTensor(tuple(part.get_shape()), partial(opened.get_tensor, key), str(part.get_dtype()))
    prefixed = any(name.startswith(_PREFIX) for name in held)
    if prefixed:
        held = {name.removeprefix(_PREFIX): tensor for name, tensor in held.items()}
    return path, held


def decoded(held: Mapping[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """Convert the stored tensors of a checkpoint to the tensors that a model loads.

    4-bit and FP8 tensors are dequantized, tied tensors are duplicated, and tensors that are not weights are dropped.

    Raises:
        CheckpointError: if the weights belong to an unsupported architecture, or if a scale or zero point is missing.
    """
    older = next((name for name in held if name.startswith(_OLDER)), None)
    if older is not None and not any(name.startswith("text.") for name in held):
        raise CheckpointError(
            f"{path}: tensor '{older}' belongs to an architecture from before 2025, which is not supported; "
            "use a newer revision, such as vikhyatk/moondream2@2025-06-21"
        )
    if ignored := [name for name in held if _BUFFERS.fullmatch(name)]:
        log.debug("%s: %d buffers are ignored, such as %s", path, len(ignored), ignored[0])
        held = {name: tensor for name, tensor in held.items() if name not in ignored}
    return _tied(_scaled(_unpacked(dict(held), path), path))


def _files(folder: Path) -> tuple[Path, list[Path]]:
    """Return two values: the path of the weights file or shard index, and the list of all weights files."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if path.is_file() or not index.is_file():
        return path, [path]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if wrong := [name for name in names if Path(name).name != name]:
            raise ValueError(f"'{wrong[0]}' must be a file name without a folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: invalid index of weight files ({error}); download the model again") from error
    return index, [folder / name for name in names]


def _tied(held: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Add the output head or the embedding table if the checkpoint stores only one of the two (tied weights)."""
    head, bias, table = "text.lm_head.weight", "text.lm_head.bias", "text.wte"
    if head not in held and table in held:
        held[head] = held[table]
        held.setdefault(bias, StoredTensor(held[table].shape[:1], partial(torch.zeros, held[table].shape[0])))
    elif table not in held and head in held:
        held[table] = held[head]
    return held


def _unpacked(held: dict[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """Replace each 4-bit weight (tensors `packed`, `scale` and `zero_point`) by the dequantized tensor."""
    found = [name.removesuffix(".packed") for name in held if name.endswith(".weight.packed")]
    for weight in found:
        parts = {kind: held.pop(f"{weight}.{kind}", None) for kind in ("packed", "scale", "zero_point")}
        bias = held.get(weight.removesuffix("weight") + "bias")
        packed, scale, zero = parts["packed"], parts["scale"], parts["zero_point"]
        if packed is None or scale is None or zero is None or bias is None:
            raise CheckpointError(f"{path}: scale, zero_point or bias is missing for the 4-bit tensor '{weight}'")
        rows, count = bias.shape[0], 2 * packed.shape[0] * _GROUP
        fits = packed.shape[1:] == (_GROUP,) and count % rows == 0 and scale.shape == zero.shape
        if not fits or scale.shape != (count // _GROUP, 1):
            raise CheckpointError(
                f"{path}: 4-bit tensor '{weight}' must have one scale and one zero_point per group of {_GROUP} weights"
            )
        shape = (rows, count // rows)
        held[weight] = StoredTensor(shape, partial(_dequantized, packed, scale, zero, shape))
    return held


def _scaled(held: dict[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """Attach the scales `moe_quant.{up, down}_scale` to the FP8 expert weights, which are dequantized when read."""
    for name in [name for name in held if ".moe_quant." in name]:
        block, _, kind = name.partition(".moe_quant.")
        weight = f"{block.removesuffix('.mlp')}.mlp.{_EXPERTS.get(kind, kind)}"
        codes = held.get(weight)
        if kind not in _EXPERTS or codes is None or codes.dtype != _E4M3:
            raise CheckpointError(
                f"{path}: tensor '{name}' is an FP8 scale, but tensor '{weight}' is missing or does not have FP8 values"
            )
        scale = held.pop(name)
        if len(codes.shape) != 3 or math.prod(scale.shape) != math.prod(codes.shape[:2]):
            got = f"scales {list(scale.shape)} for weights {list(codes.shape)}"
            raise CheckpointError(f"{path}: tensor '{name}' must have one scale per expert output; got {got}")
        scale = StoredTensor(codes.shape[:2], partial(_shaped, scale, codes.shape[:2]), scale.dtype)
        held[weight] = StoredTensor(codes.shape, partial(_rescaled, codes, scale), codes.dtype, scale, codes.read)
    for name, tensor in held.items():
        if tensor.dtype == _E4M3 and tensor.scale is None:
            raise CheckpointError(f"{path}: FP8 tensor '{name}' has no scale")
    return held


def _shaped(scale: StoredTensor, shape: tuple[int, ...]) -> torch.Tensor:
    return scale.read().float().view(shape)


def _rescaled(codes: StoredTensor, scale: StoredTensor) -> torch.Tensor:
    """Dequantize FP8 experts (experts, outputs, inputs): multiply by their scales, in float32."""
    return codes.read().float() * scale.read().unsqueeze(-1)


def _dequantized(packed: StoredTensor, scale: StoredTensor, zero: StoredTensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the dequantized matrix (code − zero point) · scale, in float32.

    Each byte stores two 4-bit codes. The upper four bits of all bytes are the first half of the matrix, the lower four
    bits the second half.
    """
    codes = packed.read()
    both = torch.cat([codes >> 4, codes & 15]).float()
    return ((both - zero.read().float()) * scale.read().float()).view(shape)


def compare(wanted: Mapping[str, tuple[int, ...]], held: Mapping[str, StoredTensor], path: Path) -> None:
    """Check that the names and shapes of a checkpoint's tensors are those of a model.

    Args:
        wanted: name and shape of each tensor of the model, in order.
        held: tensors of the checkpoint.
        path: weights file or shard index, for error messages.

    Raises:
        CheckpointError: for the first tensor that is missing, unknown or has another shape.
    """
    for name, shape in wanted.items():
        if name not in held:
            raise CheckpointError(f"{path}: tensor '{_PREFIX}{name}' of shape {list(shape)} is missing")
        if held[name].shape != shape:
            got = list(held[name].shape)
            raise CheckpointError(
                f"{path}: tensor '{_PREFIX}{name}' has shape {got}; the config requires {list(shape)}"
            )
    unknown = [name for name in held if name not in wanted]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        first = f"'{_PREFIX}{unknown[0]}' of shape {list(held[unknown[0]].shape)}"
        raise CheckpointError(f"{path}: tensor {first} is not part of the model that config.json describes{more}")

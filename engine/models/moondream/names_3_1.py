"""Translates the tensor names of Moondream 3.1 checkpoints to the names of Moondream 3.

The config.json of Moondream 3.1 has no `model_type`, so a checkpoint is identified by its tensor names. Moondream 3.1
uses the tensor names of checkpoints from 2024, plus names for experts and attention temperature. It stores two tables
of Fourier features transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from saccade.engine.models.checkpoint import StoredTensor
from saccade.engine.models.moondream.config import ExpertsConfig

MAX_CONTEXT = 32768
_BLOCK = r"text_model\.transformer\.h\.(\d+)\."
_SIGNS = re.compile(_BLOCK + r"(?:tau_|gate\.|mlp\.(?:output_)?experts)")
"""Tensor names that no 2024 checkpoint has."""
_TRANSPOSED = ("region.coord_features", "region.size_features")
_RULES = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"text_model\.transformer\.embd\.wte\.weight", "text.wte"),
        (_BLOCK + r"mixer\.Wqkv\.(.+)", r"text.blocks.\1.attn.qkv.\2"),
        (_BLOCK + r"mixer\.out_proj\.(.+)", r"text.blocks.\1.attn.proj.\2"),
        (_BLOCK + r"(?:mlp\.)?gate\.(.+)", r"text.blocks.\1.mlp.router.\2"),
        (_BLOCK + r"mlp\.experts\.(.+)", r"text.blocks.\1.mlp.fc1.\2"),
        (_BLOCK + r"mlp\.output_experts\.(.+)", r"text.blocks.\1.mlp.fc2.\2"),
        (_BLOCK + r"tau_(wq|wv|wqwv|alpha)(?:\.weight)?", r"text.blocks.\1.attn.tau.\2"),
        (_BLOCK + r"(ln|mlp|moe_quant|kv_quantizer)\.(.+)", r"text.blocks.\1.\2.\3"),
        (r"text_model\.lm_head\.ln\.(.+)", r"text.post_ln.\1"),
        (r"text_model\.lm_head\.linear\.(.+)", r"text.lm_head.\1"),
        (r"vision_encoder\.encoder\.model\.visual\.patch_embed\.linear\.(.+)", r"vision.patch_emb.\1"),
        (r"vision_encoder\.encoder\.model\.visual\.pos_embed", "vision.pos_emb"),
        (r"vision_encoder\.encoder\.model\.visual\.blocks\.(\d+)\.norm([12])\.(.+)", r"vision.blocks.\1.ln\2.\3"),
        (r"vision_encoder\.encoder\.model\.visual\.blocks\.(\d+)\.(attn|mlp)\.(.+)", r"vision.blocks.\1.\2.\3"),
        (r"vision_encoder\.encoder\.model\.visual\.norm\.(.+)", r"vision.post_ln.\1"),
        (r"vision_encoder\.projection\.mlp\.(.+)", r"vision.proj_mlp.\1"),
        (r"region_model\.coordinate_encoder\.(.+)", r"region.coord_encoder.\1"),
        (r"region_model\.coordinate_head\.(.+)", r"region.coord_decoder.\1"),
        (r"region_model\.coordinate_features\.weight", "region.coord_features"),
        (r"region_model\.size_head\.(.+)", r"region.size_decoder.\1"),
        (r"region_model\.size_features\.weight", "region.size_features"),
        (r"region_model\.(size_encoder|ln)\.(.+)", r"region.\1.\2"),
    )
)


def is_3_1(names: Mapping[str, Any]) -> bool:
    """Return whether the tensor names of a checkpoint are those of Moondream 3.1."""
    return any(_SIGNS.match(name) for name in names)


def translate(held: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Convert tensors of Moondream 3.1 to the names and layout of Moondream 3. Unknown tensors remain unchanged."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in held.items():
        ours = next((rule.sub(to, name) for rule, to in _RULES if rule.fullmatch(name)), name)
        if ours in _TRANSPOSED and len(tensor.shape) == 2:
            tensor = replace(tensor, shape=tensor.shape[::-1], read=partial(_transposed, tensor))
        if ours.endswith(".tau.wqwv") and len(tensor.shape) == 2 and tensor.shape[0] % 2 == 0:
            half = replace(tensor, shape=(tensor.shape[0] // 2, tensor.shape[1]))
            for part, key in enumerate(("wq", "wv")):
                found[ours.removesuffix("wqwv") + key] = replace(half, read=partial(_half, tensor, part))
            continue
        found[ours] = tensor
    return found


def facts(held: Mapping[str, StoredTensor]) -> dict[str, dict[str, Any]]:
    """Return configuration values derived from Moondream 3.1 weights, keyed by section and field."""
    experts = {
        int(name.split(".")[2]): tensor.shape
        for name, tensor in held.items()
        if re.fullmatch(r"text\.blocks\.\d+\.mlp\.fc1\.weight", name) and len(tensor.shape) == 3
    }
    text: dict[str, Any] = {"max_context": MAX_CONTEXT}
    if experts:
        start = min(experts)
        number, outputs, _ = experts[start]
        chosen = min(ExpertsConfig().experts_per_token, number)  # the weights do not contain this number
        text["moe"] = {
            "num_experts": number,
            "start_layer": start,
            "experts_per_token": chosen,
            "expert_inner_dim": outputs // 2,
        }
    return {"text": text, "tokenizer": {"suppresses": 0}}


def _transposed(tensor: StoredTensor) -> torch.Tensor:
    return tensor.read().t().contiguous()


def _half(tensor: StoredTensor, part: int) -> torch.Tensor:
    return tensor.read().chunk(2)[part].contiguous()

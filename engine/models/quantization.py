"""Weights in FP8 (e4m3) with a float32 scale for each output; keys and values with a float16 scale for each vector.

The linear layers of the text decoder's and the vision encoder's blocks, experts too, are rounded so, and kernels read 8
bits for each weight instead of 16. Rounding a model leaves the numbers in bfloat16, with which its own modules compute
the same; packing it replaces these where a GPU multiplies FP8 by FP8 (`supports_fp8_gemm`, `cuda.layers`), and
elsewhere, as on Ada, whose prefills multiply in bfloat16, keeps both, but of experts, whose kernels widen FP8 as they
read it. The rest (embeddings, norms, biases, routers, temperatures, region heads, output head) is small or delicate and
stays.

A scale makes the largest of a key's numbers exact, as many models have one dimension far larger than the others: with
one of 100 beside normal ones, attention over 760 such keys is off by 4 %, without a scale by 28; by 4 either way where
there is none.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from saccade.engine.errors import EngineError, Fallbacks, reason_of
from saccade.engine.kernels.fp8_format import E4M3, LARGEST, LEAST_KV_SCALE
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block
from saccade.engine.models.protocol import Model

_LIMIT = 0.02  # ‖difference‖ / ‖wanted‖ of a right product: bfloat16 rounds by 0.002, sums on a GPU by less than 0.01


def quantize(weight: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (outputs, inputs) as e4m3 of the same shape, and the float32 scales (outputs,) they are multiplied by.

    Scales that are given are taken: those of a file in FP8, whose numbers come back exactly.
    """
    assert weight.dtype != E4M3, "its model is packed already, and of that there are no scales"
    wide = weight.float()
    if scale is None:
        scale = wide.abs().amax(dim=1).clamp(min=1e-12) / LARGEST
    return (wide / scale.unsqueeze(1)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `quantize`."""
    return (packed.float() * scale.unsqueeze(1)).to(dtype)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values (…, head_dim) as e4m3, and the float16 scales (…) they are multiplied by."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp(min=LEAST_KV_SCALE).half()
    return (wide / scale.float().unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantize_kv(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `quantize_kv`."""
    return (packed.float() * scale.float().unsqueeze(-1)).to(dtype)


def supports_fp8_gemm(device: torch.device, fallbacks: Fallbacks, rows: int, *widths: int) -> bool:
    """Whether `fp8_linear` takes so many rows and weights of these widths, on a GPU from Hopper on where it runs."""
    possible = torch.cuda.get_device_capability(device) >= (9, 0)
    if not possible or rows < 16 or any(width % 16 for width in widths):
        return False
    wrong = _refused_fp8(device)
    if wrong is not None:
        fallbacks.note(f"images take longer in FP8, as its products do not run on {device}: {wrong}")
    return wrong is None


@cache
def _refused_fp8(device: torch.device) -> str | None:
    """Why `fp8_linear` is not used, if it is not: torch says nowhere for which GPUs it can have scales of rows."""
    dice = torch.Generator().manual_seed(0)
    rows, weight = (quantize(torch.randn(n, 256, generator=dice).to(device)) for n in (164, 2560))
    wanted = dequantize(*rows, torch.float32) @ dequantize(*weight, torch.float32).t()
    try:
        got = fp8_linear(*rows, *weight, torch.zeros(2560, dtype=torch.bfloat16, device=device)).float()
    except torch.OutOfMemoryError:  # says nothing of the GPU
        raise
    except (RuntimeError, ValueError) as error:
        return reason_of(error)
    far = float((got - wanted).norm() / wanted.norm())
    return None if far < _LIMIT else f"it is wrong by {far:.2g}"


def fp8_linear(
    x: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer with FP8 on both sides, in bfloat16, by cuBLASLt.

    Scales of rows leave it one tile, 128 x 128. With those of whole tensors it takes 26.9 µs instead of 28.8 out of a
    text block for one image and 5.2 instead of 7.2 out of the tower's attention, in sum about 0.3 ms of an image.

    Args:
        x: (rows, inputs) e4m3, as `supports_fp8_gemm` allows.
        scales: (rows,) float32.
        weight: (outputs, inputs) e4m3.
        scale: (outputs,) float32.
        bias: (outputs,) bfloat16.
        out: (rows, outputs) bfloat16, where the result goes.
    """
    # torch has no public name for it yet.
    return torch._scaled_mm(
        x,
        weight.t(),
        scales.unsqueeze(1),
        scale.unsqueeze(0),
        bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out,
    )


@torch.no_grad()
def round_to_fp8(model: Model) -> None:
    """Round a model's weights to numbers that FP8 holds: every path computes with the same, however it stores them.

    Raises:
        EngineError: if the model's architecture has no FP8 form.
    """
    if not isinstance(model, Moondream):
        raise EngineError(f"{type(model).__name__} has no FP8 form: give float32, bfloat16 or float16")
    for block in model.text.blocks:
        assert isinstance(block, Block)
        attn, mlp = block.attn, block.mlp
        _round(attn.qkv)
        if isinstance(mlp, Experts):
            _round(attn.proj)
            for expert in (*mlp.fc1.weight, *mlp.fc2.weight) if mlp.scales is None else ():
                expert.copy_(dequantize(*quantize(expert), expert.dtype))
        else:
            _round(mlp.fc1)
            _round(attn.proj, mlp.fc2)  # they add to the same outputs
    for module in model.vision.blocks.modules():
        if isinstance(module, nn.Linear):
            _round(module)
    model.fp8 = True


def _round(*layers: nn.Linear) -> None:
    """Round layers side by side, with common scales."""
    packed, scale = quantize(torch.cat([layer.weight for layer in layers], dim=1))
    parts = dequantize(packed, scale, layers[0].weight.dtype).split([layer.in_features for layer in layers], dim=1)
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.copy_(part)

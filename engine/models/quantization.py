"""FP8 (e4m3) quantization of weights, and of keys and values in the KV cache.

Weights have a float32 scale per output. Keys and values have a float16 scale per vector. The linear layers and experts
in the blocks of the text decoder and the vision encoder are quantized. Embeddings, norms, biases, routers, attention
temperatures, region heads and the output head are not quantized.

`round_to_fp8` stores the quantized values in bfloat16. On GPUs with FP8 GEMMs (`supports_fp8_gemm`), `cuda.layers` then
stores e4m3 instead. Other GPUs, such as Ada, store bfloat16 weights for the prefill and e4m3 weights for decoding.
Experts are stored only in e4m3.

Each key vector has its own scale, because in many models one channel of the keys has far larger values than the other
channels. In a test with a channel that is 100 times as large, the relative error of the attention output is 4 % with a
scale per vector, and 28 % without scales.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from saccade.engine.errors import EngineError, Fallbacks, reason_of
from saccade.engine.kernels import E4M3, LARGEST, LEAST_KV_SCALE
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block
from saccade.engine.models.protocol import Model

# Maximum relative error of a correct GEMM; rounding to bfloat16 causes 0.002, another order of sums at most 0.01.
_LIMIT = 0.02


def quantize(weight: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights (outputs, inputs) to e4m3. Return the weights and their float32 scales (outputs,).

    Pass the scales of an FP8 checkpoint as `scale` to reproduce its values exactly.
    """
    assert weight.dtype != E4M3, "the weights are already FP8, without their scales"
    wide = weight.float()
    if scale is None:
        scale = wide.abs().amax(dim=1).clamp(min=1e-12) / LARGEST
    return (wide / scale.unsqueeze(1)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantize(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantized weights (outputs, inputs) in `dtype`; the inverse of `quantize`."""
    return (packed.float() * scale.unsqueeze(1)).to(dtype)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys or values (…, head_dim) to e4m3. Return the quantized values and their float16 scales (…)."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp(min=LEAST_KV_SCALE).half()
    return (wide / scale.float().unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantize_kv(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dequantized keys or values (…, head_dim) in `dtype`; the inverse of `quantize_kv`."""
    return (packed.float() * scale.float().unsqueeze(-1)).to(dtype)


def supports_fp8_gemm(device: torch.device, fallbacks: Fallbacks, rows: int, *widths: int) -> bool:
    """Return whether the GPU (Hopper or later) supports `fp8_linear` for this number of rows and these layer widths."""
    possible = torch.cuda.get_device_capability(device) >= (9, 0)
    if not possible or rows < 16 or any(width % 16 for width in widths):
        return False
    wrong = _refused_fp8(device)
    if wrong is not None:
        fallbacks.note(f"images are slower in FP8 because FP8 GEMMs do not run on {device}: {wrong}")
    return wrong is None


@cache
def _refused_fp8(device: torch.device) -> str | None:
    """Run `fp8_linear` once on the GPU. Return the reason if it fails, or None if it works.

    PyTorch does not document which GPUs support FP8 GEMMs with a scale per row.
    """
    dice = torch.Generator().manual_seed(0)
    rows, weight = (quantize(torch.randn(n, 256, generator=dice).to(device)) for n in (164, 2560))
    wanted = dequantize(*rows, torch.float32) @ dequantize(*weight, torch.float32).t()
    try:
        got = fp8_linear(*rows, *weight, torch.zeros(2560, dtype=torch.bfloat16, device=device)).float()
    except torch.OutOfMemoryError:  # says nothing about FP8 support
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
    """Compute a linear layer with FP8 activations and weights. The result is bfloat16 (rows, outputs).

    Args:
        x: (rows, inputs) e4m3; `supports_fp8_gemm` must accept the shape.
        scales: (rows,) float32 scales of x.
        weight: (outputs, inputs) e4m3.
        scale: (outputs,) float32 scales of the weights.
        bias: (outputs,) bfloat16.
        out: (rows, outputs) bfloat16 output buffer, or None.
    """
    # torch has no public name for it yet. One scale per tensor would save 0.3 ms per image, but lose accuracy.
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
    """Round the weights of a model to FP8 values, in place, so that all backends use the same weights.

    Raises:
        EngineError: if the model's architecture does not support FP8.
    """
    if not isinstance(model, Moondream):
        raise EngineError(f"{type(model).__name__} does not support FP8; use float32, bfloat16 or float16")
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
            _round(attn.proj, mlp.fc2)  # their outputs are added
    for module in model.vision.blocks.modules():
        if isinstance(module, nn.Linear):
            _round(module)
    model.fp8 = True


def _round(*layers: nn.Linear) -> None:
    """Round the weights of linear layers to FP8 values, in place. The layers share the scale of each output."""
    packed, scale = quantize(torch.cat([layer.weight for layer in layers], dim=1))
    parts = dequantize(packed, scale, layers[0].weight.dtype).split([layer.in_features for layer in layers], dim=1)
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.copy_(part)

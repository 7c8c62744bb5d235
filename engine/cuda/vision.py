"""Blocks of the vision transformer on CUDA. Residual addition and norm are fused; GEMMs are in half precision or FP8.

The results match `VisionTower.features`. Triton is required.
"""

from __future__ import annotations

import torch
from torch import nn

from saccade.engine.cuda.image_attention import ImageAttention
from saccade.engine.cuda.linear import Fp8, PackedLinear, add_layernorm_rows
from saccade.engine.errors import Fallbacks
from saccade.engine.kernels.norm_quantize import add_layernorm, quantize_rows
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.vision import Block, VisionTower
from saccade.engine.models.quantization import supports_fp8_gemm


class _Layer:
    __slots__ = ("fc1", "fc2", "ln1", "ln2", "proj", "qkv")

    def __init__(self, block: Block, fp8: bool) -> None:
        attn, mlp = block.attn, block.mlp
        self.ln1, self.ln2 = block.ln1, block.ln2
        self.qkv, self.proj, self.fc1, self.fc2 = (
            _packed(part, Fp8.ROWS_TOO if fp8 else Fp8.NONE) for part in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)
        )


def _packed(module: nn.Linear, fp8: Fp8) -> PackedLinear:
    """Pack the weights of a linear layer. The layer then uses the packed weights."""
    packed = PackedLinear(module.weight.detach(), module.bias.detach(), fp8)
    module.weight.data = packed.weight
    return packed


class PackedVision:
    """Vision encoder with packed weights. With FP8, the PyTorch blocks of the model's vision encoder become unusable.

    Args:
        model: a model that `supports` accepts.
        fallbacks: collects messages about slower implementations that are used.
    """

    def __init__(self, model: Moondream, fallbacks: Fallbacks) -> None:
        assert isinstance(model.vision, VisionTower)
        self._tower, config = model.vision, model.config.vision
        self._attention = ImageAttention(
            model.device,
            model.dtype,
            config.enc_n_heads,
            config.enc_n_heads,
            config.enc_dim // config.enc_n_heads,
            config.n_tokens,
            fallbacks,
        )
        widths = config.enc_dim, config.enc_ff_dim
        self._fp8 = model.fp8 and supports_fp8_gemm(model.device, fallbacks, config.n_tokens, *widths)
        with torch.no_grad():
            self._layers = [_Layer(block, self._fp8) for block in model.vision.blocks if isinstance(block, Block)]

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Return features (crops, grid², enc_dim) of normalized crops (crops, 3, crop_size, crop_size)."""
        return self._run(crops, -1)[1]

    def two_depths(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two features of normalized crops: after the block with index `block`, and after the last block."""
        return self._run(crops, block)

    def _run(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = early = (self._tower.patches(crops) + self._tower.pos_emb).contiguous()
        count, tokens, dim = x.shape
        flat = x.view(-1, dim)
        before: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            heads = layer.qkv.linear(add_layernorm_rows(flat, before, layer.ln1, self._fp8))
            seen = self._attention.attend(heads)
            if self._fp8:
                attended = layer.proj.linear(quantize_rows(seen, None))
                wide = layer.fc1.linear(add_layernorm_rows(flat, attended, layer.ln2, True))
                before = layer.fc2.linear(quantize_rows(None, wide))
            else:
                attended = layer.proj.linear((seen, None))
                before = layer.fc2.linear((layer.fc1.linear_gelu(add_layernorm(flat, attended, layer.ln2)), None))
            if number == block:
                early = (flat + before).view(count, tokens, dim)
        last = self._tower.post_ln
        assert isinstance(last, nn.LayerNorm)
        return early, add_layernorm(flat, before, last).view(count, tokens, dim)

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Project the features of the whole image and of its tiles to image tokens; see `VisionTower.project`."""
        return self._tower.project(whole, tiles)


def supports(model: Moondream) -> bool:
    """Return whether `PackedVision` supports the vision encoder of the model."""
    return isinstance(model.vision, VisionTower) and model.dtype in (torch.bfloat16, torch.float16)

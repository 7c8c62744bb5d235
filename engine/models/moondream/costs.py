"""The least that a step must do, from a model's shape: bytes moved and operations. Pure arithmetic.

An operation is half a multiply-add. Norms, activations and anything that could stay in registers are left out.
"""

from __future__ import annotations

from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.image_crops import crop_count

WIDTHS = {"float32": (4, 4), "bfloat16": (2, 2), "float16": (2, 2), "fp8": (1, 2)}
"""Bytes of a number of the blocks' weights and of the rest, by the name of the dtype."""


class MoondreamCosts:
    """`ModelCosts` of one shape.

    Args:
        config: the model's; a tower that is a detector is counted without it.
    """

    __slots__ = ("_config",)

    def __init__(self, config: MoondreamConfig) -> None:
        self._config = config

    def decode_bytes(self, sequences: int, keys: int, dtype: str) -> int:
        """Bytes that a decode step of detect or point reads: weights once, and the cache of every sequence."""
        text, region = self._config.text, self._config.region
        of_block, of_rest = WIDTHS[dtype]
        inner = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
        block = text.dim * (inner + text.dim + 2 * text.ff_dim)
        bins = region.coord_out_dim
        head = region.inner_dim * (text.dim + bins) if region.inner_dim else text.dim * bins
        cache = sequences * keys * 2 * text.n_kv_heads * text.head_dim
        return of_block * text.n_layers * block + of_rest * (text.n_layers * cache + head)

    def prefill_flops(self, height: int, width: int, prompt: int) -> int:
        """Operations of an image's prefill: the encoder on each crop, the projection, the decoder over the prefix."""
        text, vision = self._config.text, self._config.vision
        length = text.prefix_attn + prompt
        inner = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
        attention = 2 * length * length * text.n_heads * text.head_dim
        layer = length * text.dim * (inner + text.dim + 2 * text.ff_dim) + attention
        if vision.stem != "patch":
            return 2 * text.n_layers * layer
        crops = crop_count(height, width, vision)
        tokens, dim = vision.n_tokens, vision.enc_dim
        block = tokens * dim * (4 * dim + 2 * vision.enc_ff_dim) + 2 * tokens * tokens * dim
        patches = tokens * dim * vision.enc_patch_size**2 * vision.in_channels
        project = tokens * vision.proj_inner_dim * (2 * dim + vision.proj_out_dim)
        return 2 * (crops * (vision.enc_n_layers * block + patches) + project + text.n_layers * layer)

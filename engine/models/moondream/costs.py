"""The least that a step must do, from a model's shape: bytes moved and operations. Pure arithmetic.

An operation is half a multiply-add. Norms, activations and anything that could stay in registers are left out.
"""

from __future__ import annotations

from saccade.engine.models.moondream.config import ExpertsConfig, MoondreamConfig
from saccade.engine.models.moondream.image_crops import tiling_of
from saccade.engine.models.protocol import crop_count

WIDTHS = {"float32": (4, 4), "bfloat16": (2, 2), "float16": (2, 2), "fp8": (1, 2)}
"""Bytes of a number of the blocks' weights and of the rest, by the name of the dtype."""
KV_SCALE = 2
"""Bytes of the scale of a key or a value in FP8, whose numbers have one each."""


class MoondreamCosts:
    """`ModelCosts` of one shape.

    Args:
        config: the model's; a tower that is a detector is counted without it.
    """

    __slots__ = ("_config",)

    def __init__(self, config: MoondreamConfig) -> None:
        self._config = config

    def decode_bytes(
        self, sequences: int, keys: int, dtype: str, experts: float | None = None, kv_dtype: str | None = None
    ) -> int:
        """Bytes that a decode step of detect or point reads: weights once, and the cache of every sequence."""
        text, region = self._config.text, self._config.region
        of_block, of_rest = WIDTHS[dtype]
        weights = of_block * text.n_layers * self._attention()
        rest = text.n_layers * 2 * text.n_heads * 3 * text.n_heads * text.head_dim if text.tau else 0
        for layer in range(text.n_layers):
            if (moe := self._moe(layer)) is None:
                weights += of_block * text.dim * 2 * text.ff_dim
                continue
            share = moe.experts_per_token / moe.num_experts
            used = moe.num_experts * (1 - (1 - share) ** sequences) if experts is None else experts
            weights += of_block * round(used * self._expert(moe))
            rest += text.dim * moe.num_experts
        bins = region.coord_out_dim
        rest += region.inner_dim * (text.dim + bins) if region.inner_dim else text.dim * bins
        head = of_rest * text.head_dim if kv_dtype is None else text.head_dim + KV_SCALE
        cache = sequences * keys * 2 * text.n_kv_heads * head
        return weights + text.n_layers * cache + of_rest * rest

    def prefill_flops(self, height: int, width: int, prompt: int) -> int:
        """Operations of an image's prefill: the encoder on each crop, the projection, the decoder over the prefix."""
        text, vision = self._config.text, self._config.vision
        length = text.prefix_attn + prompt
        layers = 0
        for layer in range(text.n_layers):
            moe = self._moe(layer)
            mlp = text.dim * 2 * text.ff_dim if moe is None else moe.experts_per_token * self._expert(moe)
            layers += length * (self._attention() + mlp) + 2 * length * length * text.n_heads * text.head_dim
        if vision.stem != "patch":
            return 2 * layers
        crops = crop_count(tiling_of(height, width, vision))
        tokens, dim = vision.n_tokens, vision.enc_dim
        block = tokens * dim * (4 * dim + 2 * vision.enc_ff_dim) + 2 * tokens * tokens * dim
        patches = tokens * dim * vision.enc_patch_size**2 * vision.in_channels
        both = dim if crops == 1 else 2 * dim  # features of the image and of its tiles, where these are not the same
        project = tokens * vision.proj_inner_dim * (both + vision.proj_out_dim)
        return 2 * (crops * (vision.enc_n_layers * block + patches) + project + layers)

    def _moe(self, layer: int) -> ExpertsConfig | None:
        """The mixture of experts of a layer, if it has one."""
        moe = self._config.text.moe
        return None if moe is None or layer < moe.start_layer else moe

    def _attention(self) -> int:
        """Weights of a layer's attention."""
        text = self._config.text
        return text.dim * ((text.n_heads + 2 * text.n_kv_heads) * text.head_dim + text.dim)

    def _expert(self, moe: ExpertsConfig) -> int:
        """Weights of one expert."""
        return 3 * self._config.text.dim * moe.expert_inner_dim

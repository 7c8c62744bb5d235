"""Computes how many bytes a decode step reads at least, from the dimensions of the model."""

from __future__ import annotations

from saccade.engine.models.moondream.config import ExpertsConfig, MoondreamConfig

WIDTHS = {"float32": (4, 4), "bfloat16": (2, 2), "float16": (2, 2), "fp8": (1, 2)}
"""Bytes per weight of the blocks, and per other weight, by dtype name."""
KV_SCALE = 2
"""Bytes of the scale of a key vector or value vector in FP8."""


class MoondreamCosts:
    """Computes the minimum memory traffic of a Moondream decode step.

    Args:
        config: configuration of the model.
    """

    __slots__ = ("_config",)

    def __init__(self, config: MoondreamConfig) -> None:
        self._config = config

    def decode_bytes(
        self, sequences: int, keys: int, dtype: str, experts: float | None = None, kv_dtype: str | None = None
    ) -> int:
        """Return how many bytes a decode step reads at least: each used weight once, and the KV cache.

        Args:
            sequences: number of sequences in the step.
            keys: number of keys per sequence.
            dtype: dtype of the weights, a name in `model_loader.DTYPES`.
            experts: mean number of experts per layer that the step uses. None assumes that each token uses random
                experts.
            kv_dtype: dtype of the KV cache, see `EngineConfig.kv_dtype`.
        """
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

    def _moe(self, layer: int) -> ExpertsConfig | None:
        """Return the mixture-of-experts configuration of a layer, or None if the layer is dense."""
        moe = self._config.text.moe
        return None if moe is None or layer < moe.start_layer else moe

    def _attention(self) -> int:
        """Return the number of parameters of the attention projections (Q, K, V and output) of one layer."""
        text = self._config.text
        return text.dim * ((text.n_heads + 2 * text.n_kv_heads) * text.head_dim + text.dim)

    def _expert(self, moe: ExpertsConfig) -> int:
        """Return the number of parameters of one expert in a mixture-of-experts layer."""
        return 3 * self._config.text.dim * moe.expert_inner_dim

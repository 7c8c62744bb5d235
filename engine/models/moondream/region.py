"""Region heads: networks that encode coordinates and sizes, and decode them.

The results match the reference implementation of Moondream (github.com/vikhyat/moondream, Apache-2.0).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from saccade.engine.models.moondream.config import RegionConfig
from saccade.engine.models.moondream.layers import Mlp


def fourier_features(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return Fourier features (..., 2f) of x (..., n) for frequencies (n, f) (Tancik et al. 2020, arXiv:2006.10739).

    The computation is in float32, because coordinates in steps of 1/1024 need more precision than bfloat16 has.
    """
    angles = 2 * math.pi * (x.float().unsqueeze(-1) * frequencies.float()).sum(-2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def size_value(bins: torch.Tensor, n_bins: int) -> torch.Tensor:
    """Convert the index of a size bin to a fraction of the image: 2^(bin / (n_bins - 1) · 10 - 10), in float32."""
    return size_values(n_bins, bins.device)[bins]


@functools.cache
def size_values(n_bins: int, device: torch.device) -> torch.Tensor:
    """Return the sizes (n_bins,) float32 of all size bins, as fractions of the image. The table is read-only."""
    # Computed on the CPU, because powers can differ between devices in the last bits. Sampled and drafted sizes must be
    # equal.
    with torch.inference_mode(False):  # a tensor created in inference mode could not be used in training
        bins = torch.arange(n_bins, device="cpu")
        return torch.pow(2.0, bins.float() / (n_bins - 1) * 10.0 - 10.0).to(device)


def size_bin(size: torch.Tensor, n_bins: int) -> torch.Tensor:
    """Return the index of the nearest size bin; the inverse of `size_value`. Sizes below 2^-10 belong to bin 0."""
    scaled = (size.clamp(min=2.0**-10).log2() + 10.0) / 10.0 * (n_bins - 1)
    return scaled.round().long().clamp(0, n_bins - 1)


class RegionHeads(nn.Module):
    """Encodes coordinates and sizes as embeddings, and decodes hidden states to coordinates and sizes.

    The hidden states are those before the last norm of the text decoder.

    Args:
        config: configuration of the heads. An empty `reads` means "raw".
        post_ln: last norm of the text decoder, used if `reads` is "post_ln_ln".
    """

    def __init__(self, config: RegionConfig, post_ln: nn.LayerNorm | None = None) -> None:
        super().__init__()
        self.config = config
        # In a dict, so that the norm of the text decoder does not become a submodule here.
        self._norms: dict[str, tuple[nn.LayerNorm, ...]] = {"raw": ()}
        if config.reads in ("ln", "post_ln_ln"):
            self.ln = nn.LayerNorm(config.dim)
            self._norms |= {"ln": (self.ln,), "post_ln_ln": (self.ln,) if post_ln is None else (post_ln, self.ln)}
        self.norms = self._norms[config.reads or "raw"]
        self.coord_features = nn.Parameter(torch.empty(1, config.coord_feat_dim // 2))
        self.coord_encoder = nn.Linear(config.coord_feat_dim, config.dim)
        self.coord_decoder = _decoder(config, config.coord_out_dim)
        self.size_features = nn.Parameter(torch.empty(2, config.size_feat_dim // 2))
        self.size_encoder = nn.Linear(config.size_feat_dim, config.dim)
        self.size_decoder = _decoder(config, config.size_out_dim)

    def encode_coord(self, value: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of coordinates (..., 1) from 0 to 1."""
        return self.coord_encoder(fourier_features(value, self.coord_features).to(self.coord_encoder.weight.dtype))  # type: ignore[no-any-return]

    def encode_size(self, value: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of (width, height) pairs (..., 2) from 0 to 1."""
        return self.size_encoder(fourier_features(value, self.size_features).to(self.size_encoder.weight.dtype))  # type: ignore[no-any-return]

    def coord(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely coordinate (..., 1) float32, from 0 to 1, for hidden states (..., dim)."""
        logits = self.decode_coord(hidden)
        return (logits.argmax(-1, keepdim=True) / logits.shape[-1]).float()

    def size(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely width and height (..., 2) float32 for hidden states (..., dim), from 0 to 1."""
        logits = self.decode_size(hidden)
        return size_value(logits.argmax(-1), logits.shape[-1])

    @property
    def readings(self) -> tuple[str, ...]:
        """Names of the supported normalizations of the hidden states; see `RegionConfig.reads`.

        The first name is the normalization in use.
        """
        given = next(name for name, norms in self._norms.items() if norms == self.norms)
        return given, *(name for name in self._norms if name != given)

    def read_as(self, name: str) -> None:
        """Select the normalization of the hidden states. `name` is one of `readings`."""
        self.norms = self._norms[name]

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize hidden states (..., dim) for the region decoders; see `RegionConfig.reads`."""
        for norm in self.norms:
            hidden = norm(hidden)
        return hidden

    def decode_coord(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., coord_out_dim) of all coordinate bins for hidden states (..., dim)."""
        return self.coord_decoder(self.read(hidden))  # type: ignore[no-any-return]

    def decode_size(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., 2, size_out_dim / 2) of the width and height bins for hidden states (..., dim)."""
        return self.size_decoder(self.read(hidden)).unflatten(-1, (2, -1))  # type: ignore[no-any-return]


def _decoder(config: RegionConfig, out: int) -> nn.Module:
    return Mlp(config.dim, config.inner_dim, out) if config.inner_dim else nn.Linear(config.dim, out)

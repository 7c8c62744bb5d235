"""The vision encoder: crops in, image tokens out. Knows nothing of text.

Behaviour after the public Apache-2.0 reference implementation of Moondream (github.com/vikhyat/moondream).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.config import VisionConfig
from saccade.engine.models.moondream.image_crops import make_crops, normalize, stitch, tiling_of
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.protocol import ImageCrops, Tiling


class Attention(nn.Module):
    """Self-attention in which every token of a crop sees every other."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.n_heads = config.enc_n_heads
        self.qkv = nn.Linear(config.enc_dim, 3 * config.enc_dim)
        self.proj = nn.Linear(config.enc_dim, config.enc_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (crops, tokens, dim) to the same shape."""
        crops, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(crops, tokens, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(crops, tokens, dim))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.enc_dim)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.enc_dim)
        self.mlp = Mlp(config.enc_dim, config.enc_ff_dim, config.enc_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (crops, tokens, dim) to the same shape."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class CropReader(nn.Module):
    """What every tower of the family has in common: how images are cut into crops, and what its tokens are called by.

    Attributes:
        pos_emb: (1, n_tokens, …) learned positions.
        blocks: transformer blocks, none in some towers.
    """

    pos_emb: nn.Parameter
    blocks: nn.ModuleList

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def crop_size(self) -> int:
        """Side of a crop in pixels."""
        return self.config.crop_size

    @property
    def crop_margin(self) -> int:
        """Pixels by which tiles overlap at each side."""
        return self.config.overlap_margin * self.config.enc_patch_size

    @property
    def max_crops(self) -> int:
        """Most tiles of an image."""
        return self.config.max_crops

    @property
    def n_tokens(self) -> int:
        """Tokens of an image, and of a crop's features."""
        return self.config.n_tokens

    @property
    def feature_dim(self) -> int:
        """Width of a crop's features."""
        return self.config.enc_dim

    def tiling_of(self, height: int, width: int) -> Tiling:
        """Tiles of an image."""
        return tiling_of(height, width, self.config)

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        """Cut an image (height, width, 3) uint8 RGB; a 1×1 tile equals the global crop, which is all there is then."""
        crops, tiling = make_crops(image, self.config)
        return ImageCrops(crops[:1] if tiling == (1, 1) else crops, tiling)

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        """See `image_crops.normalize`; in the tower's dtype."""
        return normalize(crops, self.pos_emb.dtype)


class VisionTower(CropReader):
    """Patches, transformer blocks, and the projection of global and local features to the text decoder's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.patch_emb = nn.Linear(config.enc_patch_size**2 * config.in_channels, config.enc_dim)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.n_tokens, config.enc_dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.enc_n_layers))
        self.post_ln = nn.LayerNorm(config.enc_dim)
        self.proj_mlp = Mlp(2 * config.enc_dim, config.proj_inner_dim, config.proj_out_dim)

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Features (crops, grid², enc_dim) of normalized crops (crops, 3, crop_size, crop_size)."""
        return self.two_depths(crops, 0)[1]

    def two_depths(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DeepEncoder.two_depths`."""
        x = early = self.patches(crops) + self.pos_emb
        for number, layer in enumerate(self.blocks):
            x = layer(x)
            if number == block:
                early = x
        return early, self.post_ln(x)

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Image tokens (..., grid², proj_out_dim) from global and local features, each (..., grid², enc_dim)."""
        return self.proj_mlp(torch.cat([whole, tiles], dim=-1))  # type: ignore[no-any-return]

    def forward(self, crops: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Image tokens (grid², proj_out_dim) of one image.

        Args:
            crops: (1 + rows · columns, 3, crop_size, crop_size), the global crop first.
            tiling: (rows, columns).

        With a 1×1 tiling the local crop equals the global one, so the encoder runs once.
        """
        if tiling == (1, 1):
            whole = self.features(crops[:1])[0]
            return self.project(whole, whole)
        return self.join(self.features(crops), tiling)

    def join(self, features: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Image tokens (grid², proj_out_dim) from features (1 + tiles, grid², enc_dim), the global crop's first."""
        grid = self.config.grid
        tiles = features[1:].view(-1, grid, grid, features.shape[-1])
        stitched = stitch(tiles, tiling, self.config.overlap_margin).permute(2, 0, 1)
        pooled = F.adaptive_avg_pool2d(stitched, (grid, grid)).flatten(1).t()
        return self.project(features[0], pooled)

    def patches(self, crops: torch.Tensor) -> torch.Tensor:
        """Embed each patch, its values in the order (channel, row, column)."""
        n, channels, _, _ = crops.shape
        grid, patch = self.config.grid, self.config.enc_patch_size
        x = crops.reshape(n, channels, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        return self.patch_emb(x.reshape(n, grid * grid, -1))  # type: ignore[no-any-return]

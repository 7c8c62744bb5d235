"""Vision encoder: splits an image into crops and encodes the crops as image tokens.

Crops are byte-identical with those of the public Apache-2.0 reference implementation of Moondream
(github.com/vikhyat/moondream). This includes Lanczos resizing, tiling, overlap and stitching.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.config import VisionConfig
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.protocol import ImageCrops, Tiling


class Attention(nn.Module):
    """Bidirectional self-attention between the tokens of a crop."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.n_heads = config.enc_n_heads
        self.qkv = nn.Linear(config.enc_dim, 3 * config.enc_dim)
        self.proj = nn.Linear(config.enc_dim, config.enc_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to the tokens of crops (crops, tokens, dim). The shape does not change."""
        crops, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(crops, tokens, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(crops, tokens, dim))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Transformer block of the vision encoder, with norms before attention and MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.enc_dim)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.enc_dim)
        self.mlp = Mlp(config.enc_dim, config.enc_ff_dim, config.enc_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to the tokens of crops (crops, tokens, dim). The shape does not change."""
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class CropReader(nn.Module):
    """Base class of Moondream vision encoders, with the size limits and the code that splits images into crops.

    Attributes:
        pos_emb: (1, n_tokens, …) learned position embeddings.
        blocks: transformer blocks. Some encoders have none.
    """

    pos_emb: nn.Parameter
    blocks: nn.ModuleList

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def crop_size(self) -> int:
        """Side of an image crop in pixels."""
        return self.config.crop_size

    @property
    def crop_margin(self) -> int:
        """Overlap of neighbouring tiles on each side, in pixels."""
        return self.config.overlap_margin * self.config.enc_patch_size

    @property
    def max_crops(self) -> int:
        """Maximum number of tiles per image."""
        return self.config.max_crops

    @property
    def n_tokens(self) -> int:
        """Number of image tokens per image, which is also the number of features per crop."""
        return self.config.n_tokens

    @property
    def feature_dim(self) -> int:
        """Number of feature channels per image token, before the projection."""
        return self.config.enc_dim

    def tiling_of(self, height: int, width: int) -> Tiling:
        """Return the number of tiles (rows, columns) for an image of `height` × `width` pixels."""
        return tiling_of(height, width, self.config)

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        """Split an image (height, width, 3) uint8 RGB into a global crop and tiles.

        With the tiling 1×1, the global crop is the only crop.
        """
        crops, tiling = make_crops(image, self.config)
        return ImageCrops(crops[:1] if tiling == (1, 1) else crops, tiling)

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        """Convert crops (n, size, size, 3) uint8 to (n, 3, size, size) from -1 to 1, in the encoder's dtype."""
        return normalize(crops, self.pos_emb.dtype)


class VisionTower(CropReader):
    """The published vision encoder: patch embedding, transformer blocks and a projection.

    The projection converts features to the embedding width of the text decoder.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.patch_emb = nn.Linear(config.enc_patch_size**2 * config.in_channels, config.enc_dim)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.n_tokens, config.enc_dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.enc_n_layers))
        self.post_ln = nn.LayerNorm(config.enc_dim)
        self.proj_mlp = Mlp(2 * config.enc_dim, config.proj_inner_dim, config.proj_out_dim)

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Return features (crops, grid², enc_dim) of normalized crops (crops, 3, crop_size, crop_size)."""
        return self.two_depths(crops, 0)[1]

    def two_depths(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features after block `block` and after the last block, for normalized crops.

        Both have the shape (crops, grid², enc_dim).
        """
        x = early = self.patches(crops) + self.pos_emb
        for number, layer in enumerate(self.blocks):
            x = layer(x)
            if number == block:
                early = x
        return early, self.post_ln(x)

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Return image tokens (..., grid², proj_out_dim).

        Args:
            whole: (..., grid², enc_dim) features of the global crop.
            tiles: (..., grid², enc_dim) stitched features of the tiles.
        """
        return self.proj_mlp(torch.cat([whole, tiles], dim=-1))  # type: ignore[no-any-return]

    def forward(self, crops: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Return the image tokens (grid², proj_out_dim) of one image.

        With the tiling 1×1, the only tile equals the global crop, so the encoder runs once.

        Args:
            crops: (1 + rows · columns, 3, crop_size, crop_size) normalized crops, the global crop first.
            tiling: number of tiles (rows, columns).
        """
        if tiling == (1, 1):
            whole = self.features(crops[:1])[0]
            return self.project(whole, whole)
        return self.join(self.features(crops), tiling)

    def join(self, features: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Return the image tokens (grid², proj_out_dim) of one image from the features of its crops.

        Args:
            features: (1 + tiles, grid², enc_dim), the global crop first.
            tiling: number of tiles (rows, columns).
        """
        grid = self.config.grid
        tiles = features[1:].view(-1, grid, grid, features.shape[-1])
        stitched = stitch(tiles, tiling, self.config.overlap_margin).permute(2, 0, 1)
        pooled = F.adaptive_avg_pool2d(stitched, (grid, grid)).flatten(1).t()
        return self.project(features[0], pooled)

    def patches(self, crops: torch.Tensor) -> torch.Tensor:
        """Return the patch embeddings (n, grid², enc_dim) of crops (n, channels, crop_size, crop_size)."""
        n, channels, _, _ = crops.shape
        grid, patch = self.config.grid, self.config.enc_patch_size
        x = crops.reshape(n, channels, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        return self.patch_emb(x.reshape(n, grid * grid, -1))  # type: ignore[no-any-return]


# ---- crops


def select_tiling(height: int, width: int, window: int, max_crops: int) -> tuple[int, int]:
    """Return the number of tiles (rows, columns) for an image of `height` × `width` pixels.

    A tile has `window` pixels per side. If the height or width is not larger, there is only one tile. Otherwise the
    number of tiles is as close to `max_crops` as the aspect ratio allows, and never larger.
    """
    if height <= window or width <= window:
        return 1, 1
    fewest_h, fewest_w = math.ceil(height / window), math.ceil(width / window)
    if fewest_h * fewest_w > max_crops:
        shrink = math.sqrt(max_crops / (fewest_h * fewest_w))
        rows, columns = max(1, math.floor(fewest_h * shrink)), max(1, math.floor(fewest_w * shrink))
        # One side of a very long image shrinks to less than one tile. Moondream's reference implementation then makes
        # more than `max_crops` tiles (15 × 1 for 11,000 × 500 pixels), for which the buffers on a GPU are too small.
        return min(rows, max_crops), min(columns, max_crops)
    tiles_h = max(math.floor(math.sqrt(max_crops * height / width)), fewest_h)
    tiles_w = max(math.floor(math.sqrt(max_crops * width / height)), fewest_w)
    if tiles_h * tiles_w > max_crops:
        if tiles_w > tiles_h:
            tiles_w = max_crops // tiles_h
        else:
            tiles_h = max_crops // tiles_w
    return max(1, tiles_h), max(1, tiles_w)


def tiling_of(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Return the number of tiles (rows, columns) for an image of `height` × `width` pixels."""
    margin = config.overlap_margin * config.enc_patch_size
    window = config.crop_size - 2 * margin
    return select_tiling(height - 2 * margin, width - 2 * margin, window, config.max_crops)


def make_crops(image: NDArray[np.uint8], config: VisionConfig) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Split an image into one global crop and overlapping tiles.

    Args:
        image: (height, width, 3) uint8 RGB.
        config: `crop_size`, `enc_patch_size`, `overlap_margin` (in patches) and `max_crops` are used.

    Returns:
        Crops (1 + rows · columns, crop_size, crop_size, 3) uint8, and the tiling. The global crop comes first, then the
            tiles in row-major order. With the tiling 1×1, the only tile is a copy of the global crop.
    """
    size = config.crop_size
    margin = config.overlap_margin * config.enc_patch_size
    window = size - 2 * margin
    rows, columns = tiling_of(image.shape[0], image.shape[1], config)
    pixels = Image.fromarray(image)
    crops = np.empty((1 + rows * columns, size, size, 3), dtype=np.uint8)
    crops[0] = np.asarray(pixels.resize((size, size), Image.Resampling.LANCZOS))
    if (rows, columns) == (1, 1):
        crops[1] = crops[0]
        return crops, (rows, columns)
    target = (columns * window + 2 * margin, rows * window + 2 * margin)
    resized = np.asarray(pixels.resize(target, Image.Resampling.LANCZOS))
    for row in range(rows):
        for column in range(columns):
            y, x = row * window, column * window
            crops[1 + row * columns + column] = resized[y : y + size, x : x + size]
    return crops, (rows, columns)


def normalize(crops: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert crops (N, H, W, 3) uint8 to (N, 3, H, W) from -1 to 1, in channels-last memory format."""
    return crops.permute(0, 3, 1, 2).to(dtype).div_(255.0).sub_(0.5).div_(0.5)


def stitch(features: torch.Tensor, tiling: tuple[int, int], margin: int) -> torch.Tensor:
    """Join the features of overlapping tiles into one feature map. Each tile's margin is dropped where tiles overlap.

    Args:
        features: (rows · columns, grid, grid, dim), tiles in row-major order.
        tiling: number of tiles (rows, columns).
        margin: overlap on each side of a tile, in features.

    Returns:
        (rows · (grid - 2 margin) + 2 margin, columns · (grid - 2 margin) + 2 margin, dim).
    """
    rows, columns = tiling
    grid = features.shape[1]

    def keep(index: int, count: int) -> slice:
        return slice(0 if index == 0 else margin, grid if index == count - 1 else grid - margin)

    return torch.cat(
        [
            torch.cat(
                [features[row * columns + column, keep(row, rows), keep(column, columns)] for column in range(columns)],
                dim=1,
            )
            for row in range(rows)
        ]
    )

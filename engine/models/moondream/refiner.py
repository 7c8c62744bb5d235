"""Mask refiner of Moondream 3: refines a segmentation mask in five iterations, using image features.

    image → features of an early block and of the last block of the vision encoder ┐
    mask  → convolutions ──────────────────────────────────────────────────────────┴→ two transformer blocks
          ↑                                                                          → four masks, predicted IoUs
          └──────────────────── probabilities of the best mask ←─────────────────────┘

The network is a mask decoder like that of SAM (Kirillov et al. 2023), with fused features like HQ-SAM (Ke et al. 2023).
It computes in float32. It is not tested with the published weights, which do not specify all details. As in SAM, the
activation is assumed to be GELU, and the first token to be the IoU token.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.errors import ModelFilesError
from saccade.engine.models.moondream.vision import VisionTower

ROUNDS = 5
_EARLY = 8  # index of the encoder block whose output is used in addition to that of the last norm
_MASKS, _HEADS, _GROUPS = 4, 8, (1, 8, 16, 32)
_DENSE = 8  # hidden width of the MLP in a transformer block, as a multiple of the token width


class _Attention(nn.Module):
    """Multi-head attention with separate projections of queries, keys and values."""

    def __init__(self, dim: int, heads: int = _HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute the attention of queries (rows, queries, dim) to keys and values (rows, keys, dim).

        Return (rows, queries, dim).
        """
        parts = ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        heads = [layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, x in parts]
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Transformer block of SAM's mask decoder, with a layer norm after each residual sum.

    Tokens attend to each other, then to the image features. Then the image features attend to the tokens.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.output_self_attn, self.norm1 = _Attention(dim), nn.LayerNorm(dim)
        self.cross_attn_token_to_image, self.norm2 = _Attention(dim), nn.LayerNorm(dim)
        self.mlp, self.norm3 = _dense(dim, _DENSE * dim, dim), nn.LayerNorm(dim)
        self.cross_attn_image_to_token, self.norm4 = _Attention(dim), nn.LayerNorm(dim)

    def forward(
        self, tokens: torch.Tensor, image: torch.Tensor, token_pe: torch.Tensor, image_pe: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the updated tokens (rows, tokens, dim) and image features (rows, positions, dim).

        The position embeddings `token_pe` and `image_pe` are added to queries and keys.
        """
        q = tokens + token_pe
        tokens = self.norm1(tokens + self.output_self_attn(q, q, tokens))
        q, k = tokens + token_pe, image + image_pe
        tokens = self.norm2(tokens + self.cross_attn_token_to_image(q, k, image))
        tokens = self.norm3(tokens + self.mlp(tokens))
        q = tokens + token_pe
        return tokens, self.norm4(image + self.cross_attn_image_to_token(k, q, tokens))


class _LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of (rows, channels, height, width)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Fusion(nn.Module):
    """Combines the features of an early and of the last encoder block into one feature map."""

    def __init__(self, enc_dim: int, dim: int, inner: int) -> None:
        super().__init__()
        self.early_proj = nn.Sequential(nn.Linear(enc_dim, dim), nn.LayerNorm(dim), nn.GELU())
        norm = nn.GroupNorm(_GROUPS[-1], dim)
        self.fusion = nn.Sequential(nn.Conv2d(2 * dim, inner, 1), nn.Conv2d(inner, dim, 3, padding=1), norm, nn.GELU())


class _MaskEncoder(nn.Module):
    """Convolutions that encode a mask as a feature map for the refiner."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        widths = (1, 16, 32, 64, dim)
        for n, groups in enumerate(_GROUPS, start=1):
            conv = nn.Conv2d(widths[n - 1], widths[n], 3, stride=2, padding=1)
            self.add_module(f"conv{n}", nn.Sequential(conv, nn.GroupNorm(groups, widths[n]), nn.GELU()))


class MaskRefiner(nn.Module):
    """Network that refines a segmentation mask.

    Args:
        enc_dim: width of the vision encoder's features.
        dim: width of the refiner's tokens.
        grid: number of features along one side of a crop.
        fused: number of channels between the two convolutions that fuse the features.

    Attributes:
        early_block: index of the encoder block whose features are used in addition to the last features.
    """

    def __init__(self, enc_dim: int = 1152, dim: int = 256, grid: int = 27, fused: int = 256) -> None:
        super().__init__()
        self.grid, self.early_block = grid, _EARLY
        self.image_proj = nn.Conv2d(enc_dim, dim, 1)
        self.image_pe = nn.Parameter(torch.empty(1, dim, grid, grid))
        self.hq_fusion, self.mask_encoder = _Fusion(enc_dim, dim, fused), _MaskEncoder(dim)
        self.mask_tokens, self.iou_token = nn.Parameter(torch.empty(_MASKS, dim)), nn.Parameter(torch.empty(1, dim))
        self.output_pe = nn.Parameter(torch.empty(1 + _MASKS, dim))
        self.transformer_blocks = nn.ModuleList(_Block(dim) for _ in range(2))
        self.final_token_to_image, self.final_norm = _Attention(dim), nn.LayerNorm(dim)
        layers: list[nn.Module] = []
        for wide in (dim, dim // 2, dim // 4):
            half = wide // 2
            layers += [nn.ConvTranspose2d(wide, half, 2, 2), _LayerNorm2d(half, 1e-6), nn.GELU()]
            layers += [nn.Conv2d(half, half, 3, padding=1), _LayerNorm2d(half, 1e-6), nn.GELU()]
        self.upsample, small = nn.Sequential(*layers), dim // 8
        self.final_q_proj = nn.Linear(dim, small)
        self.final_attn_up, self.final_norm_up = _Attention(small, 4), nn.LayerNorm(small)
        self.mask_mlps = nn.ModuleList(_dense(small, small, small, small) for _ in range(_MASKS))
        self.iou_head = _dense(dim, dim, dim, _MASKS)

    def fuse(self, early: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Combine the features of an early and of the last encoder block into one feature map (1, dim, grid, grid).

        `early` and `last` have the shape (1, grid², enc_dim).
        """

        def placed(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2).view(1, -1, self.grid, self.grid)

        image, seen = self.image_proj(placed(last)), placed(self.hq_fusion.early_proj(early))
        return self.hq_fusion.fusion(torch.cat([image, seen], dim=1))  # type: ignore[no-any-return]

    def round(self, image: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one iteration of mask refinement.

        Args:
            image: (1, dim, grid, grid) feature map from `fuse`.
            mask: (1, 1, size, size) mask of the previous iteration, from 0 to 1.

        Returns:
            Logits (1, 4, size, size) of four masks, and their predicted IoUs (1, 4).
        """
        coded = mask
        for layer in self.mask_encoder.children():
            coded = layer(coded)
        image = image + F.interpolate(coded, (self.grid, self.grid), mode="bilinear")
        tokens = torch.cat([self.iou_token, self.mask_tokens]).unsqueeze(0)
        places, image_pe, token_pe = (
            x.flatten(2).transpose(1, 2) for x in (image, self.image_pe, self.output_pe.t()[None])
        )
        for block in self.transformer_blocks:
            tokens, places = block(tokens, places, token_pe, image_pe)
        seen = self.final_token_to_image(tokens + token_pe, places + image_pe, places)
        tokens = self.final_norm(tokens + seen)
        large = self.upsample(places.transpose(1, 2).unflatten(2, (self.grid, self.grid)))
        pixels, small = large.flatten(2).transpose(1, 2), self.final_q_proj(tokens[:, 1:])
        small = self.final_norm_up(small + self.final_attn_up(small, pixels, pixels))
        chosen = torch.stack([mlp(small[:, number]) for number, mlp in enumerate(self.mask_mlps)], dim=1)
        masks = torch.einsum("bnc,bchw->bnhw", chosen, large)
        return F.interpolate(masks, mask.shape[2:], mode="bilinear"), self.iou_head(tokens[:, 0])

    def forward(self, early: torch.Tensor, last: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the refined mask.

        Args:
            early: (1, grid², enc_dim) features after block `early_block` of the vision encoder.
            last: (1, grid², enc_dim) features after the last norm of the vision encoder.
            mask: (size, size) float32 coarse mask, from 0 to 1.

        Returns:
            (size, size) float32 probability that each pixel belongs to the object.
        """
        image, mask = self.fuse(early.float(), last.float()), mask[None, None]
        for _ in range(ROUNDS):
            masks, quality = self.round(image, mask)
            best = quality.argmax(-1).view(1, 1, 1, 1).expand(1, 1, *masks.shape[2:])
            mask = masks.gather(1, best).sigmoid()
        return mask[0, 0]


def _dense(*widths: int) -> nn.Sequential:
    """Return an MLP: linear layers of the given widths with GELUs between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def load_refiner(path: Path, tower: VisionTower) -> MaskRefiner:
    """Read a published mask refiner: a torch file with tensors under `head`. No pickled code runs.

    Args:
        path: the refiner file.
        tower: vision encoder that computes the image features. The refiner is moved to its device.

    Raises:
        ModelFilesError: if the file cannot be read or does not match the vision encoder.
    """
    try:
        stored = torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise many types of errors, with multi-line messages
        raise ModelFilesError(
            f"{path}: not a PyTorch file that contains only tensors ({type(error).__name__})"
        ) from None
    head = stored.get("head") if isinstance(stored, Mapping) else None
    if not isinstance(head, Mapping) or not all(isinstance(one, torch.Tensor) for one in head.values()):
        raise ModelFilesError(f"{path}: not a mask refiner: the file has no tensors under 'head'")
    sizes = {}
    for name in ("image_proj.weight", "image_pe", "hq_fusion.fusion.0.weight"):
        if name not in head or head[name].ndim != 4:
            raise ModelFilesError(f"{path}: tensor '{name}' is missing or does not have 4 dimensions")
        sizes[name] = tuple(head[name].shape)
    (dim, inputs, *_), (_, _, side, _), (fused, *_) = sizes.values()
    own = tower.config
    if (inputs, side) != (own.enc_dim, own.grid):
        raise ModelFilesError(
            f"{path}: the refiner expects a {side} x {side} feature map with {inputs} channels, but the model has "
            f"{own.grid} x {own.grid} with {own.enc_dim}"
        )
    if dim % 32:
        raise ModelFilesError(f"{path}: the refiner's token dimension must be a multiple of 32; got {dim}")
    with torch.device("meta"):
        made = MaskRefiner(inputs, dim, side, fused)
    made.load_state_dict(
        _matched(made.state_dict(), {name: one.float() for name, one in head.items()}, path), assign=True
    )
    made.early_block = min(_EARLY, tower.config.enc_n_layers - 1)
    return made.to(tower.pos_emb.device).eval().requires_grad_(False)


def _matched(ours: Mapping[str, torch.Tensor], held: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """Map the tensors of a refiner file to the parameter names of `MaskRefiner`.

    A tensor with an unknown name is assigned to the next unassigned parameter in the same part of the refiner, such as
    a transformer block. The parameter must have the same shape and the same role (weight or bias).
    """
    held = {key: tensor for name, tensor in held.items() for key, tensor in _split(name, tensor)}
    found = {}
    for name, like in ours.items():
        part, kind = _part(name), name.rpartition(".")[2]
        alike = (
            other for other in held if _part(other) == part and other.endswith(kind) and held[other].shape == like.shape
        )
        taken = name if name in held else next(alike, name)
        if taken not in held or held[taken].shape != like.shape:
            raise ModelFilesError(f"{path}: tensor '{name}' is missing, or its shape is not {list(like.shape)}")
        found[name] = held.pop(taken)
    if held:
        name = next(iter(held))
        raise ModelFilesError(f"{path}: tensor '{name}' {list(held[name].shape)} is not part of a refiner")
    return found


def _split(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Split a combined projection of queries, keys and values into three tensors. Return other tensors unchanged."""
    if "in_proj_" not in name or tensor.shape[0] % 3:
        return [(name, tensor)]
    return [(name.replace("in_proj_", f"{k}_proj."), part) for k, part in zip("qkv", tensor.chunk(3), strict=True)]


def _part(name: str) -> str:
    """Return the part of the refiner, such as a block, that contains the tensor `name`."""
    words = name.split(".")
    depth = {"transformer_blocks": 3, "hq_fusion": 2, "mask_mlps": 2}.get(words[0], 1)
    return ".".join(words[:depth])

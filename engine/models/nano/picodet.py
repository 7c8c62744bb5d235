"""Layers of PP-PicoDet-S, a small object detector that maps crops to class and box logits in each cell of a grid.

The backbone (ESNet-S), the neck (CSP-PAN) and the heads are those of PP-PicoDet (Yu et al. 2021, arXiv:2111.00902;
PaddleDetection, Apache License 2.0). Batch norms are folded into the convolutions. Three things differ: inputs range
from -1 to 1, the classes are different, and one class that is a part of another (the face of a person) has separate
boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

STRIDES = (8, 16, 32, 64)
BINS = 8  # bins of the distance from a place to each side of its box, in strides
_WIDTH = 96  # channels of the neck's feature maps
# (channels, width of each unit's first convolution) of the stages: ESNet-S as published.
_STAGES = ((96, (44, 24, 24)), (192, (48, 60, 48, 60, 48, 48, 48)), (384, (96, 96, 96)))


class ConvAct(nn.Conv2d):
    """A convolution with padding, followed by an activation ("hswish" or "none")."""

    def __init__(self, inner: int, outer: int, side: int = 1, stride: int = 1, groups: int = 1, act: str = "hswish"):  # noqa: ANN204
        super().__init__(inner, outer, side, stride, padding=side // 2, groups=groups)
        self.act = act

    def reset_parameters(self) -> None:
        """Initialize the weights, except on the meta device."""
        if not self.weight.is_meta:  # there it has no effect and takes 0.1 s
            super().reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply convolution and activation: (N, inner, H, W) to (N, outer, ceil(H / stride), ceil(W / stride))."""
        x = super().forward(x)
        return F.hardswish(x) if self.act == "hswish" else x


class Separable(nn.Module):
    """A depthwise 5×5 convolution followed by a pointwise convolution."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.dw = ConvAct(width, width, 5, stride, width)
        self.pw = ConvAct(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both convolutions: (N, width, H, W) to (N, width, ceil(H / stride), ceil(W / stride))."""
        return self.pw(self.dw(x))  # type: ignore[no-any-return]


class SqueezeExcite(nn.Module):
    """Squeeze-and-excitation layer: multiplies each channel by a gain (Hu et al. 2018, arXiv:1709.01507).

    A small network computes the gains from the means of all channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width // 4)
        self.fc2 = nn.Linear(width // 4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply squeeze-and-excitation to a feature map (N, width, H, W). The shape does not change."""
        gain = F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        return x * gain.unsqueeze(-1).unsqueeze(-1)


class Branch(nn.Module):
    """Convolutions of an ESNet unit: pointwise, depthwise 3×3, squeeze-and-excitation, pointwise."""

    def __init__(self, inner: int, middle: int, outer: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.pw1 = ConvAct(inner, middle)
        self.dw = ConvAct(middle, middle, 3, stride, middle, "none")
        self.se = SqueezeExcite(middle if stride == 2 else 2 * middle)
        self.pw2 = ConvAct(middle if stride == 2 else 2 * middle, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the convolutions: (N, inner, H, W) to (N, outer, H / stride, W / stride)."""
        x = self.pw1(x)
        x = self.dw(x) if self.stride == 2 else torch.cat([x, self.dw(x)], dim=1)
        return self.pw2(self.se(x))  # type: ignore[no-any-return]


class Down(nn.Module):
    """First unit of a backbone stage: two branches with stride 2, whose outputs are combined."""

    def __init__(self, inner: int, middle: int, outer: int) -> None:
        super().__init__()
        self.dw = ConvAct(inner, inner, 3, 2, inner, "none")
        self.pw = ConvAct(inner, outer // 2)
        self.branch = Branch(inner, middle, outer // 2, 2)
        self.mix_dw = ConvAct(outer, outer, 3, 1, outer)
        self.mix_pw = ConvAct(outer, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Downsample a feature map (N, inner, H, W) to (N, outer, H / 2, W / 2)."""
        return self.mix_pw(self.mix_dw(torch.cat([self.pw(self.dw(x)), self.branch(x)], dim=1)))  # type: ignore[no-any-return]


class Unit(nn.Module):
    """Shuffle unit: half of the channels are convolved, then interleaved with the unchanged half (channel shuffle)."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.branch = Branch(width // 2, middle, width // 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve half of the channels of (N, width, H, W), and shuffle all channels. The shape does not change."""
        kept, x = x.chunk(2, dim=1)
        n, half, height, width = kept.shape
        pairs = torch.stack([kept, self.branch(x)], dim=2)
        if kept.is_contiguous(memory_format=torch.channels_last) or kept.stride(1) == 1:
            # Same values, in the memory format that the next convolution expects.
            return pairs.permute(0, 3, 4, 1, 2).reshape(n, height, width, 2 * half).permute(0, 3, 1, 2)
        return pairs.view(n, 2 * half, height, width)


class Csp(nn.Module):
    """Cross-stage partial (CSP) block of the detector's neck, which merges two feature maps.

    Half of the channels pass through a pointwise, a depthwise and another pointwise convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        half = _WIDTH // 2
        self.short = ConvAct(2 * _WIDTH, half)
        self.main = ConvAct(2 * _WIDTH, half)
        self.pw1 = ConvAct(half, half)
        self.dw = ConvAct(half, half, 5, 1, half)
        self.pw2 = ConvAct(half, half)
        self.final = ConvAct(_WIDTH, _WIDTH)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Merge two feature maps (N, 96, H, W) into one feature map of the same shape."""
        x = torch.cat([first, second], dim=1)
        return self.final(torch.cat([self.pw2(self.dw(self.pw1(self.main(x)))), self.short(x)], dim=1))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Detection head for one stride.

    Its output channels are the class logits, then the logits of the distances to the four sides of each box.
    """

    def __init__(self, outer: int) -> None:
        super().__init__()
        self.first, self.second = Separable(_WIDTH), Separable(_WIDTH)
        self.out = ConvAct(_WIDTH, outer, act="none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (N, channels, H, W) of a feature map (N, 96, H, W): classes first, then boxes."""
        return self.out(self.second(self.first(x)))  # type: ignore[no-any-return]


@dataclass(slots=True)
class Evidence:
    """Outputs of the detector for each of P grid cells. Cells are ordered by stride (8 first), row and column.

    Attributes:
        features: (N, P, 96) features of the neck.
        classes: (N, P, classes) class logits.
        sides: (N, P, boxes · 4 · BINS) logits of the distances from the cell's centre to the sides of its boxes.
        grid: (N, 96, H / 32, W / 32) feature map of the neck with stride 32.
    """

    features: torch.Tensor
    classes: torch.Tensor
    sides: torch.Tensor
    grid: torch.Tensor


class PicoDet(nn.Module):
    """The PP-PicoDet-S object detector.

    Args:
        n_classes: number of classes.
        n_boxes: number of boxes per grid cell: 1, or 2 if one class has a box prediction of its own.
    """

    def __init__(self, n_classes: int, n_boxes: int) -> None:
        super().__init__()
        self.n_classes = n_classes
        self.first = ConvAct(3, 24, 3, 2)
        stages, inner = [], 24
        for outer, middles in _STAGES:
            units = [Unit(outer, middle) for middle in middles[1:]]
            stages.append(nn.Sequential(Down(inner, middles[0], outer), *units))
            inner = outer
        self.stages = nn.ModuleList(stages)
        self.reduce = nn.ModuleList(ConvAct(outer, _WIDTH) for outer, _ in _STAGES)
        self.top_down = nn.ModuleList([Csp(), Csp()])  # strides 16 and 8
        self.down = nn.ModuleList([Separable(_WIDTH, 2), Separable(_WIDTH, 2)])
        self.bottom_up = nn.ModuleList([Csp(), Csp()])  # strides 16 and 32
        self.last_in, self.last_out = Separable(_WIDTH, 2), Separable(_WIDTH, 2)
        self.heads = nn.ModuleList(Head(n_classes + n_boxes * 4 * BINS) for _ in STRIDES)

    def maps(self, crops: torch.Tensor) -> list[torch.Tensor]:
        """Return the feature maps (N, 96, …) of the neck with strides 8, 16, 32 and 64."""
        x = F.max_pool2d(self.first(crops), 3, 2, padding=1)
        reduced = []
        for stage, reduce in zip(self.stages, self.reduce, strict=True):
            x = stage(x)
            reduced.append(reduce(x))
        fine, middle, coarse = reduced
        middle = self.top_down[0](F.interpolate(coarse, scale_factor=2.0, mode="nearest"), middle)
        fine = self.top_down[1](F.interpolate(middle, scale_factor=2.0, mode="nearest"), fine)
        middle = self.bottom_up[0](self.down[0](fine), middle)
        last = self.bottom_up[1](self.down[1](middle), coarse)
        return [fine, middle, last, self.last_in(coarse) + self.last_out(last)]

    def forward(self, crops: torch.Tensor) -> Evidence:
        """Return the detector's outputs for crops (N, 3, H, W) from -1 to 1. H and W are multiples of 32."""
        maps = self.maps(crops)
        out = torch.cat([_rows(head(x)) for head, x in zip(self.heads, maps, strict=True)], dim=1)
        features = torch.cat([_rows(x) for x in maps], dim=1)
        return Evidence(features, out[..., : self.n_classes], out[..., self.n_classes :], maps[2])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1).flatten(1, 2)

"""Convolutional stems for small vision towers: down to stride 32, their maps joined at stride 16.

Nearly all that a small tower sees must be learned by convolutions: they cost a CPU far less than attention does at the
same quality. Maps of stride 8 (small objects) and 32 (context) are mixed into the tokens of stride 16.

`CspStem` is the backbone of NanoDet-g (github.com/RangiLyu/nanodet): plain 3×3 convolutions in cross-stage partial
blocks (Wang et al. 2019, arXiv:1911.11929). `Lite0Stem` is EfficientNet-Lite0 (Tan & Le 2019, arXiv:1905.11946).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# (channels that enter, pairs of convolutions, stride) of each block of `CspStem`; twice as many channels leave.
_BLOCKS = ((32, 1, 1), (64, 2, 2), (128, 2, 2), (256, 3, 2))
# (output channels, blocks, stride of the first block, kernel, expansion) of each stage of `Lite0Stem` used here.
_STAGES = ((16, 1, 1, 3, 1), (24, 2, 2, 3, 6), (40, 2, 2, 5, 6), (80, 3, 2, 3, 6), (112, 3, 1, 5, 6), (192, 4, 2, 5, 6))
_STRIDE_8, _STRIDE_16, _STRIDE_32 = 2, 4, 5  # the stages that end at each stride


class Conv(nn.Module):
    """A 3×3 convolution, a norm, and LeakyReLU.

    The norm is an identity in a model that runs: training puts a BatchNorm there and folds it into `conv` afterwards.
    """

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, 3, stride, padding=1)
        self.norm: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, inner, H, W) to (N, outer, H / stride, W / stride)."""
        return F.leaky_relu(self.norm(self.conv(x)), 0.1, inplace=True)


class Pair(nn.Module):
    """Two convolutions of half the width, one after the other; both results are kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow = Conv(width, width // 2)
        self.again = Conv(width // 2, width // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, width, H, W) to the same shape."""
        x = self.narrow(x)
        return torch.cat([self.again(x), x], dim=1)


class CspBlock(nn.Module):
    """What enters is kept beside what a chain of pairs makes of it."""

    def __init__(self, width: int, pairs: int, stride: int) -> None:
        super().__init__()
        self.enter = Conv(width, width, stride)
        self.pairs = nn.Sequential(*(Pair(width) for _ in range(pairs)))
        self.leave = Conv(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, width, H, W) to (N, 2 · width, H / stride, W / stride)."""
        x = self.enter(x)
        return torch.cat([self.leave(self.pairs(x)), x], dim=1)


class CspStem(nn.Module):
    """Normalised crops (N, 3, H, W) to tokens (N, H·W / 256, dim), row by row."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = Conv(3, _BLOCKS[0][0], 2)
        self.blocks = nn.ModuleList(CspBlock(*shape) for shape in _BLOCKS)
        eighth, sixteenth, thirtysecond = (2 * width for width, _, _ in _BLOCKS[1:])
        self.fine = nn.Linear(4 * eighth, dim)
        self.middle = nn.Linear(sixteenth, dim)
        self.coarse = nn.Linear(thirtysecond, dim)

    def maps(self, crops: torch.Tensor) -> list[torch.Tensor]:
        """The maps of stride 4, 8, 16 and 32, of 64, 128, 256 and 512 channels."""
        x = F.max_pool2d(self.first(crops), 3, 2, padding=1)
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return maps

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """Run the convolutions and join their maps."""
        _, fine, middle, coarse = self.maps(crops)
        fine, middle, coarse = (x.permute(0, 2, 3, 1) for x in (F.pixel_unshuffle(fine, 2), middle, coarse))
        coarse = self.coarse(coarse).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return (self.fine(fine) + self.middle(middle) + coarse).flatten(1, 2)  # type: ignore[no-any-return]


class SameConv(nn.Module):
    """Convolution with TensorFlow's "same" padding (the extra pixel at the end), a norm, and ReLU6 or nothing."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> None:
        super().__init__()
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        self.pad = (before, after, before, after) if before != after else None
        padding = 0 if self.pad else before
        self.conv = nn.Conv2d(inner, outer, kernel, stride, padding, groups=groups)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, inner, H, W) to (N, outer, H / stride, W / stride)."""
        if self.pad:
            x = F.pad(x, self.pad)
        x = self.conv(x)
        return F.relu6(x, inplace=True) if self.act else x


class InvertedResidual(nn.Module):
    """Expand by a 1×1 convolution, filter each channel, project back; added to its input where shapes allow."""

    def __init__(self, inner: int, outer: int, stride: int, kernel: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        self.expand = SameConv(inner, wide, 1) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.project = SameConv(wide, outer, 1, act=False)
        self.residual = stride == 1 and inner == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, inner, H, W) to (N, outer, H / stride, W / stride)."""
        y = self.expand(x) if self.expand is not None else x
        y = self.project(self.depthwise(y))
        return x + y if self.residual else y  # type: ignore[no-any-return]


class Lite0Stem(nn.Module):
    """Normalised crops (N, 3, H, W) to tokens (N, H·W / 256, dim), row by row."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = SameConv(3, 32, 3, 2)
        stages, inner = [], 32
        for outer, blocks, stride, kernel, expansion in _STAGES:
            stage = [InvertedResidual(inner, outer, stride, kernel, expansion)]
            stage += [InvertedResidual(outer, outer, 1, kernel, expansion) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*stage))
            inner = outer
        self.stages = nn.ModuleList(stages)
        self.fine = nn.Linear(4 * _STAGES[_STRIDE_8][0], dim)
        self.middle = nn.Linear(_STAGES[_STRIDE_16][0], dim)
        self.coarse = nn.Linear(_STAGES[_STRIDE_32][0], dim)

    def forward(self, crops: torch.Tensor) -> torch.Tensor:
        """Run the convolutions and join their maps."""
        x = self.first(crops)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        fine = F.pixel_unshuffle(maps[_STRIDE_8], 2).permute(0, 2, 3, 1)
        middle = maps[_STRIDE_16].permute(0, 2, 3, 1)
        coarse = self.coarse(maps[_STRIDE_32].permute(0, 2, 3, 1))
        coarse = coarse.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return (self.fine(fine) + self.middle(middle) + coarse).flatten(1, 2)  # type: ignore[no-any-return]

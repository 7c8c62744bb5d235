"""A convolutional stem for small vision towers: EfficientNet-Lite0 down to stride 32, its maps joined at stride 16.

Nearly all that a small tower sees must be learned by convolutions: they cost a CPU far less than attention does at the
same quality. Maps of stride 8 (small objects) and 32 (context) are mixed into the tokens of stride 16.
Architecture: Tan & Le 2019, arXiv:1905.11946, in its "Lite" form: ReLU6, no squeeze-and-excitation.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# (output channels, blocks, stride of the first block, kernel, expansion) of each stage used here.
_STAGES = ((16, 1, 1, 3, 1), (24, 2, 2, 3, 6), (40, 2, 2, 5, 6), (80, 3, 2, 3, 6), (112, 3, 1, 5, 6), (192, 4, 2, 5, 6))
_STRIDE_8, _STRIDE_16, _STRIDE_32 = 2, 4, 5  # the stages that end at each stride


class Conv(nn.Module):
    """Convolution with TensorFlow's "same" padding (the extra pixel at the end), a norm, and ReLU6 or nothing.

    The norm is an identity in a model that runs: training puts a BatchNorm there and folds it into `conv` afterwards.
    """

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> None:
        super().__init__()
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        self.pad = (before, after, before, after) if before != after else None
        padding = 0 if self.pad else before
        self.conv = nn.Conv2d(inner, outer, kernel, stride, padding, groups=groups)
        self.norm: nn.Module = nn.Identity()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, inner, H, W) to (N, outer, H / stride, W / stride)."""
        if self.pad:
            x = F.pad(x, self.pad)
        x = self.norm(self.conv(x))
        return F.relu6(x, inplace=True) if self.act else x


class InvertedResidual(nn.Module):
    """Expand by a 1×1 convolution, filter each channel, project back; added to its input where shapes allow."""

    def __init__(self, inner: int, outer: int, stride: int, kernel: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        self.expand = Conv(inner, wide, 1) if expansion > 1 else None
        self.depthwise = Conv(wide, wide, kernel, stride, groups=wide)
        self.project = Conv(wide, outer, 1, act=False)
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
        self.first = Conv(3, 32, 3, 2)
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

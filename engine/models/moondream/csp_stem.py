"""The convolutional stem of small vision encoders: down to stride 32, its maps joined at stride 16.

Nearly all that a small encoder sees must be learned by convolutions: they cost a CPU far less than attention does at
the same quality. Maps of stride 8 (small objects) and 32 (context) are mixed into the tokens of stride 16.

`CspStem` is the backbone of NanoDet-g (github.com/RangiLyu/nanodet): plain 3×3 convolutions in cross-stage partial
blocks (Wang et al. 2019, arXiv:1911.11929).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# (channels that enter, pairs of convolutions, stride) of each block of `CspStem`; twice as many channels leave.
_BLOCKS = ((32, 1, 1), (64, 2, 2), (128, 2, 2), (256, 3, 2))


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
        # Each token takes the four values of `fine` at its place: a convolution reads them where they are.
        patches = self.fine.weight.unflatten(1, (-1, 2, 2))
        fine = F.conv2d(fine, patches, self.fine.bias, stride=2)
        fine, middle, coarse = (x.permute(0, 2, 3, 1) for x in (fine, middle, coarse))
        coarse = self.coarse(coarse).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        return (fine + self.middle(middle) + coarse).flatten(1, 2)  # type: ignore[no-any-return]

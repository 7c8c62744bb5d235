"""From a picture on the GPU to the vision tower's crops, byte for byte those of `image.make_crops`. Needs Triton."""

from __future__ import annotations

import torch

from saccade.engine.kernels.resize import resize
from saccade.engine.models.moondream.config import VisionConfig


def cut(picture: torch.Tensor, tiling: tuple[int, int], config: VisionConfig) -> torch.Tensor:
    """The global crop and, unless the tiling is 1×1, the tiles row by row: (n, size, size, 3) uint8.

    Args:
        picture: (height, width, 3) uint8 RGB on a CUDA device.
        tiling: (rows, columns), as `image.select_tiling` gives it.
        config: `crop_size`, `enc_patch_size` and `overlap_margin` are used.
    """
    size, margin = config.crop_size, config.overlap_margin * config.enc_patch_size
    whole = resize(picture, size, size)
    if tiling == (1, 1):
        return whole.unsqueeze(0)
    rows, columns = tiling
    window = size - 2 * margin
    large = resize(picture, rows * window + 2 * margin, columns * window + 2 * margin)
    tiles = large.unfold(0, size, window).unfold(1, size, window).permute(0, 1, 3, 4, 2).reshape(-1, size, size, 3)
    return torch.cat([whole.unsqueeze(0), tiles])

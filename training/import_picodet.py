"""Converts the published weights of the detector PP-PicoDet-S to initial weights for Saccade's model "nano".

    python -m training.import_picodet start-picodet-s.safetensors picodet.safetensors

The published weights come from PaddleDetection (github.com/PaddlePaddle/PaddleDetection, Apache License 2.0, see
NOTICE), trained on COCO. Batch norms are folded into the convolutions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from saccade.engine.models.model_files import find
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.nano.picodet import BINS, PicoDet

NANO = find("nano")
"""The folder of the model nano, with `config.json` and `tokenizer.json`."""

COCO = (  # noqa: SIM905 - as a list it is 80 lines
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,"
    "bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,skis,"
    "snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,"
    "fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,mouse,remote,keyboard,cell phone,microwave,oven,toaster,sink,"
    "refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush"
).split(",")
# The published graph's names, and ours.
_NAMES = (
    (r"^backbone\.stem\.", "first."),
    (r"^backbone\.stage(\d)\.0\.branch1\.", lambda m: f"stages.{int(m[1]) - 2}.0."),
    (r"^backbone\.stage(\d)\.0\.branch2\.", lambda m: f"stages.{int(m[1]) - 2}.0.branch."),
    (r"^backbone\.stage(\d)\.0\.mix\.", lambda m: f"stages.{int(m[1]) - 2}.0.mix_"),
    (r"^backbone\.stage(\d)\.(\d)\.", lambda m: f"stages.{int(m[1]) - 2}.{m[2]}.branch."),
    (r"^neck\.reduce\.p(\d)\.", lambda m: f"reduce.{int(m[1]) - 3}."),
    (r"^neck\.top_down\.p(\d)\.(block\.)?", lambda m: f"top_down.{4 - int(m[1])}."),
    (r"^neck\.down\.p(\d)\.", lambda m: f"down.{int(m[1]) - 4}."),
    (r"^neck\.bottom_up\.p(\d)\.(block\.)?", lambda m: f"bottom_up.{int(m[1]) - 4}."),
    (r"^neck\.p6_(in|out)\.", lambda m: f"last_{m[1]}."),
    (r"^head\.p(\d)\.0\.", lambda m: f"heads.{int(m[1]) - 3}.first."),
    (r"^head\.p(\d)\.1\.", lambda m: f"heads.{int(m[1]) - 3}.second."),
    (r"^head\.p(\d)\.out\.", lambda m: f"heads.{int(m[1]) - 3}.out."),
)
# What PicoDet takes from pixels of 0..1 and divides them by: red, green, blue.
_MEAN, _SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def convert(start: Mapping[str, torch.Tensor], classes: Sequence[str], n_boxes: int) -> dict[str, torch.Tensor]:
    """Convert the published weights of a COCO detector to a state dict of `PicoDet`.

    Args:
        start: the published weights by tensor name.
        classes: classes of the new detector. Classes that are not in COCO get the weights of "person".
        n_boxes: number of boxes per grid cell of the new detector.

    Raises:
        ValueError: if a tensor is missing, is unknown or has a wrong shape.
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in start.items():
        ours = name
        for pattern, new in _NAMES:
            ours, found = re.subn(pattern, new, ours)
            if found:
                break
        state[ours] = tensor.float().flatten(1) if ".se.fc" in name and tensor.ndim == 4 else tensor.float()
    rows = torch.tensor([COCO.index(name) if name in COCO else 0 for name in classes])
    rows = torch.cat([rows, *[torch.arange(80, 80 + 4 * BINS)] * n_boxes])
    for level in range(4):
        for part in ("weight", "bias"):
            state[f"heads.{level}.out.{part}"] = state[f"heads.{level}.out.{part}"][rows]
        state[f"heads.{level}.out.bias"][[i for i, name in enumerate(classes) if name not in COCO]] -= 2.0
    # Our crops are in -1..1. At the borders that differs a little: there the convolution pads with grey.
    weight = state["first.weight"]
    mean, spread = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _SPREAD))
    state["first.bias"] = state["first.bias"] + (weight * (0.5 - mean) / spread).sum((1, 2, 3))
    state["first.weight"] = weight * 0.5 / spread
    wanted = {name: tensor.shape for name, tensor in PicoDet(len(classes), n_boxes).state_dict().items()}
    if wrong := wanted.keys() ^ state.keys():
        name = min(wrong)
        problem = "is missing" if name in wanted else "is unexpected"
        raise ValueError(f"not a file of PP-PicoDet-S weights: tensor '{name}' {problem}")
    for name, shape in wanted.items():
        if state[name].shape != shape:
            raise ValueError(f"tensor '{name}' must have shape {list(shape)}; got {list(state[name].shape)}")
    return {name: tensor.contiguous() for name, tensor in state.items()}


def main() -> None:
    """Run the command line: convert the published weights, and keep the classes of the model's config.json."""
    parser = argparse.ArgumentParser(
        description="Convert the published weights of PP-PicoDet-S to weights of nano's detector."
    )
    parser.add_argument("start", type=Path, help="safetensors file with the published tensor names")
    parser.add_argument("out", type=Path, help="safetensors file to write")
    parser.add_argument(
        "--config", type=Path, default=NANO / "config.json", help="config.json with the classes to keep"
    )
    args = parser.parse_args()
    config = MoondreamConfig.from_file(args.config)
    assert config.classes is not None
    save_file(convert(load_file(args.start), config.classes, 2), args.out)


if __name__ == "__main__":
    main()

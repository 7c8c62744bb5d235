"""What the tests of training share: a small pack of synthetic images, and splits made of tensors."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from saccade.engine.models.moondream.config import MoondreamConfig, VisionConfig
from saccade.engine.models.nano.picodet import PicoDet
from tests.support.engine import NANO, label, noise, square, write_pack
from training.data import SIDE, SLOTS, Split

CLASSES = ("person", "face", "car", "bus", "cat", "dog", "backpack", "chair")
BOX = (0.3, 0.4, 0.6, 0.7)
SECOND = (0.7, 0.1, 0.9, 0.3)


def small_pack(folder: Path) -> Path:
    """Three images to train on, one for val."""
    return write_pack(
        folder,
        CLASSES,
        [
            (square(240, 320, BOX), label(1, "train", boxes={"cat": [[*BOX, 0.9, "2"]]}, unknown=["dog"])),
            (
                square(300, 200, SECOND),
                label(
                    2,
                    "train",
                    boxes={"car": [[*SECOND, 1.0, "gt"]], "bus": [[*BOX, 1, "gt"]]},
                    maybe={"car": [[*BOX, 0.3]]},
                ),
            ),
            (noise(416, 416), label(3, "train")),
            (square(240, 320, BOX), label(4, "val", boxes={"person": [[*BOX, 0.9, "gt"], [*SECOND, 0.8, "1"]]})),
        ],
    )


def one_square(box: tuple[float, float, float, float], width: int = 320, height: int = 240) -> Split:
    """A split of one dark image with one bright box, straight as tensors."""
    images = torch.full((1, 3, SIDE, SIDE), 114, dtype=torch.uint8)
    images[0, :, :height, :width] = torch.from_numpy(square(height, width, box)).permute(2, 0, 1)
    boxes, labels = torch.zeros(1, SLOTS, 4), torch.full((1, SLOTS), -1)
    boxes[0, 0], labels[0, 0] = torch.tensor(box), 4
    return Split(
        CLASSES,
        images,
        torch.tensor([[width / SIDE, height / SIDE]]),
        boxes,
        labels,
        labels >= 0,
        torch.zeros(1, len(CLASSES), dtype=torch.bool),
    )


def small_config() -> MoondreamConfig:
    """The shape of nano for the classes of the small pack, with a view of 128 pixels and few tokens."""
    nano = MoondreamConfig.from_file(NANO / "config.json")
    vision = VisionConfig(
        enc_dim=192, enc_n_layers=0, enc_n_heads=1, enc_patch_size=16, proj_out_dim=192, crop_size=128, max_crops=1,
        overlap_margin=0, stem="picodet", n_places=32, coarse=2, n_classes=len(CLASSES), part_class=1,
    )  # fmt: skip
    text = dataclasses.replace(nano.text, n_layers=3, prefix_attn=37)
    return dataclasses.replace(nano, text=text, vision=vision, classes=CLASSES)


def write_shape(folder: Path, config: MoondreamConfig) -> Path:
    """A folder with a config.json and the tokenizer of nano; the path of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)), encoding="utf-8")
    shutil.copyfile(NANO / "tokenizer.json", folder / "tokenizer.json")
    return folder / "config.json"


_PUBLISHED = (
    (r"^first\.", r"backbone.stem."),
    (r"^stages\.(\d)\.0\.(dw|pw)\.", lambda m: f"backbone.stage{int(m[1]) + 2}.0.branch1.{m[2]}."),
    (r"^stages\.(\d)\.0\.branch\.", lambda m: f"backbone.stage{int(m[1]) + 2}.0.branch2."),
    (r"^stages\.(\d)\.0\.mix_", lambda m: f"backbone.stage{int(m[1]) + 2}.0.mix."),
    (r"^stages\.(\d)\.(\d)\.branch\.", lambda m: f"backbone.stage{int(m[1]) + 2}.{m[2]}."),
    (r"^reduce\.(\d)\.", lambda m: f"neck.reduce.p{int(m[1]) + 3}."),
    (r"^top_down\.(\d)\.(pw|dw)", lambda m: f"neck.top_down.p{4 - int(m[1])}.block.{m[2]}"),
    (r"^top_down\.(\d)\.", lambda m: f"neck.top_down.p{4 - int(m[1])}."),
    (r"^down\.(\d)\.", lambda m: f"neck.down.p{int(m[1]) + 4}."),
    (r"^bottom_up\.(\d)\.(pw|dw)", lambda m: f"neck.bottom_up.p{int(m[1]) + 4}.block.{m[2]}"),
    (r"^bottom_up\.(\d)\.", lambda m: f"neck.bottom_up.p{int(m[1]) + 4}."),
    (r"^last_(in|out)\.", r"neck.p6_\1."),
    (r"^heads\.(\d)\.(first|second)\.", lambda m: f"head.p{int(m[1]) + 3}.{('first', 'second').index(m[2])}."),
    (r"^heads\.(\d)\.out\.", lambda m: f"head.p{int(m[1]) + 3}.out."),
)


def random_start() -> dict[str, torch.Tensor]:
    """Random weights of the whole published detector, under its graph's names."""
    torch.manual_seed(0)
    state = {}
    for name, tensor in PicoDet(80, 1).state_dict().items():
        for pattern, new in _PUBLISHED:
            published, found = re.subn(pattern, new, name)
            if found:
                state[published] = tensor[..., None, None] if ".se." in name and tensor.ndim == 2 else tensor
                break
    for level in range(4):
        state[f"head.p{level + 3}.out.bias"][:80] = -3.0
    return state


def write_start(path: Path) -> Path:
    """A safetensors file of `random_start`."""
    save_file(random_start(), path)
    return path

"""An architecture that is not Moondream, in one file: embedding, one attention block, averaged patches, linear heads.

It shares no module with Moondream: positions are learned and added, the block is sequential, prefix and prompts are of
other lengths, and an image is one crop whatever its size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.protocol import Cache, ImageCrops, LoadedModel, ModelLimits, PathTokens, Ref, Tiling
from saccade.engine.models.registry import register_architecture

EOS, BOS, FIRST = 0, 1, 10
_SKILLS = {"detect": [2], "point": [3], "query": [4, 5], "count": [6, 2]}
_PATCHES = 3  # a side


@dataclass(frozen=True)
class ToyConfig:
    """What config.json holds besides the model type."""

    dim: int = 24
    heads: int = 3
    vocab: int = 140
    context: int = 80
    crop: int = 12


class ToyVision(nn.Module):
    """The mean colour of each patch, projected."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.crop_size, self.crop_margin, self.max_crops = config.crop, 0, 1
        self.n_tokens, self.feature_dim = _PATCHES**2, 3
        self.out = nn.Linear(3, config.dim)

    def tiling_of(self, height: int, width: int) -> Tiling:
        return 1, 1

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        rows, columns = (np.arange(self.crop_size) * side // self.crop_size for side in image.shape[:2])
        return ImageCrops(image[rows][:, columns][None], (1, 1))

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        return crops.to(self.out.weight.dtype).permute(0, 3, 1, 2) / 255 - 0.5

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(crops, self.crop_size // _PATCHES).flatten(2).transpose(1, 2)

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        return self.out(whole)

    def join(self, features: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        return self.project(features[0], features[0])


class ToyText(nn.Module):
    """Attention, then an MLP, each on a normalized input and added to it."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.heads
        self.tokens, self.places = nn.Embedding(config.vocab, dim), nn.Embedding(config.context, dim)
        self.norm, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, config.vocab)

    @property
    def n_block_weights(self) -> int:
        return sum(one.weight.numel() for one in (self.q, self.k, self.v, self.o, self.up, self.down))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.places(positions)
        normed = self.norm(x)
        (layer,) = cache.layers(positions)
        layer.write(self._split(self.k(normed)), self._split(self.v(normed)))
        keys, values = layer.read()
        if mask is None:
            mask = (cache.key_positions <= positions.unsqueeze(-1)).unsqueeze(1)
        seen = F.scaled_dot_product_attention(self._split(self.q(normed)).transpose(1, 2), keys, values, attn_mask=mask)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm_mlp(x))))

    def write_kv(self, x: torch.Tensor, cache: Cache) -> None:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        normed = self.norm(x + self.places(positions))
        (layer,) = cache.layers(positions)
        layer.write(self._split(self.k(normed)), self._split(self.v(normed)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1))


class ToyRegion(nn.Module):
    """Coordinates in 50 bins and sizes in 20, each encoded by one matrix."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.from_coord, self.from_size = nn.Linear(1, config.dim), nn.Linear(2, config.dim)
        self.to_coord, self.to_size = nn.Linear(config.dim, 50), nn.Linear(config.dim, 2 * 20)

    def encode_coord(self, value: torch.Tensor) -> torch.Tensor:
        return self.from_coord(value.to(self.from_coord.weight.dtype))

    def encode_size(self, value: torch.Tensor) -> torch.Tensor:
        return self.from_size(value.to(self.from_size.weight.dtype))

    def coord(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.to_coord(hidden).argmax(-1, keepdim=True).float() / 50

    def size(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.to_size(hidden).unflatten(-1, (2, 20)).argmax(-1).float() + 1) / 20


class Toy(nn.Module):
    """The whole model."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.vision, self.text, self.region = ToyVision(config), ToyText(config), ToyRegion(config)
        self.coord_eos = nn.Linear(config.dim, 2)
        self.limits = ModelLimits(
            prefix_length=1 + _PATCHES**2,
            max_context=config.context,
            vocab_size=config.vocab,
            dim=config.dim,
            n_layers=1,
            n_kv_heads=config.heads,
            head_dim=config.dim // config.heads,
            bos_id=BOS,
        )

    @property
    def device(self) -> torch.device:
        return self.coord_eos.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.coord_eos.weight.dtype

    def coord_eos_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.coord_eos(hidden).float()

    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class ToyPrompts:
    """A character is a token; each skill has tokens of its own in front of the words."""

    eos_id = EOS

    def can(self, skill: str) -> bool:
        return skill in _SKILLS

    def objects(self, skill: str, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        return self.wrap(skill, label)

    reasoning = None

    def query(self, question: str, refs: Sequence[Ref] = (), reasoning: bool = False) -> list[int]:
        return self.wrap("query", question)

    def ref_values(self, skill: str, refs: Sequence[Ref]) -> dict[int, tuple[float, ...]]:
        raise NotImplementedError

    def segment(self, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        raise NotImplementedError

    @property
    def path_tokens(self) -> PathTokens:
        raise NotImplementedError

    def gaze(self, eye: tuple[float, float]) -> tuple[list[int], dict[int, tuple[float, ...]]]:
        raise NotImplementedError

    def caption(self, length: str) -> list[int]:
        raise NotImplementedError

    def ids(self, words: str) -> list[int]:
        return [FIRST + ord(character) for character in words]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in ids)

    def wrap(self, skill: str, words: str) -> list[int]:
        return [*_SKILLS[skill], *self.ids(words)]


def load_toy(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The loader that the registry calls."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Toy(ToyConfig(**values["sizes"])).eval().requires_grad_(False).to(device, dtype)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return LoadedModel(model, ToyPrompts(), None, {})


def write_toy(folder: Path, seed: int = 0) -> Path:
    """Leave a model with random weights in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = Toy(ToyConfig()).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    for norm in (model.text.norm, model.text.norm_mlp):
        norm.weight += 1
    values = {"model_type": "toy", "sizes": asdict(ToyConfig())}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


register_architecture("toy", load_toy)

"""Interfaces between the engine and a model of any architecture; types only.

An architecture is a class that loads a folder into a `LoadedModel` and is registered by name in `registry`. Backends
for a known architecture may run it faster. The engine itself uses only these interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Phase(IntEnum):
    """Kind of value that a step samples from its last hidden state."""

    X_OR_EOS = 0  # start another object at x, or end
    Y = 1
    SIZE = 2
    TOKEN = 3  # a text token; the grammar may restrict it
    LATER_TOKEN = 4  # a token of free text after the first; suppressed token IDs are never sampled
    REASONING = 5  # a text token, or a coordinate after the coordinate token; see `TokenRule`


TEXT_PHASES = frozenset({Phase.TOKEN, Phase.LATER_TOKEN, Phase.REASONING})


Tiling = tuple[int, int]
"""Number of tiles (rows, columns) of an image."""


def crop_count(tiling: Tiling) -> int:
    """Return the number of crops to encode: the global crop and the tiles. A single tile equals the global crop."""
    return 1 if tiling == (1, 1) else 1 + tiling[0] * tiling[1]


Ref = tuple[float, float] | tuple[float, float, float, float]
"""Part of an image that a question refers to: a point (x, y) or box (x1, y1, x2, y2), as fractions."""


@dataclass(slots=True, frozen=True)
class ReasoningTokens:
    """Special tokens for reasoning.

    Attributes:
        answer: token that ends the reasoning.
        suffix: tokens fed between the reasoning and the answer; the first is `answer`.
        forbidden: tokens that are never sampled while reasoning, except as its first token.
        coord: token that precedes a coordinate.
        grounds: tokens that start a piece of text with coordinates.
        end: token that ends the answer before it has begun, unless it is `forbidden`; -1 for none.
    """

    answer: int
    suffix: tuple[int, ...]
    forbidden: tuple[int, ...]
    coord: int
    grounds: frozenset[int]
    end: int = -1


@dataclass(slots=True, frozen=True)
class PathTokens:
    """Tokens of the outline language; see `tasks.segment`.

    Attributes:
        eos: token that ends a path.
        commands: command letter by token ID.
        minus: token IDs of the minus sign.
        numbers: integers from 0 to 960 by token ID.
        decode: returns the text of any other token ID.
        sets: allowed token IDs at the start of a path, where no number is due, where a number is due, and after a minus
            sign.
    """

    eos: int
    commands: Mapping[int, str]
    minus: frozenset[int]
    numbers: Mapping[int, int]
    decode: Callable[[int], str]
    sets: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        first = tuple(token for token, letter in self.commands.items() if letter == "M")
        number = (*self.minus, *self.numbers)
        object.__setattr__(self, "sets", (first, (self.eos, *self.commands), number, tuple(self.numbers)))

    def symbol(self, token: int) -> str | int | None:
        """Return a command letter, '-', an integer, or None for any other token."""
        found = self.commands.get(token, self.numbers.get(token, "-" if token in self.minus else None))
        if found is None:
            text = self.decode(token).strip()
            return int(text) if text.isascii() and text.isdigit() else None
        return found


@dataclass(slots=True, frozen=True)
class ModelLimits:
    """Sizes that the scheduler needs.

    Attributes:
        prefix_length: positions of an image prefix, including BOS.
        max_context: maximum positions of a sequence, including the prefix.
        vocab_size: number of token IDs.
        dim: width of embeddings and hidden states.
        n_layers, n_kv_heads, head_dim: shape of the keys and of the values of one position.
        bos_id: token before the image tokens.
        suppressed_ids: tokens that are never sampled in free text after its first token.
        coord_id: token that precedes a coordinate in reasoning, or -1.
        repeat_iou: a box that overlaps an earlier box of its answer by more than this IoU is dropped; None keeps all
            boxes.
    """

    prefix_length: int
    max_context: int
    vocab_size: int
    dim: int
    n_layers: int
    n_kv_heads: int
    head_dim: int
    bos_id: int
    suppressed_ids: tuple[int, ...] = ()
    coord_id: int = -1
    repeat_iou: float | None = None


@dataclass(slots=True, frozen=True, eq=False, weakref_slot=True)
class Adapter:
    """A LoRA adapter of the text decoder (Hu et al. 2021, arXiv:2106.09685); compared by identity.

    Attributes:
        name: shown in messages.
        weights: matrices A (rank, in) and scaled B (out, rank) by layer and module, such as (3, 'attn.qkv'). Experts
            have (experts, rank, in) and (experts, out, rank).
    """

    name: str
    weights: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True, frozen=True)
class ImageCrops:
    """Input of the vision encoder: (n, rows, columns, 3) uint8 crops and the image's tiling."""

    pixels: NDArray[np.uint8]
    tiling: Tiling


class Prompts(Protocol):
    """Converts tasks to prompt token IDs, and token IDs of answers to text."""

    @property
    def eos_id(self) -> int:
        """Token that ends an answer."""
        ...

    def can(self, skill: str) -> bool:
        """Return whether the model supports a skill: 'detect', 'point', 'query', 'caption' or another task's skill."""
        ...

    def objects(self, skill: str, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Return the prompt for all objects with a label, restricted to the parts of the image in `refs`, if any.

        Raises:
            PromptError: if the model does not support references.
        """
        ...

    def query(self, question: str, refs: Sequence[Ref] = (), reasoning: bool = False) -> list[int]:
        """Return the prompt for a question about parts of an image, with reasoning or without."""
        ...

    def ref_values(self, skill: str, refs: Sequence[Ref]) -> dict[int, tuple[float, ...]]:
        """Return values in 0..1 that replace prompt embeddings, by position: (coordinate,) or (width, height)."""
        ...

    @property
    def reasoning(self) -> ReasoningTokens | None:
        """Special tokens for reasoning, or None if the model does not support it."""
        ...

    def segment(self, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Return the prompt for the outline of an object."""
        ...

    @property
    def path_tokens(self) -> PathTokens:
        """Tokens of the outline language."""
        ...

    def gaze(self, eye: tuple[float, float]) -> tuple[list[int], dict[int, tuple[float, ...]]]:
        """Return the prompt for the gaze of a person with an eye at (x, y), and values that replace embeddings."""
        ...

    def caption(self, length: str) -> list[int]:
        """Return the prompt for a caption of a length."""
        ...

    def ids(self, words: str) -> list[int]:
        """Return the token IDs of a text without a template."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's token IDs."""
        ...

    def wrap(self, skill: str, words: str) -> list[int]:
        """Return a skill's template around a text."""
        ...


class CacheLayer(Protocol):
    """One layer of a KV cache with the position of its next entries."""

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new keys and values (rows, length, heads, head_dim)."""
        ...

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values, each (rows, heads, keys, head_dim)."""
        ...


class Cache(Protocol):
    """KV cache of several sequences in any storage format."""

    @property
    def key_positions(self) -> torch.Tensor:
        """Sequence position of each key that `CacheLayer.read` returns."""
        ...

    def layers(self, positions: torch.Tensor) -> Sequence[CacheLayer]:
        """Return one `CacheLayer` per layer for writing at (rows, length) int64 positions."""
        ...


class TextDecoder(Protocol):
    """Token embeddings, decoder blocks and output head."""

    @property
    def n_block_weights(self) -> int:
        """Number of block weights that are multiplied for each token."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of token IDs (...)."""
        ...

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return hidden states (rows, length, dim) of embeddings at (rows, length) positions; cache keys and values.

        The mask is boolean (True for visible keys) or additive. The default is a causal mask after the prefix.
        """
        ...

    def write_kv(self, x: torch.Tensor, cache: Cache) -> None:
        """Cache image prefixes (rows, length, dim) that start at position 0 and use bidirectional attention."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits (..., vocab_size) for hidden states (..., dim)."""
        ...


class VisionEncoder(Protocol):
    """Converts an image to tokens of the text decoder's width."""

    @property
    def crop_size(self) -> int:
        """Side of a crop in pixels."""
        ...

    @property
    def crop_margin(self) -> int:
        """Overlap of tiles on each side, in pixels."""
        ...

    @property
    def max_crops(self) -> int:
        """Maximum number of tiles per image."""
        ...

    @property
    def n_tokens(self) -> int:
        """Number of tokens per image, for any number of crops; also the number of features per crop."""
        ...

    @property
    def feature_dim(self) -> int:
        """Width of a crop's features."""
        ...

    def tiling_of(self, height: int, width: int) -> Tiling:
        """Return the tiling of an image of this size."""
        ...

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        """Split an image (height, width, 3) uint8 RGB into a global crop and tiles; 1×1 has the global crop only."""
        ...

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        """Return the input of `features` for (n, size, size, 3) uint8 crops."""
        ...

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Return features (n, n_tokens, feature_dim) of normalized crops."""
        ...

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Return image tokens (..., n_tokens, dim) of global and local features, each (..., n_tokens, feature_dim)."""
        ...

    def join(self, features: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Return image tokens (n_tokens, dim) of one image from the features of its global crop and tiles."""
        ...


@runtime_checkable
class DraftingEncoder(Protocol):
    """A vision encoder that also predicts answers, which the engine uses as draft tokens."""

    @property
    def asked(self) -> Mapping[tuple[int, ...], int]:
        """Class of each prompt."""
        ...

    @property
    def n_drafts(self) -> int:
        """Number of objects per crop in the drafts."""
        ...

    def features_and_drafts(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features of crops and the detections that draft the answers about them.

        Returns:
            Features, and detections (n, n_drafts, 5) float32: class (-1 for none), x, y, width and height as fed to the
            decoder; detections of a class are in the order of its answer.
        """
        ...


@runtime_checkable
class DeepEncoder(Protocol):
    """A vision encoder that also returns the features of an inner block."""

    def two_depths(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features of a block (counted from 0) and of the whole encoder for normalized crops."""
        ...


class Refiner(Protocol):
    """Refines the mask of an outline with the features of a crop around it.

    Attributes:
        early_block: index of the encoder block whose features it reads in addition to the last ones.
    """

    early_block: int

    def __call__(self, early: torch.Tensor, last: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the probability (crop size, crop size) float32 that each pixel belongs to the object.

        Args:
            early: features of the early block, from `DeepEncoder.two_depths` for one crop.
            last: features of the whole encoder for the same crop.
            mask: (crop size, crop size) float32, 0 or 1: the area inside the outline.
        """
        ...


@runtime_checkable
class SizedEncoder(Protocol):
    """A vision encoder whose crop size can be changed."""

    def set_crop_size(self, size: int) -> None:
        """Set the side of crops in pixels from now on.

        Raises:
            ValueError: if it is not a multiple of 32 from 128 to 1280.
        """
        ...


class RegionHeads(Protocol):
    """Encoders and decoders between coordinates or sizes and the text decoder's hidden states."""

    def encode_coord(self, value: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of coordinates (..., 1) in 0..1."""
        ...

    def encode_size(self, value: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of (width, height) pairs (..., 2) in 0..1."""
        ...

    def coord(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely coordinate (..., 1) float32 for hidden states (..., dim)."""
        ...

    def size(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely width and height (..., 2) float32 for hidden states (..., dim)."""
        ...


@runtime_checkable
class ReadableHeads(Protocol):
    """Region heads with several possible interpretations of their input; only trained weights show the correct one."""

    @property
    def readings(self) -> tuple[str, ...]:
        """Names of the interpretations; the first one is in use."""
        ...

    def read_as(self, name: str) -> None:
        """Switch to another interpretation of `readings`."""
        ...


class Model(Protocol):
    """Vision encoder, text decoder and region heads of one architecture, with weights."""

    @property
    def limits(self) -> ModelLimits:
        """Sizes that the scheduler needs."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of the weights."""
        ...

    @property
    def vision(self) -> VisionEncoder:
        """Vision encoder."""
        ...

    @property
    def text(self) -> TextDecoder:
        """Text decoder."""
        ...

    @property
    def region(self) -> RegionHeads:
        """Region heads."""
        ...

    def coord_eos_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits (..., 2) of the coordinate and end tokens for hidden states (..., dim)."""
        ...

    def n_parameters(self) -> int:
        """Return the number of weights."""
        ...


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model loaded from a folder.

    Attributes:
        model: the model with its weights.
        prompts: prompt templates and tokenizer.
        classes: the only labels that the model detects, or None for an open vocabulary.
        synonyms: phrases that stand for one or more classes.
        family: one line that names the published model and the format of its file, or "".
        load_refiner: reads a refiner file for the model, or None if the architecture has no refiner.
    """

    model: Model
    prompts: Prompts
    classes: tuple[str, ...] | None
    synonyms: dict[str, list[str]]
    family: str = ""
    load_refiner: Callable[[Path], Refiner] | None = None

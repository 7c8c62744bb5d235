"""What the engine needs of a model, whatever its architecture. Types only: knows no weights, no steps, and no torch.

An architecture is a class that loads a folder into a `LoadedModel`, registered by name in `registry`. Backends that
know an architecture may run it in a faster form; the engine itself uses nothing beyond what stands here.
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
    """What one step samples from the hidden state it ends with."""

    X_OR_EOS = 0  # one more object or stop, and its x
    Y = 1
    SIZE = 2
    TOKEN = 3  # of text, any that a grammar allows
    LATER_TOKEN = 4  # of free text after its first: ids that the model suppresses there are never sampled
    REASONING = 5  # a word, or a coordinate where the coordinate token is sampled; a `TokenRule` says more


TEXT_PHASES = frozenset({Phase.TOKEN, Phase.LATER_TOKEN, Phase.REASONING})


Tiling = tuple[int, int]
"""Tiles (rows, columns) of an image."""


def crop_count(tiling: Tiling) -> int:
    """How many crops the encoder has to see: the global one and the tiles; a single tile equals the global crop."""
    return 1 if tiling == (1, 1) else 1 + tiling[0] * tiling[1]


Ref = tuple[float, float] | tuple[float, float, float, float]
"""A part of an image that a question is about: a point (x, y) or a box (x1, y1, x2, y2), as fractions."""


@dataclass(slots=True, frozen=True)
class ReasoningTokens:
    """Tokens by which a model reasons.

    Attributes:
        answer: ends the reasoning.
        suffix: is fed between the reasoning and the answer; begins with `answer`.
        forbidden: are never sampled while reasoning, its first token excepted.
        coord: brings a coordinate.
        grounds: begin a piece of text that coordinates belong to.
        end: ends the answer before it has begun, where it is not `forbidden`; -1 for none.
    """

    answer: int
    suffix: tuple[int, ...]
    forbidden: tuple[int, ...]
    coord: int
    grounds: frozenset[int]
    end: int = -1


@dataclass(slots=True, frozen=True)
class PathTokens:
    """The tokens that spell outlines, see `tasks.segment`.

    Attributes:
        eos: ends a path.
        commands: letters by their ids.
        minus: ids of the minus sign.
        numbers: integers from 0 to 960 by their ids.
        decode: text of one id, for those that are none of these.
        sets: ids that may begin a path; that may follow where no number is due; where one is due; and behind a minus.
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
        """A command letter, '-', an integer, or None for anything else."""
        found = self.commands.get(token, self.numbers.get(token, "-" if token in self.minus else None))
        if found is None:
            text = self.decode(token).strip()
            return int(text) if text.isascii() and text.isdigit() else None
        return found


@dataclass(slots=True, frozen=True)
class ModelLimits:
    """Sizes that the engine plans with.

    Attributes:
        prefix_length: positions of an image's prefix, bos included.
        max_context: positions of a sequence, prefix included.
        vocab_size: token ids are below this.
        dim: width of an embedding and of a hidden state.
        n_layers, n_kv_heads, head_dim: shape of the keys and of the values of one position.
        bos_id: the token in front of an image's tokens.
        suppressed_ids: tokens that are never sampled in free text after its first token.
        coord_id: the token that brings a coordinate in a reasoning; -1 if there is none.
        repeat_iou: a box that overlaps an earlier one of its answer by more than this is dropped; None keeps all.
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
    """Low-rank additions to the text decoder (LoRA, Hu et al. 2021, arXiv:2106.09685); compared by identity.

    Attributes:
        name: shown in messages.
        weights: by layer and part (3, 'attn.qkv'), A (rank, in) and B (out, rank), which is scaled already; of experts
            (experts, rank, in) and (experts, out, rank).
    """

    name: str
    weights: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True, frozen=True)
class ImageCrops:
    """An image as a vision encoder takes it: (n, rows, columns, 3) uint8 crops, and the tiling they were cut in."""

    pixels: NDArray[np.uint8]
    tiling: Tiling


class Prompts(Protocol):
    """From a task to the token ids a model is prompted with, and from the ids of an answer to text."""

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""
        ...

    def can(self, skill: str) -> bool:
        """Whether the model has learned a skill: 'detect', 'point', 'query', 'caption' or another task's."""
        ...

    def objects(self, skill: str, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Ids that ask for all objects of a name, among parts of an image if there are `refs`.

        Raises:
            PromptError: if the model takes no references.
        """
        ...

    def query(self, question: str, refs: Sequence[Ref] = (), reasoning: bool = False) -> list[int]:
        """Ids that ask a question about parts of an image, to be reasoned about or answered at once."""
        ...

    def ref_values(self, skill: str, refs: Sequence[Ref]) -> dict[int, tuple[float, ...]]:
        """What stands in a skill's prompt in place of tokens, by places: (coordinate,) or (width, height), in 0..1."""
        ...

    @property
    def reasoning(self) -> ReasoningTokens | None:
        """The tokens by which the model reasons; None if it has not learned it."""
        ...

    def segment(self, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Ids that ask for the outline of an object."""
        ...

    @property
    def path_tokens(self) -> PathTokens:
        """The tokens that spell outlines."""
        ...

    def gaze(self, eye: tuple[float, float]) -> tuple[list[int], dict[int, tuple[float, ...]]]:
        """Ids that ask where the person with an eye at (x, y) looks, and what stands in place of some."""
        ...

    def caption(self, length: str) -> list[int]:
        """Ids that ask for a description of some length."""
        ...

    def ids(self, words: str) -> list[int]:
        """Ids of words as they are."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        ...

    def wrap(self, skill: str, words: str) -> list[int]:
        """Ids of a skill's template around words as they are."""
        ...


class CacheLayer(Protocol):
    """One layer of a cache, and where its next entries go."""

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put in new keys and values (rows, length, heads, head_dim)."""
        ...

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, each (rows, heads, keys, head_dim)."""
        ...


class Cache(Protocol):
    """Keys and values of some sequences, however they are stored."""

    @property
    def key_positions(self) -> torch.Tensor:
        """(keys,) int64: the position in its sequence of each key that `CacheLayer.read` gives."""
        ...

    def layers(self, positions: torch.Tensor) -> Sequence[CacheLayer]:
        """The layers, ready to write at (rows, length) int64 positions."""
        ...


class TextDecoder(Protocol):
    """Token embeddings, the decoder's blocks, and the output head."""

    @property
    def n_block_weights(self) -> int:
        """Weights that each token is multiplied with."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., dim) of token ids (...)."""
        ...

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states (rows, length, dim) of embeddings at (rows, length) positions, kept in the cache as well.

        The mask is True, or 0 to be added, where a key is seen; by default a causal one behind the prefix.
        """
        ...

    def write_kv(self, x: torch.Tensor, cache: Cache) -> None:
        """Keep prefixes (rows, length, dim) that begin at position 0 and attend in both directions."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., vocab_size) of the next token from hidden states (..., dim)."""
        ...


class VisionEncoder(Protocol):
    """From an image to its tokens, in the width of the text decoder."""

    @property
    def crop_size(self) -> int:
        """Side of a crop in pixels."""
        ...

    @property
    def crop_margin(self) -> int:
        """Pixels by which tiles overlap at each side."""
        ...

    @property
    def max_crops(self) -> int:
        """Most tiles of an image."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens of an image, however many crops it was cut into; also tokens of a crop's features."""
        ...

    @property
    def feature_dim(self) -> int:
        """Width of a crop's features."""
        ...

    def tiling_of(self, height: int, width: int) -> Tiling:
        """Tiles of an image."""
        ...

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        """Cut an image (height, width, 3) uint8 RGB into a global crop and its tiles; with 1×1 the global one only."""
        ...

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        """What `features` takes, from (n, size, size, 3) uint8 crops."""
        ...

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Features (n, n_tokens, feature_dim) of normalized crops."""
        ...

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Image tokens (..., n_tokens, dim) from global and local features, each (..., n_tokens, feature_dim)."""
        ...

    def join(self, features: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Image tokens (n_tokens, dim) of one image from the features of its global crop and its tiles."""
        ...


@runtime_checkable
class DraftingEncoder(Protocol):
    """A vision encoder that has seen most of an answer before the text decoder writes it."""

    @property
    def asked(self) -> Mapping[tuple[int, ...], int]:
        """The class that each prompt asks for."""
        ...

    @property
    def n_drafts(self) -> int:
        """Objects of a crop that `features_and_drafts` gives."""
        ...

    def features_and_drafts(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `VisionEncoder.features` gives, and what answers about each crop are likely to say.

        Returns:
            Features, and (n, n_drafts, 5) float32: each object's class, -1 for none, x, y, width and height as they are
            fed, those of a class in the order of its answer.
        """
        ...


@runtime_checkable
class DeepEncoder(Protocol):
    """A vision encoder that also gives the features of a block on its way."""

    def two_depths(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a block, counted from 0, gives of normalized crops, and what `VisionEncoder.features` does."""
        ...


class Refiner(Protocol):
    """Redraws the mask of an outline from the features of a crop around it.

    Attributes:
        early_block: the encoder's block whose features it reads besides the last ones.
    """

    early_block: int

    def __call__(self, early: torch.Tensor, last: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Probabilities (crop size, crop size) float32 of the object's pixels.

        Args:
            early: what `DeepEncoder.two_depths` gives of one crop,
            last: both.
            mask: (crop size, crop size) float32, 0 or 1: what the outline encloses.
        """
        ...


@runtime_checkable
class SizedEncoder(Protocol):
    """A vision encoder that can be shown its crop at another size than it was trained with."""

    def set_crop_size(self, size: int) -> None:
        """Take crops of so many pixels a side from now on: a multiple of 32 from 128 to 1280, else ValueError."""
        ...


class RegionHeads(Protocol):
    """Coordinates and sizes, to and from the text decoder's width."""

    def encode_coord(self, value: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., dim) of coordinates (..., 1) in 0..1."""
        ...

    def encode_size(self, value: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., dim) of (width, height) pairs (..., 2) in 0..1."""
        ...

    def coord(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely coordinate (..., 1) float32, from hidden states (..., dim)."""
        ...

    def size(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely width and height (..., 2) float32, from hidden states (..., dim)."""
        ...


@runtime_checkable
class ReadableHeads(Protocol):
    """Region heads of which it is not certain what they are to be given: only published weights can tell."""

    @property
    def readings(self) -> tuple[str, ...]:
        """What they can be given, by name; the first is what they are given."""
        ...

    def read_as(self, name: str) -> None:
        """Give them another of `readings` from here on."""
        ...


class Model(Protocol):
    """Vision encoder, text decoder and region heads of one architecture, with their weights."""

    @property
    def limits(self) -> ModelLimits:
        """Its sizes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of its weights."""
        ...

    @property
    def vision(self) -> VisionEncoder:
        """Its vision encoder."""
        ...

    @property
    def text(self) -> TextDecoder:
        """Its text decoder."""
        ...

    @property
    def region(self) -> RegionHeads:
        """Its region heads."""
        ...

    def coord_eos_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., 2) float32 of the coordinate token and of the end token, from hidden states (..., dim)."""
        ...

    def n_parameters(self) -> int:
        """How many numbers its weights are."""
        ...


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """What an architecture makes of a model folder.

    Attributes:
        model: ready to run.
        prompts: its prompts and tokenizer.
        classes: the only names that may be asked for; None for any words.
        synonyms: phrases that stand for one or several of the classes.
        family: which published model it is and what its file holds, a line for people; "" if there is nothing to say.
        load_refiner: reads the file of a refiner for the model; None where there is none for its architecture.
    """

    model: Model
    prompts: Prompts
    classes: tuple[str, ...] | None
    synonyms: dict[str, list[str]]
    family: str = ""
    load_refiner: Callable[[Path], Refiner] | None = None

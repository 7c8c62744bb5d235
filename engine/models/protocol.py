"""Interfaces between the engine and a model of any architecture. This module contains only types.

Each architecture has a loader in `registry`, which reads a model folder into a `LoadedModel`.
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
    """Phase of a decoding step: the kind of value that the step samples."""

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
    """Return the number of crops of an image that the vision encoder processes: the global crop and all tiles.

    If there is only one tile, it equals the global crop and is not encoded.
    """
    return 1 if tiling == (1, 1) else 1 + tiling[0] * tiling[1]


Look = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""Maps the pixels of one object (height, width, 3) to a vector of length 1. Similar objects have a large dot product.

The function is thread-safe.
"""

Ref = tuple[float, float] | tuple[float, float, float, float]
"""Part of an image that a question refers to: a point (x, y) or box (x1, y1, x2, y2), as fractions of the image."""


@dataclass(slots=True, frozen=True)
class ReasoningTokens:
    """Special tokens for reasoning.

    Attributes:
        answer: token that ends the reasoning.
        suffix: tokens between the reasoning and the answer. The first one is `answer`.
        forbidden: tokens that must not be sampled during the reasoning, except as its first token.
        coord: token that precedes a coordinate.
        grounds: tokens that start a passage that refers to points in the image.
        end: token that ends both reasoning and answer if it is sampled during the reasoning, unless it is `forbidden`.
            -1 if the model has no such token.
    """

    answer: int
    suffix: tuple[int, ...]
    forbidden: tuple[int, ...]
    coord: int
    grounds: frozenset[int]
    end: int = -1


@dataclass(slots=True, frozen=True)
class PathTokens:
    """Token IDs for the SVG paths of segmentation outlines; see `tasks.segment`.

    Attributes:
        eos: token that ends a path.
        commands: command letter of each command token.
        minus: token IDs of the minus sign.
        numbers: value, from 0 to 960, of each integer token.
        decode: function that returns the text of any other token ID.
        sets: allowed token IDs in four states: at the start of a path, after a complete command, before a number, and
            after a minus sign.
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
        """Return the SVG path element of a token ID: a command letter, '-', an integer, or None for any other token."""
        found = self.commands.get(token, self.numbers.get(token, "-" if token in self.minus else None))
        if found is None:
            text = self.decode(token).strip()
            return int(text) if text.isascii() and text.isdigit() else None
        return found


@dataclass(slots=True, frozen=True)
class ModelLimits:
    """Model sizes and token IDs that the scheduler needs.

    Attributes:
        prefix_length: number of positions of an image prefix, including BOS.
        max_context: maximum number of positions of a sequence, including the image prefix.
        vocab_size: number of token IDs.
        dim: width of embeddings and hidden states.
        n_layers, n_kv_heads, head_dim: number of layers, key heads and channels per head in the KV cache.
        bos_id: ID of the begin-of-sequence token, which precedes the image tokens.
        suppressed_ids: tokens that are never sampled in free text, except as its first token.
        coord_id: token that precedes a coordinate in reasoning, or -1 if the model has no such token.
        repeat_iou: IoU above which a box is dropped as a duplicate of an earlier box of the same answer. None keeps all
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
    """A LoRA adapter of the text decoder (Hu et al. 2021, arXiv:2106.09685). Adapters are compared by object identity.

    Attributes:
        name: name of the adapter.
        weights: matrices A (rank, in) and B (out, rank) by layer and module, such as (3, 'attn.qkv'). B includes the
            scale. For experts, the shapes are (experts, rank, in) and (experts, out, rank).
    """

    name: str
    weights: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True, frozen=True)
class ImageCrops:
    """Input of the vision encoder: crops (n, rows, columns, 3) uint8, and the number of tiles (rows, columns)."""

    pixels: NDArray[np.uint8]
    tiling: Tiling


class Prompts(Protocol):
    """Converts a task to the token IDs of a prompt, and the token IDs of an answer to text."""

    @property
    def eos_id(self) -> int:
        """Token ID that ends an answer."""
        ...

    def can(self, skill: str) -> bool:
        """Return whether the model supports a skill, such as 'detect', 'point', 'query' or 'caption'."""
        ...

    def objects(self, skill: str, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Return the token IDs of the prompt that asks for all objects with a label.

        Args:
            skill: 'detect' or 'point'.
            label: name or phrase that describes the objects.
            refs: points and boxes that show where to search, as fractions of the image.

        Raises:
            PromptError: if `refs` is not empty and the model does not support reference points and boxes.
        """
        ...

    def query(self, question: str, refs: Sequence[Ref] = (), reasoning: bool = False) -> list[int]:
        """Return the token IDs of the prompt for a question.

        `refs` are the points and boxes to which the question refers, as fractions of the image.
        """
        ...

    def ref_values(self, skill: str, refs: Sequence[Ref]) -> dict[int, tuple[float, ...]]:
        """Return the normalized coordinates and sizes of the reference points and boxes in a prompt.

        The keys are token positions in the prompt. Each value is (coordinate,) or (width, height), and its embedding
        replaces the embedding of the token.
        """
        ...

    @property
    def reasoning(self) -> ReasoningTokens | None:
        """Special tokens for reasoning, or None if the model does not support reasoning."""
        ...

    def segment(self, label: str, refs: Sequence[Ref] = ()) -> list[int]:
        """Return the token IDs of the segmentation prompt. `refs` are points and boxes that locate the object."""
        ...

    @property
    def path_tokens(self) -> PathTokens:
        """Token IDs for the SVG paths of segmentation outlines."""
        ...

    def gaze(self, eye: tuple[float, float]) -> tuple[list[int], dict[int, tuple[float, ...]]]:
        """Return the token IDs of the gaze prompt, and the eye's coordinates keyed by position in the prompt.

        `eye` is (x, y), one eye of the person whose gaze is estimated, as fractions of the image's width and height.
        """
        ...

    def caption(self, length: str) -> list[int]:
        """Return the token IDs of the prompt for a caption of this length, such as 'short'."""
        ...

    def ids(self, words: str) -> list[int]:
        """Return the token IDs of a text, without a prompt template."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Return the decoded text of an answer's token IDs."""
        ...

    def wrap(self, skill: str, words: str) -> list[int]:
        """Return the token IDs of a text inside the prompt template of a skill."""
        ...


class CacheLayer(Protocol):
    """One layer of a KV cache. `write` stores keys and values at the positions given to `Cache.layers`."""

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new keys and values in the KV cache. Both have the shape (rows, length, heads, head_dim)."""
        ...

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all stored keys and values, each (rows, heads, keys, head_dim)."""
        ...


class Cache(Protocol):
    """KV cache of several sequences. Each implementation chooses its storage format."""

    @property
    def key_positions(self) -> torch.Tensor:
        """Position in the sequence of each key that `CacheLayer.read` returns, as an int64 tensor."""
        ...

    def layers(self, positions: torch.Tensor) -> Sequence[CacheLayer]:
        """Return one `CacheLayer` per decoder layer, to store keys and values at `positions` (rows, length) int64."""
        ...


class TextDecoder(Protocol):
    """Text decoder: token embeddings, decoder blocks and output head."""

    @property
    def n_block_weights(self) -> int:
        """Number of active parameters of the decoder blocks per token, without the inactive experts."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of token IDs (...)."""
        ...

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: Cache, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the hidden states (rows, length, dim) of embeddings x. Store keys and values in the KV cache.

        `positions` are (rows, length). A bool `mask` is True for visible keys; a `mask` of numbers is added to the
        attention scores. By default, attention is bidirectional in the image prefix and causal after it.
        """
        ...

    def write_kv(self, x: torch.Tensor, cache: Cache) -> None:
        """Store the keys and values of image prefixes x (rows, length, dim) in the KV cache.

        A prefix (BOS and image tokens) starts at position 0 and has bidirectional attention.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits (..., vocab_size) for hidden states (..., dim)."""
        ...


class VisionEncoder(Protocol):
    """Converts an image to image tokens, which have the embedding width of the text decoder."""

    @property
    def crop_size(self) -> int:
        """Side of an image crop in pixels."""
        ...

    @property
    def crop_margin(self) -> int:
        """Overlap of neighbouring tiles on each side, in pixels."""
        ...

    @property
    def max_crops(self) -> int:
        """Maximum number of tiles per image."""
        ...

    @property
    def n_tokens(self) -> int:
        """Number of image tokens per image, for any number of crops.

        Each crop also has this number of features.
        """
        ...

    @property
    def feature_dim(self) -> int:
        """Number of feature channels per image token, before the projection."""
        ...

    def tiling_of(self, height: int, width: int) -> Tiling:
        """Return the number of tiles (rows, columns) for an image of `height` × `width` pixels."""
        ...

    def make_crops(self, image: NDArray[np.uint8]) -> ImageCrops:
        """Split an image (height, width, 3) uint8 RGB into a global crop and tiles.

        With the tiling 1×1, the global crop is the only crop.
        """
        ...

    def normalize(self, crops: torch.Tensor) -> torch.Tensor:
        """Normalize crops (n, size, size, 3) uint8. The result is the input of `features`."""
        ...

    def features(self, crops: torch.Tensor) -> torch.Tensor:
        """Return the features (n, n_tokens, feature_dim) of normalized crops."""
        ...

    def project(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """Return image tokens (..., n_tokens, dim).

        Args:
            whole: (..., n_tokens, feature_dim) features of the global crop.
            tiles: (..., n_tokens, feature_dim) joined features of the tiles.
        """
        ...

    def join(self, features: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        """Return the image tokens (n_tokens, dim) of one image from the features of its global crop and its tiles."""
        ...


@runtime_checkable
class DraftingEncoder(Protocol):
    """Vision encoder that also detects objects. The engine uses the detections as drafts (speculative decoding)."""

    @property
    def asked(self) -> Mapping[tuple[int, ...], int]:
        """Mapping from the token IDs of a detection prompt to the index of the detector class."""
        ...

    @property
    def n_drafts(self) -> int:
        """Number of detections that the encoder returns per crop."""
        ...

    def features_and_drafts(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features of crops, and detections that serve as drafts of answers.

        Returns:
            Features, and detections (n, n_drafts, 5) float32: class (-1 for none), x, y, width and height, as the
            decoder receives them. The detections of a class are in the order in which an answer lists them.
        """
        ...


@runtime_checkable
class DeepEncoder(Protocol):
    """Vision encoder that can also return the features of an inner block, which a mask refiner needs."""

    def two_depths(self, crops: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features after an inner block and the features after the last block.

        Args:
            crops: normalized crops.
            block: index of the inner block.
        """
        ...


class Refiner(Protocol):
    """Network that refines a segmentation mask, using the features of a crop around the object.

    Attributes:
        early_block: index of the encoder block whose features are used in addition to the last features.
    """

    early_block: int

    def __call__(self, early: torch.Tensor, last: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return, for each pixel, the probability that it belongs to the object: (crop size, crop size) float32.

        Args:
            early: features of the early block for one crop, from `DeepEncoder.two_depths`.
            last: features of the whole encoder for the same crop.
            mask: (crop size, crop size) float32 coarse mask, 1 inside the object and 0 outside.
        """
        ...


@runtime_checkable
class SizedEncoder(Protocol):
    """Vision encoder with an adjustable crop size."""

    def set_crop_size(self, size: int) -> None:
        """Set the width of all later crops in pixels.

        Raises:
            ValueError: if `size` is not a multiple of 32 from 128 to 1280.
        """
        ...


class RegionHeads(Protocol):
    """Networks that encode coordinates and sizes as embeddings, and decode them from hidden states."""

    def encode_coord(self, value: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of coordinates (..., 1) from 0 to 1."""
        ...

    def encode_size(self, value: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of (width, height) pairs (..., 2) from 0 to 1."""
        ...

    def coord(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely coordinate (..., 1) float32, from 0 to 1, for hidden states (..., dim)."""
        ...

    def size(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most likely width and height (..., 2) float32, from 0 to 1, for hidden states (..., dim)."""
        ...


@runtime_checkable
class ReadableHeads(Protocol):
    """Region heads that can normalize the hidden state in several ways.

    A checkpoint does not record its normalization. `saccade doctor --model` therefore tests all normalizations.
    """

    @property
    def readings(self) -> tuple[str, ...]:
        """Names of the supported normalizations of the hidden states. The first name is the current normalization."""
        ...

    def read_as(self, name: str) -> None:
        """Select the normalization of the hidden states by its name in `readings`."""
        ...


class Model(Protocol):
    """A model of any architecture: vision encoder, text decoder and region heads, with weights."""

    @property
    def limits(self) -> ModelLimits:
        """Model sizes and token IDs that the scheduler needs."""
        ...

    @property
    def device(self) -> torch.device:
        """Device on which the weights are stored."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of the weights."""
        ...

    @property
    def vision(self) -> VisionEncoder:
        """Vision encoder of the model."""
        ...

    @property
    def text(self) -> TextDecoder:
        """Text decoder of the model."""
        ...

    @property
    def region(self) -> RegionHeads:
        """Region heads of the model, which encode and decode coordinates and sizes."""
        ...

    def coord_eos_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., 2) float32 of the coordinate token and the end token, for hidden states (..., dim)."""
        ...

    def n_parameters(self) -> int:
        """Return the number of parameters of the model."""
        ...


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model loaded from a folder.

    Attributes:
        model: the model with its weights.
        prompts: prompt templates and tokenizer.
        classes: the only labels that the model detects, or None for an open vocabulary.
        synonyms: for each phrase, the classes with this meaning.
        family: name of the published model and its file format, or "" if unknown.
        load_refiner: function that reads a mask refiner from a file, or None if unsupported.
        look: function that returns the appearance descriptor (embedding) of an object, or None if unsupported.
    """

    model: Model
    prompts: Prompts
    classes: tuple[str, ...] | None
    synonyms: dict[str, list[str]]
    family: str = ""
    load_refiner: Callable[[Path], Refiner] | None = None
    look: Look | None = None

"""Reference decoder: prefills an image once, then decodes all prompts on the image as one batch.

Golden checks and tests compare the engine with this decoder. It processes one image at a time. Its KV cache is
contiguous, without pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.models.protocol import Model, ModelLimits
from saccade.engine.tasks.objects import DecodedObject, logit


@dataclass(slots=True)
class Prefilled:
    """Result of a prefill: last hidden states (rows, dim), positions of the next tokens (rows,), and KV cache."""

    hidden: torch.Tensor
    positions: torch.Tensor
    cache: DenseCache


class Generator:
    """Reference decoder that generates answers of one model. Not thread-safe."""

    def __init__(self, model: Model, eos_id: int) -> None:
        self.model = model
        self.limits = model.limits
        self._eos_id = eos_id

    @torch.inference_mode()
    def image_tokens(self, image: NDArray[np.uint8]) -> torch.Tensor:
        """Return the image tokens (tokens, dim) of an image (height, width, 3) uint8 RGB."""
        vision = self.model.vision
        crops = vision.make_crops(image)
        features = vision.features(vision.normalize(torch.from_numpy(crops.pixels).to(self.model.device)))
        if crops.tiling == (1, 1):
            return vision.project(features[0], features[0])
        return vision.join(features, crops.tiling)

    @torch.inference_mode()
    def prefix(self, tokens: torch.Tensor) -> DenseCache:
        """Prefill the BOS token and the image tokens (tokens, dim). Return the KV cache of this single sequence."""
        text, device = self.model.text, self.model.device
        bos = text.embed(torch.tensor([[self.limits.bos_id]], device=device))
        x = torch.cat([bos, tokens.unsqueeze(0)], dim=1)
        cache = DenseCache.empty(self.limits, 1, x.shape[1], x)
        text.write_kv(x, cache)
        return cache

    @torch.inference_mode()
    def prefill(self, prefix: DenseCache, prompts: Sequence[Sequence[int]], room: int) -> Prefilled:
        """Prefill prompts (token IDs) after a common image prefix.

        The KV cache of the result has space for `room` more tokens per prompt.
        """
        text, device = self.model.text, self.model.device
        start, longest = prefix.keys.shape[3], max(map(len, prompts))
        capacity = min(start + longest + room, self.limits.max_context)
        cache = prefix.fork(len(prompts), capacity)
        # Shorter prompts are padded. The padding's cache entries are overwritten before any token can attend to them.
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts], device=device)
        at = torch.arange(start, start + longest, device=device).expand(len(prompts), -1)
        hidden = text(text.embed(ids), at, cache.upto(start + longest))
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        return Prefilled(last, start + lengths, cache)

    @torch.inference_mode()
    def objects(
        self, state: Prefilled, sized: bool, max_objects: Sequence[int], conf: Sequence[float]
    ) -> list[list[DecodedObject]]:
        """Decode the answers to detect prompts (if `sized` is True) or point prompts in one batch.

        An answer ends if the score of the next object is not above `conf`, after `max_objects` objects, or when the
        context is full. The score is p(coord) / (p(coord) + p(eos)).
        """
        region, device = self.model.region, self.model.device
        found: list[list[DecodedObject]] = [[] for _ in conf]
        rows = list(range(len(conf)))
        limits = torch.tensor([logit(value) for value in conf], device=device)
        hidden, positions, cache = state.hidden, state.positions, state.cache
        capacity = cache.keys.shape[3]
        per_object = 3 if sized else 2
        while rows:
            coord, eos = self.model.coord_eos_logits(hidden).unbind(-1)
            margin = coord - eos
            fits = (positions + per_object <= capacity) & (margin > limits)
            goes_on = [ok and len(found[row]) < max_objects[row] for row, ok in zip(rows, fits.tolist(), strict=True)]
            if not all(goes_on):
                keep = torch.tensor([i for i, ok in enumerate(goes_on) if ok], dtype=torch.int64, device=device)
                rows = [row for row, ok in zip(rows, goes_on, strict=True) if ok]
                if not rows:
                    break
                hidden, positions, cache = hidden[keep], positions[keep], cache.rows(keep)
                margin, limits = margin[keep], limits[keep]
            parts = [torch.sigmoid(margin).unsqueeze(-1)]
            for _ in range(2):
                value = region.coord(hidden)
                parts.append(value)
                hidden = self._step(region.encode_coord(value), positions, cache)
                positions = positions + 1
            if sized:
                size = region.size(hidden)
                parts.append(size)
                hidden = self._step(region.encode_size(size), positions, cache)
                positions = positions + 1
            for row, numbers in zip(rows, torch.cat(parts, dim=-1).tolist(), strict=True):
                least = found[row][-1].score if found[row] else 1.0  # see `ObjectsOutput`
                found[row].append(DecodedObject(min(least, numbers[0]), *numbers[1:]))
        return found

    @torch.inference_mode()
    def tokens(self, state: Prefilled) -> Iterator[int]:
        """Yield the token IDs of one text answer, decoded greedily, until the end token or the end of the context."""
        text, suppressed = self.model.text, list(self.limits.suppressed_ids)
        hidden, positions = state.hidden, state.positions
        capacity = state.cache.keys.shape[3]
        first = True
        while True:
            logits = text.logits(hidden)
            if not first:
                logits[:, suppressed] = -torch.inf
            token, first = logits.argmax(-1), False
            identity = int(token.item())
            if identity == self._eos_id:
                return
            yield identity
            if int(positions[0]) >= capacity:
                return
            hidden = self._step(text.embed(token), positions, state.cache)
            positions = positions + 1

    def _step(self, x: torch.Tensor, positions: torch.Tensor, cache: DenseCache) -> torch.Tensor:
        """Run the decoder on one token of each sequence, x (rows, dim). Return the hidden states (rows, dim)."""
        return self.model.text(x.unsqueeze(1), positions.unsqueeze(1), cache).squeeze(1)


# ---- contiguous cache of several sequences, without pages


class DenseLayer:
    """One layer of a contiguous KV cache.

    `at` contains the indices of new keys and values: row indices (rows, 1) and positions (rows, length).
    """

    __slots__ = ("_at", "_keys", "_values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._keys, self._values, self._at = keys, values, at

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new keys and values, each (rows, length, heads, head_dim)."""
        self._keys.transpose(1, 2)[self._at] = k
        self._values.transpose(1, 2)[self._at] = v

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all stored keys and values, each (rows, heads, capacity, head_dim)."""
        return self._keys, self._values


class DenseCache:
    """Contiguous KV cache: keys and values, each (n_layers, rows, n_kv_heads, capacity, head_dim)."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, limits: ModelLimits, rows: int, capacity: int, like: torch.Tensor) -> DenseCache:
        """Return an empty KV cache with the dtype and device of `like`."""
        shape = (limits.n_layers, rows, limits.n_kv_heads, capacity, limits.head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    @property
    def key_positions(self) -> torch.Tensor:
        """Position of each key in the cache: int64, 0 to capacity - 1."""
        return torch.arange(self.keys.shape[3], device=self.keys.device)

    def layers(self, positions: torch.Tensor) -> Sequence[DenseLayer]:
        """Return the KV cache of each layer. Layers store new keys and values at `positions` (rows, length) int64."""
        at = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1), positions
        return [DenseLayer(k, v, at) for k, v in zip(self.keys, self.values, strict=True)]

    def fork(self, rows: int, capacity: int) -> DenseCache:
        """Return a KV cache with `rows` copies of the single sequence, each with space for `capacity` tokens."""

        def grow(one: torch.Tensor) -> torch.Tensor:
            grown = one.new_zeros((one.shape[0], rows, one.shape[2], capacity, one.shape[4]))
            grown[:, :, :, : one.shape[3]] = one
            return grown

        return DenseCache(grow(self.keys), grow(self.values))

    def rows(self, index: torch.Tensor) -> DenseCache:
        """Return a KV cache with copies of the sequences that have the indices `index`."""
        return DenseCache(self.keys[:, index], self.values[:, index])

    def upto(self, length: int) -> DenseCache:
        """Return a view of the first `length` positions of the KV cache."""
        return DenseCache(self.keys[:, :, :, :length], self.values[:, :, :, :length])

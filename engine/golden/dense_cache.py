"""A cache of sequences side by side, without pages: for reference code, one image at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.engine.models.protocol import ModelLimits


class DenseLayer:
    """One layer of a `DenseCache`; `at` are (rows, 1) row and (rows, length) position indices."""

    __slots__ = ("_at", "_keys", "_values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._keys, self._values, self._at = keys, values, at

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put in new keys and values (rows, length, heads, head_dim)."""
        self._keys.transpose(1, 2)[self._at] = k
        self._values.transpose(1, 2)[self._at] = v

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, each (rows, heads, capacity, head_dim)."""
        return self._keys, self._values


class DenseCache:
    """Keys and values of `rows` sequences side by side, each (n_layers, rows, n_kv_heads, capacity, head_dim)."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, limits: ModelLimits, rows: int, capacity: int, like: torch.Tensor) -> DenseCache:
        """A cache of zeros with the dtype and device of `like`."""
        shape = (limits.n_layers, rows, limits.n_kv_heads, capacity, limits.head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    @property
    def key_positions(self) -> torch.Tensor:
        """(capacity,) int64: keys lie in the order of their positions."""
        return torch.arange(self.keys.shape[3], device=self.keys.device)

    def layers(self, positions: torch.Tensor) -> Sequence[DenseLayer]:
        """The layers, ready to write at (rows, length) int64 positions."""
        at = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1), positions
        return [DenseLayer(k, v, at) for k, v in zip(self.keys, self.values, strict=True)]

    def fork(self, rows: int, capacity: int) -> DenseCache:
        """Copy a one-row cache into `rows` rows with room for `capacity` positions."""

        def grow(one: torch.Tensor) -> torch.Tensor:
            grown = one.new_zeros((one.shape[0], rows, one.shape[2], capacity, one.shape[4]))
            grown[:, :, :, : one.shape[3]] = one
            return grown

        return DenseCache(grow(self.keys), grow(self.values))

    def rows(self, index: torch.Tensor) -> DenseCache:
        """Copy of the given rows."""
        return DenseCache(self.keys[:, index], self.values[:, index])

    def upto(self, length: int) -> DenseCache:
        """View of the first `length` positions."""
        return DenseCache(self.keys[:, :, :, :length], self.values[:, :, :, :length])

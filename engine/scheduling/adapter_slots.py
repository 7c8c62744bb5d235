"""Adapters, and which of them are on the device: a few slots, each held by the sequences that use it.

Needs no torch. Weights change slots at admission only, so a slot may be filled anew once nothing in flight uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_SLOT = 0
"""What rows without an adapter use; real slots are counted from 1."""


@dataclass(slots=True, frozen=True, eq=False)
class Adapter:
    """Low-rank additions to the text decoder (LoRA, Hu et al. 2021, arXiv:2106.09685); told apart by identity.

    Attributes:
        name: for people.
        weights: by layer and part (3, 'attn.qkv'), A (rank, in) and B (out, rank), which is scaled already.
    """

    name: str
    weights: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


class AdapterSlots:
    """`n_slots` places for adapters. An adapter that nobody holds stays where it is until another needs the place.

    Not thread-safe: one thread schedules.
    """

    __slots__ = ("_holders", "_resident")

    def __init__(self, n_slots: int) -> None:
        self._holders = dict.fromkeys(range(1, n_slots + 1), 0)  # those let go of longest ago come first
        self._resident: dict[int, Adapter] = {}

    @property
    def n_free(self) -> int:
        """Slots that nobody holds."""
        return sum(not count for count in self._holders.values())

    def find(self, adapter: Adapter | None) -> int | None:
        """The slot that `hold` may be called with: where the adapter is, or a free one; None if there is none now."""
        if adapter is None:
            return NO_SLOT
        at = next((slot for slot, one in self._resident.items() if one is adapter), None)
        return at or next((slot for slot, count in self._holders.items() if not count), None)

    def hold(self, slot: int, adapter: Adapter | None) -> None:
        """Hold a slot once more, for its adapter or, if nobody holds it, for another.

        Raises:
            ValueError: if somebody holds it for another adapter.
        """
        if adapter is None:
            return
        if self._holders[slot] and self._resident[slot] is not adapter:
            raise ValueError(f"adapter slot {slot} is held for '{self._resident[slot].name}'")
        self._resident[slot] = adapter
        self._holders[slot] += 1

    def give_back(self, slot: int) -> None:
        """Let go of a slot once.

        Raises:
            ValueError: if nobody holds it.
        """
        if slot == NO_SLOT:
            return
        if not self._holders[slot]:
            raise ValueError(f"adapter slot {slot} is given back by somebody who does not hold it")
        self._holders[slot] = self._holders.pop(slot) - 1

"""Adapters and the slots they occupy on the device, each held by the sequences that use it.

Needs no torch. Slots are assigned at admission only, so a slot may be refilled once nothing in flight uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_SLOT = 0
"""The slot of sequences without an adapter; real slots are counted from 1."""


@dataclass(slots=True, frozen=True, eq=False, weakref_slot=True)
class Adapter:
    """Low-rank additions to the text decoder (LoRA, Hu et al. 2021, arXiv:2106.09685); compared by identity.

    Attributes:
        name: shown in messages.
        weights: by layer and part (3, 'attn.qkv'), A (rank, in) and B (out, rank), which is scaled already.
    """

    name: str
    weights: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]


class AdapterSlots:
    """`n_slots` slots for adapters. An adapter without a holder stays until another one needs its slot.

    That keeps no adapter alive: what holds a slot holds its adapter.

    Not thread-safe: one thread schedules.
    """

    __slots__ = ("_holders", "_resident")

    def __init__(self, n_slots: int) -> None:
        self._holders = dict.fromkeys(range(1, n_slots + 1), 0)  # least recently released first
        self._resident: dict[int, weakref.ref[Adapter]] = {}

    @property
    def n_free(self) -> int:
        """Slots with no holder."""
        return sum(not count for count in self._holders.values())

    def find(self, adapter: Adapter | None) -> int | None:
        """The slot to call `acquire` with: where the adapter is, or a free one; None if there is none now."""
        if adapter is None:
            return NO_SLOT
        at = next((slot for slot, one in self._resident.items() if one() is adapter), None)
        return at or next((slot for slot, count in self._holders.items() if not count), None)

    def acquire(self, slot: int, adapter: Adapter | None) -> None:
        """Add a holder to a slot, for its adapter or, if it has no holder, for another.

        Raises:
            ValueError: if it is held for another adapter.
        """
        if adapter is None:
            return
        if self._holders[slot] and (held := self._resident[slot]()) is not adapter:
            raise ValueError(f"adapter slot {slot} is held for '{held.name if held else 'another'}'")
        self._resident[slot] = weakref.ref(adapter)
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Remove one holder of a slot.

        Raises:
            ValueError: if it has no holder.
        """
        if slot == NO_SLOT:
            return
        if not self._holders[slot]:
            raise ValueError(f"adapter slot {slot} is released but has no holder")
        self._holders[slot] = self._holders.pop(slot) - 1

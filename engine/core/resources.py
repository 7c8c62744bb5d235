"""Resources that a sequence needs while in flight: KV cache pages, a batch slot and an adapter slot."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Many
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import NO_SLOT, KeptPrefix, PrefillWindow, Sequence, State
from saccade.engine.errors import EngineError, RequestTooLargeError
from saccade.engine.models.protocol import Adapter


class PagePool:
    """Pool of reference-counted KV cache pages. All prompts on one image share the pages of that image.

    Not thread-safe: only the scheduler's thread may call it.
    """

    __slots__ = ("_free", "_holders", "n_pages")

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._holders = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` free pages with one reference each.

        Raises:
            ValueError: if too few pages are free. In this case nothing is allocated.
        """
        if count > len(self._free):
            raise ValueError(f"cannot allocate {count} pages; {len(self._free)} are free")
        left, holders = len(self._free) - count, self._holders
        pages = tuple(reversed(self._free[left:]))
        del self._free[left:]
        for page in pages:
            holders[page] = 1
        return pages

    def share(self, pages: Many[int]) -> None:
        """Add a reference to allocated pages.

        Raises:
            ValueError: if a page is free.
        """
        if any(not self._holders[page] for page in pages):
            raise ValueError("a free page cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Many[int]) -> None:
        """Remove a reference from each page. A page without references becomes free.

        Raises:
            ValueError: if a page is already free.
        """
        holders, free = self._holders, self._free
        for page in pages:
            left = holders[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is already free")
            holders[page] = left
            if not left:
                free.append(page)


class AdapterSlots:
    """Reference-counted slots for LoRA adapters.

    An adapter without references stays in its slot until the slot is reused.

    The slots do not keep adapters alive in memory. Slots are assigned only at admission, so no step in flight uses a
    slot that is reassigned. Not thread-safe.
    """

    __slots__ = ("_holders", "_resident")

    def __init__(self, n_slots: int) -> None:
        self._holders = dict.fromkeys(range(1, n_slots + 1), 0)  # least recently released first
        self._resident: dict[int, weakref.ref[Adapter]] = {}

    @property
    def n_free(self) -> int:
        """Number of slots without references."""
        return sum(not count for count in self._holders.values())

    def find(self, adapter: Adapter | None) -> int | None:
        """Return the slot that contains the adapter, else a free slot, else None."""
        if adapter is None:
            return NO_SLOT
        at = next((slot for slot, one in self._resident.items() if one() is adapter), None)
        return at or next((slot for slot, count in self._holders.items() if not count), None)

    def acquire(self, slot: int, adapter: Adapter | None) -> None:
        """Add a reference to a slot. A free slot is first assigned to the adapter.

        Raises:
            ValueError: if the slot is in use by another adapter.
        """
        if adapter is None:
            return
        if self._holders[slot] and (held := self._resident[slot]()) is not adapter:
            raise ValueError(f"adapter slot {slot} is in use by '{held.name if held else 'another'}'")
        self._resident[slot] = weakref.ref(adapter)
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Remove a reference from an adapter slot.

        Raises:
            ValueError: if the slot has no references.
        """
        if slot == NO_SLOT:
            return
        if not self._holders[slot]:
            raise ValueError(f"adapter slot {slot} is already free")
        self._holders[slot] = self._holders.pop(slot) - 1


class Resources:
    """Allocates KV cache pages, batch slots and adapter slots for prefill windows and their sequences.

    Args:
        config: page size, number of batch slots and number of adapter slots.
        pool: KV cache pages.
        prefix_length: number of tokens of an image prefix.
    """

    def __init__(self, config: EngineConfig, pool: PagePool, prefix_length: int) -> None:
        self.pool, self._page_size, self._prefix_length = pool, config.page_size, prefix_length
        self._prefix_pages = -(-prefix_length // config.page_size)
        self.n_batch_slots = config.max_sequences
        self._batch_slots = list(range(self.n_batch_slots - 1, -1, -1))
        self.pages_total = pool.n_free
        self._kept_pages = 0  # pages of cached prefixes, including reserved ones
        self.n_adapters, self._adapters = config.adapter_slots, AdapterSlots(config.adapter_slots)

    @property
    def batch_slots_used(self) -> int:
        """Number of batch slots in use. Finalized sequences with steps in flight still use a slot."""
        return self.n_batch_slots - len(self._batch_slots)

    @property
    def all_free(self) -> bool:
        """Whether no resources are in use."""
        pages, slots = self.pool.n_free == self.pages_total, len(self._batch_slots) == self.n_batch_slots
        return pages and slots and self._adapters.n_free == self.n_adapters

    def measure(self, window: PrefillWindow[Any]) -> None:
        """Compute the pages that a prefill window needs.

        If the window uses a cached prefix, a reference is added to its pages. If the window creates a cached prefix,
        its pages are reserved. `drop` undoes both.

        Raises:
            RequestTooLargeError: if the window needs more resources than the engine has in total.
            EngineError: if the cached prefix is already released.
        """
        request = window.request
        for sequence in window.sequences:
            self._share(sequence)
            sequence.n_pages = self._private_pages(sequence)
        pages, left = self._pages_of(window), self.pages_total - self._kept_pages
        if request.reads is not None and not request.reads.pages:
            raise EngineError("this encoded image is closed; encode the image again")
        if pages > left or len(window.sequences) > self.n_batch_slots:
            raise RequestTooLargeError(
                f"{len(window.sequences)} prompts on one image need {pages} cache pages of {self._page_size} tokens; "
                f"{left} are available, for at most {self.n_batch_slots} prompts; send fewer prompts per image"
            )
        if request.keeps is not None and self._kept_pages + self._prefix_pages > self.pages_total // 2:
            raise RequestTooLargeError("encoded images already use half of the KV cache; close some of them")
        if request.adapter is not None and not self.n_adapters:
            raise RequestTooLargeError("the engine has no adapter slots; load it with adapter_slots=1 or more")
        if request.reads is not None:
            self.pool.share(request.reads.pages)
            window.pages = request.reads.pages
        if request.keeps is not None:
            self._kept_pages += self._prefix_pages
        window.state = State.PLANNED

    def drop(self, window: PrefillWindow[Any]) -> None:
        """Undo `measure` for a window that was never allocated, or that has no prompts."""
        self.pool.release(window.pages)
        window.pages = ()
        if window.request.keeps is not None:
            self._kept_pages -= self._prefix_pages

    def allocate(self, window: PrefillWindow[Any]) -> bool:
        """Allocate the resources for the longest possible answers of a window.

        Returns:
            False if too few resources are free. In this case nothing is allocated.
        """
        request = window.request
        slot = self._adapters.find(request.adapter)
        short = self._pages_of(window) > self.pool.n_free or len(window.sequences) > len(self._batch_slots)
        if short or slot is None:
            return False
        window.state = State.ADMITTED
        if not window.sequences and request.keeps is None:
            return True
        window.adapter_slot = slot
        if window.encodes:
            window.pages = self.pool.allocate(self._prefix_pages)
        if request.keeps is not None:
            self._adapters.acquire(slot, request.adapter)
        for number, sequence in enumerate(window.sequences):
            if number:
                self.pool.share(window.pages)
            self._adapters.acquire(slot, request.adapter)
            sequence.batch_slot = self._batch_slots.pop()
            shared = sequence.trunk.pages[: sequence.n_shared] if sequence.trunk is not None else ()
            self.pool.share(shared)
            sequence.pages = (*shared, *self.pool.allocate(sequence.n_pages))
            sequence.position = self._prefix_length if request.has_prefix else 0
            sequence.position += sequence.n_shared * self._page_size
        return True

    def keep(self, window: PrefillWindow[Any], kept: KeptPrefix) -> None:
        """Move the prefix pages of a prefilled window to a cached prefix, which now owns them."""
        self._adapters.release(window.adapter_slot)
        kept.pages = window.pages

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release a cached prefix. Requests that already use it continue. Repeated calls have no effect."""
        self.pool.release(kept.pages)
        self._kept_pages -= len(kept.pages)
        kept.pages = ()

    def release(self, sequence: Sequence[Any]) -> None:
        """Free the resources of a sequence if it is finalized and no step in flight contains it."""
        if sequence.finalized and not sequence.inflight_refs and sequence.batch_slot >= 0:
            self.pool.release(sequence.window.pages)
            self.pool.release(sequence.pages)
            self._adapters.release(sequence.window.adapter_slot)
            self._batch_slots.append(sequence.batch_slot)
            sequence.batch_slot, sequence.pages = -1, ()

    def _share(self, sequence: Sequence[Any]) -> None:
        """Let a branch use the full pages of its trunk's prompt, and remove their tokens from its own prompt."""
        # Without an image, the prompt does not start at a page boundary.
        if sequence.trunk is None or not sequence.window.request.has_prefix:
            return
        sequence.n_shared = len(sequence.trunk.prompt) // self._page_size
        cut = sequence.n_shared * self._page_size
        sequence.prompt = sequence.prompt[cut:]
        sequence.values = {at - cut: value for at, value in sequence.values.items() if at >= cut}

    def _private_pages(self, sequence: Sequence[Any]) -> int:
        length = len(sequence.prompt) + sequence.output.positions
        if not sequence.window.request.has_prefix and length > self._prefix_length:
            # The prompt skips the unused rest of the prefix pages.
            length += self._prefix_pages * self._page_size - self._prefix_length
        return -(-length // self._page_size)

    def _pages_of(self, window: PrefillWindow[Any]) -> int:
        prefix = self._prefix_pages if window.encodes else 0
        return prefix + sum(sequence.n_pages for sequence in window.sequences)

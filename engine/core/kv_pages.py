"""What a sequence holds while it is answered: pages of the KV cache, a batch slot, an adapter slot. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from saccade.engine.core.adapters import AdapterSlots
from saccade.engine.core.step import ImageRequest, KeptPrefix, Sequence
from saccade.engine.errors import EngineError


class PagePool:
    """`n_pages` pages. A page may be held several times: an image's pages are shared by all prompts on it.

    Not thread-safe: one thread schedules.
    """

    __slots__ = ("_free", "_holders", "n_pages")

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._holders = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Pages with no holder."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` free pages.

        Raises:
            ValueError: if there are not as many; nothing is allocated then.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        left, holders = len(self._free) - count, self._holders
        pages = tuple(reversed(self._free[left:]))
        del self._free[left:]
        for page in pages:
            holders[page] = 1
        return pages

    def share(self, pages: Many[int]) -> None:
        """Add a holder to pages that have one.

        Raises:
            ValueError: if one of them has no holder.
        """
        if any(not self._holders[page] for page in pages):
            raise ValueError("a page without a holder cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Many[int]) -> None:
        """Remove one holder of each page; a page without a holder is free.

        Raises:
            ValueError: if one of them has no holder.
        """
        holders, free = self._holders, self._free
        for page in pages:
            left = holders[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is released but has no holder")
            holders[page] = left
            if not left:
                free.append(page)


class Resources:
    """What there is of each, and what is free.

    Args:
        pool: pages of the cache.
        page_size: tokens of a page.
        prefix_length: tokens of an image's prefix.
        n_batch_slots: most sequences at a time.
        n_adapters: most adapters on the device at a time.
    """

    def __init__(self, pool: PagePool, page_size: int, prefix_length: int, n_batch_slots: int, n_adapters: int) -> None:
        self.pool, self._page_size, self._prefix_length = pool, page_size, prefix_length
        self._prefix_pages = -(-prefix_length // page_size)
        self.n_batch_slots, self._batch_slots = n_batch_slots, list(range(n_batch_slots - 1, -1, -1))
        self.pages_total = pool.n_free
        self._kept_pages = 0  # of prefixes that are kept, or will be
        self.n_adapters, self._adapters = n_adapters, AdapterSlots(n_adapters)

    @property
    def batch_slots_used(self) -> int:
        """Sequences that hold resources, including finalized ones in flight."""
        return self.n_batch_slots - len(self._batch_slots)

    @property
    def all_free(self) -> bool:
        """Whether nothing is held."""
        pages, slots = self.pool.n_free == self.pages_total, len(self._batch_slots) == self.n_batch_slots
        return pages and slots and self._adapters.n_free == self.n_adapters

    def measure(self, request: ImageRequest[Any]) -> str | None:
        """Find out how many pages a request needs; the complaint that there is not enough in all, if there is not.

        From here on it holds the kept prefix that it reads, or room for the one that it keeps; see `drop`.

        Raises:
            EngineError: if the kept prefix that it reads is released already.
        """
        for sequence in request.sequences:
            self._share(sequence)
            sequence.n_pages = self._private_pages(sequence)
        pages, left = self._pages_of(request), self.pages_total - self._kept_pages
        if request.reads is not None and not request.reads.pages:
            raise EngineError("this encoded image is closed")
        if pages > left or len(request.sequences) > self.n_batch_slots:
            return (
                f"{len(request.sequences)} prompts on one image need {pages} cache pages of {self._page_size} tokens; "
                f"there are {left}, for {self.n_batch_slots} prompts at most: ask less at a time"
            )
        if request.keeps is not None and self._kept_pages + self._prefix_pages > self.pages_total // 2:
            return "encoded images hold half of the cache's pages already: close some of them"
        if request.adapter is not None and not self.n_adapters:
            return "there is no slot for an adapter: load with adapter_slots=1 or more"
        if request.reads is not None:
            self.pool.share(request.reads.pages)
            request.pages = request.reads.pages
        if request.keeps is not None:
            self._kept_pages += self._prefix_pages
        return None

    def drop(self, request: ImageRequest[Any]) -> None:
        """Free what a measured request holds that has not been allocated anything, or has no prompts."""
        self.pool.release(request.pages)
        request.pages = ()
        if request.keeps is not None:
            self._kept_pages -= self._prefix_pages

    def allocate(self, request: ImageRequest[Any]) -> bool:
        """Give a request all that its answers may need; False if there is not enough free now."""
        slot = self._adapters.find(request.adapter)
        short = self._pages_of(request) > self.pool.n_free or len(request.sequences) > len(self._batch_slots)
        if short or slot is None:
            return False
        request.admitted = True
        if not request.sequences and request.keeps is None:
            return True
        request.adapter_slot = slot
        if request.encodes:
            request.pages = self.pool.allocate(self._prefix_pages)
        if request.keeps is not None:
            self._adapters.acquire(slot, request.adapter)
        for number, sequence in enumerate(request.sequences):
            if number:
                self.pool.share(request.pages)
            self._adapters.acquire(slot, request.adapter)
            sequence.batch_slot = self._batch_slots.pop()
            shared = sequence.trunk.pages[: sequence.n_shared] if sequence.trunk is not None else ()
            self.pool.share(shared)
            sequence.pages = (*shared, *self.pool.allocate(sequence.n_pages))
            sequence.position = self._prefix_length if request.has_prefix else 0
            sequence.position += sequence.n_shared * self._page_size
        return True

    def keep(self, request: ImageRequest[Any], kept: KeptPrefix) -> None:
        """Let a prefix have the pages of the request that no step prefills any more."""
        self._adapters.release(request.adapter_slot)
        kept.pages = request.pages

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release a kept prefix; requests that read it already go on. A second time it does nothing."""
        self.pool.release(kept.pages)
        self._kept_pages -= len(kept.pages)
        kept.pages = ()

    def release(self, sequence: Sequence[Any]) -> None:
        """Free what a finalized sequence holds, unless a step in flight still writes there."""
        if sequence.finalized and not sequence.inflight_refs and sequence.batch_slot >= 0:
            self.pool.release(sequence.request.pages)
            self.pool.release(sequence.pages)
            self._adapters.release(sequence.request.adapter_slot)
            self._batch_slots.append(sequence.batch_slot)
            sequence.batch_slot, sequence.pages = -1, ()

    def _share(self, sequence: Sequence[Any]) -> None:
        """Leave to the trunk's whole pages what they hold of a sequence's prompt."""
        if sequence.trunk is None or not sequence.request.has_prefix:  # prompts alone do not begin with a page
            return
        sequence.n_shared = len(sequence.trunk.prompt) // self._page_size
        cut = sequence.n_shared * self._page_size
        sequence.prompt = sequence.prompt[cut:]
        sequence.values = {at - cut: value for at, value in sequence.values.items() if at >= cut}

    def _private_pages(self, sequence: Sequence[Any]) -> int:
        length = len(sequence.prompt) + sequence.output.positions
        if not sequence.request.has_prefix and length > self._prefix_length:
            length += self._prefix_pages * self._page_size - self._prefix_length  # which nothing uses
        return -(-length // self._page_size)

    def _pages_of(self, request: ImageRequest[Any]) -> int:
        prefix = self._prefix_pages if request.encodes else 0
        return prefix + sum(sequence.n_pages for sequence in request.sequences)

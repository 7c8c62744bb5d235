"""Reference counts of the KV cache's pages. Pure bookkeeping, no torch."""

from __future__ import annotations

from collections.abc import Sequence


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
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that have one.

        Raises:
            ValueError: if one of them has no holder.
        """
        if any(not self._holders[page] for page in pages):
            raise ValueError("a page without a holder cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder of each page; a page without a holder is free.

        Raises:
            ValueError: if one of them has no holder.
        """
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is released but has no holder")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

"""Pages of the KV cache by number: who holds them, and which are free. Pure bookkeeping, no torch."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """`n_pages` pages. A page may be held several times: the pages of an image are shared by all prompts on it.

    Not thread-safe: one thread schedules.
    """

    __slots__ = ("_free", "_holders", "n_pages")

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._holders = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Hold `count` free pages.

        Raises:
            ValueError: if there are not as many; nothing is taken then.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more that somebody holds already.

        Raises:
            ValueError: if nobody holds one of them.
        """
        if any(not self._holders[page] for page in pages):
            raise ValueError("a page that nobody holds cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Let go of pages once; those that nobody holds any more are free.

        Raises:
            ValueError: if nobody holds one of them.
        """
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is given back by somebody who does not hold it")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

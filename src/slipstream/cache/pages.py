"""Whole pages, handed out and taken back. A page belongs to one sequence or to one node of the prefix tree."""

from __future__ import annotations


class PagePool:
    """Pages 1 to `num_pages` - 1; page 0 is scratch and never handed out. Only the engine thread touches it."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, not {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    def take(self) -> int | None:
        """A free page, or None when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._taken[page] = 1
        return page

    def give_back(self, page: int) -> None:
        """Return a page. Returning one that is not out is an error of the caller."""
        if page == 0 or not self._taken[page]:
            raise RuntimeError(f"page {page} was given back but is not out")
        self._taken[page] = 0
        self._free.append(page)

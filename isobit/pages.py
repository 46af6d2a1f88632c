"""The page pool: which physical pages of the KV cache are free, and how many hold each of the others.

It knows numbers only: no tokens, no requests, no tensors. A page is never cleared when it is reused.
Invariant: a page is free exactly when its reference count is 0, and it stands in the free list exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """`num_pages` pages of `page_size` tokens each, with reference counts. Misuse is a bug of ours: AssertionError."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a page pool needs at least 1 page of 1 token, got {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_references(self, page: int) -> int:
        """How many hold `page`; 0 when it is free."""
        return self._references[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one request take."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when fewer are free."""
        assert count >= 0, f"cannot allocate {count} pages"
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer for each of `pages`; those without any become free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released more often than it was held"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list and the reference counts agree."""
        assert len(set(self._free)) == len(self._free), "a page stands twice in the free list"
        unheld = {page for page, count in enumerate(self._references) if count == 0}
        assert unheld == set(self._free), f"free list and reference counts differ: {unheld ^ set(self._free)}"
        assert min(self._references) >= 0, "a reference count is negative"

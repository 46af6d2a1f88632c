"""The prefix cache: a radix tree over token ids, one whole page per edge, kept in the page pool it shares.

It does not know requests, models or time. An edge is the tuple of a page's token ids and children are looked up by that
tuple, so every hit has compared all token ids: a hash collision costs time, never a wrong page.

Invariants: whoever holds a cached page holds all its ancestors too, so a page that nobody holds has no held descendant;
and among the pages that nobody holds, ancestors were used later than their descendants. Hence the least recently used
page that nobody holds is a leaf, and eviction needs neither a clock nor a search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from isobit.pages import PagePool


class _Node:
    """One cached page: its tokens, its place in the tree."""

    __slots__ = ("children", "page", "parent", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.token_ids = token_ids
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixCache:
    """Computed whole pages, found again by the token ids of the whole prefix. The cache holds one reference of each.

    With `enabled=False` ("force miss") callers run the same code and never hit: nothing is found, nothing is kept.
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.num_evicted_pages = 0
        self._root = _Node((), -1, None)
        self._nodes: OrderedDict[int, _Node] = OrderedDict()  # by page; least recently used first
        self._num_evictable = 0

    @property
    def num_pages(self) -> int:
        """Pages in the cache, held by requests or not."""
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Pages in the cache that nobody else holds."""
        return self._num_evictable

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def find(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Pages of the longest cached prefix of `token_ids`, `most` pages at most; not held yet, as with `match`."""
        size = self.pool.page_size
        node, pages = self._root, []
        for start in range(0, most * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            pages.append(child.page)
            node = child
        return pages

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix, never covering the last token: its row gives the next logits.

        The pages are not held yet: `lock` them before anything else happens to the pool.
        """
        return self.find(token_ids, (len(token_ids) - 1) // self.pool.page_size)

    def lock(self, pages: Sequence[int]) -> None:
        """One more holder for a matched chain of `pages`, which cannot be evicted until they are released."""
        for page in pages:
            assert page in self._nodes, f"page {page} is not cached"
            self._num_evictable -= self.pool.num_references(page) == 1
        self.pool.share(pages)

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer for all `pages` of a request, cached or not; cached ones count as just used."""
        for page in reversed(pages):
            if page in self._nodes:
                self._nodes.move_to_end(page)
                self._num_evictable += self.pool.num_references(page) == 2
        self.pool.release(pages)

    def insert(self, token_ids: Sequence[int], pages: list[int], start: int) -> int:
        """Keep `pages[start:]`, the computed whole pages of `token_ids`; returns how many of `pages` are cached then.

        The caller holds `pages`, and `pages[:start]` are cached. Where the same tokens are cached already, the first
        page stays: it replaces the caller's page in `pages`, and the caller's page is given back.
        """
        if not self.enabled:
            return start
        size = self.pool.page_size
        assert len(token_ids) >= len(pages) * size, f"{len(pages)} pages are not covered by {len(token_ids)} tokens"
        node = self._nodes[pages[start - 1]] if start else self._root
        for index in range(start, len(pages)):
            key = tuple(token_ids[index * size : (index + 1) * size])
            child, page = node.children.get(key), pages[index]
            if child is None:
                assert page not in self._nodes, f"page {page} is cached for other tokens"
                child = node.children[key] = self._nodes[page] = _Node(key, page, node)
                self.pool.share((page,))
            elif child.page != page:
                self.lock((child.page,))
                self.pool.release((page,))
                pages[index] = child.page
            node = child
        return len(pages)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody holds, least recently used first. Returns how many were freed."""
        freed = 0
        while freed < count and self._num_evictable:
            page = next(iter(self._nodes))
            if self.pool.num_references(page) > 1:
                self._nodes.move_to_end(page)  # in use; its release will put the whole chain in order again
                continue
            node = self._nodes.pop(page)
            assert not node.children and node.parent is not None, f"page {page} is evicted before its descendants"
            del node.parent.children[node.token_ids]
            self.pool.release((page,))
            self._num_evictable -= 1
            freed += 1
        self.num_evicted_pages += freed
        return freed

    def flush(self) -> bool:
        """Forget everything. Returns False, and changes nothing, while a cached page is held by a request."""
        if self._num_evictable < len(self._nodes):
            return False
        self.pool.release(self._nodes)
        self._nodes.clear()
        self._root.children.clear()
        self._num_evictable = 0
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree, page index, counters and order of use agree."""
        order = {page: place for place, page in enumerate(self._nodes)}
        references, found, stack = self.pool.num_references, 0, [self._root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                found += 1
                assert child.token_ids == key and len(key) == self.pool.page_size, f"page {child.page} has a wrong edge"
                assert child.parent is node and self._nodes.get(child.page) is child, f"page {child.page} is misplaced"
                assert references(child.page) > 0, f"cached page {child.page} is free"
                if node is not self._root and references(node.page) == 1:
                    assert references(child.page) == 1, f"page {child.page} is held without its parent {node.page}"
                    assert order[child.page] < order[node.page], f"page {child.page} would be evicted after its parent"
                stack.append(child)
        assert found == len(self._nodes), f"{len(self._nodes)} cached pages, but {found} in the tree"
        evictable = sum(references(page) == 1 for page in self._nodes)
        assert evictable == self._num_evictable, f"{evictable} evictable pages, but {self._num_evictable} counted"

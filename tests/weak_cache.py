"""A planted fault for controls: a prefix cache that compares too little, which the tests that use it must notice."""

from __future__ import annotations

from collections.abc import Sequence

from isobit.prefix_cache import PrefixCache


class ForgetfulCache(PrefixCache):
    """Compares only the first token of each page, as a weak hash without a check would."""

    def find(self, token_ids: Sequence[int], most: int) -> list[int]:
        page_size = self.pool.page_size
        node, pages = self._root, []
        for start in range(0, most * page_size, page_size):
            child = next((n for key, n in node.children.items() if key[0] == token_ids[start]), None)
            if child is None:
                break
            pages.append(child.page)
            node = child
        return pages

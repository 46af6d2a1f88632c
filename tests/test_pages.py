"""The page pool and the prefix cache, without a device: reference counts, hits compared by token ids, eviction order.

Also a random walk against a slow, obvious model of the cache (a dict from whole prefixes to pages).
"""

from __future__ import annotations

import random

import pytest

from isobit.pages import PagePool
from isobit.prefix_cache import PrefixCache

SIZE = 4


def tokens_of(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def make(num_pages: int = 16, enabled: bool = True) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages, SIZE)
    return pool, PrefixCache(pool, enabled)


def put(pool: PagePool, cache: PrefixCache, token_ids: list[int]) -> list[int]:
    """Compute `token_ids` as a request would: fresh pages, published, still held."""
    pages = pool.allocate(len(token_ids) // SIZE)
    assert pages is not None
    cache.insert(token_ids, pages, 0)
    return pages


def check(pool: PagePool, cache: PrefixCache) -> None:
    pool.check_integrity()
    cache.check_integrity()


def test_pool_allocates_all_or_nothing() -> None:
    pool = PagePool(4, SIZE)
    first = pool.allocate(3)
    assert first is not None and len(set(first)) == 3 and pool.num_free == 1
    assert pool.allocate(2) is None and pool.num_free == 1
    assert pool.allocate(0) == []
    second = pool.allocate(1)
    assert second is not None and not set(first) & set(second) and pool.num_free == 0
    pool.release(first)
    assert pool.num_free == 3
    pool.check_integrity()


def test_pool_frees_a_page_with_its_last_holder() -> None:
    pool = PagePool(2, SIZE)
    pages = pool.allocate(1)
    assert pages is not None
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 1 and pool.num_references(pages[0]) == 1
    pool.release(pages)
    assert pool.num_free == 2 and pool.num_references(pages[0]) == 0


def test_pool_misuse_is_refused() -> None:
    pool = PagePool(2, SIZE)
    with pytest.raises(AssertionError, match="page 1 is released more often"):
        pool.release([1])
    with pytest.raises(AssertionError, match="page 0 is free"):
        pool.share([0])
    with pytest.raises(AssertionError, match="cannot allocate -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="got 0 pages"):
        PagePool(0, SIZE)
    pool._free.append(0)  # control: the check must see a damaged free list
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("length", "most"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3)]
)
def test_match_never_covers_the_last_token(length: int, most: int) -> None:
    pool, cache = make()
    text = list(range(16))
    pages = put(pool, cache, text)
    assert cache.match(text[:length]) == pages[:most]
    check(pool, cache)


def test_match_takes_whole_equal_pages_only() -> None:
    pool, cache = make()
    pages = put(pool, cache, tokens_of("abcdefghijkl"))
    assert cache.match(tokens_of("abcdefghijklm")) == pages
    assert cache.match(tokens_of("abcdefghijkX")) == pages[:2]
    assert cache.match(tokens_of("abcdefgXijklm")) == pages[:1]  # the third page has the right tokens, not the prefix
    assert cache.match(tokens_of("Xbcdefghijklm")) == []
    assert cache.match(tokens_of("efghijklm")) == []


def test_equal_hashes_are_not_equal_tokens() -> None:
    """Case 16. Python hashes whole numbers modulo 2**61 - 1, so these two prefixes collide in the very dict used."""
    period = 2**61 - 1
    mine, other = [1, 2, 3, 4], [1 + period, 2, 3, 4 + period]
    assert hash(tuple(mine)) == hash(tuple(other)) and mine != other  # the condition: a real collision
    pool, cache = make()
    pages = put(pool, cache, mine)
    assert cache.match([*other, 9]) == []
    other_pages = put(pool, cache, other)
    assert cache.match([*mine, 9]) == pages and cache.match([*other, 9]) == other_pages and pages != other_pages
    check(pool, cache)


def test_many_colliding_prefixes_stay_apart() -> None:
    """Case 16: 50 prompts, all with one hash."""
    period = 2**61 - 1
    pool, cache = make(100)
    prompts = [[index * period + 5, 6, 7, 8, 1, 2, 3, 4] for index in range(50)]
    assert len({hash(tuple(prompt[:SIZE])) for prompt in prompts}) == 1
    pages = [put(pool, cache, prompt) for prompt in prompts]
    assert [cache.match([*prompt, 0]) for prompt in prompts] == pages
    check(pool, cache)


def test_a_second_copy_is_given_back() -> None:
    pool, cache = make()
    text = tokens_of("abcdefgh")
    first = put(pool, cache, text)
    free = pool.num_free
    second = pool.allocate(3)
    assert second is not None
    own = list(second)
    assert cache.insert([*text, *tokens_of("ijkl")], second, 0) == 3
    assert second == [*first, own[2]] and pool.num_free == free - 1  # two duplicates returned, the new page kept
    assert [pool.num_references(page) for page in second] == [3, 3, 2]
    check(pool, cache)


def test_insert_continues_where_it_stopped() -> None:
    pool, cache = make()
    text = tokens_of("abcdefghijkl")
    pages = put(pool, cache, text[:4])
    more = pool.allocate(2)
    assert more is not None
    pages += more
    assert cache.insert(text, pages, 1) == 3
    assert cache.match([*text, 0]) == pages
    check(pool, cache)


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    pool, cache = make()
    stem = put(pool, cache, tokens_of("abcd"))
    left = put(pool, cache, tokens_of("abcdLLLL"))
    right = put(pool, cache, tokens_of("abcdRRRR"))
    for pages in (left, right, stem):
        cache.release(pages)
    assert cache.num_evictable == 3
    hit = cache.match(tokens_of("abcdLLLL."))
    cache.lock(hit)
    cache.release(hit)  # now right is the oldest leaf
    assert cache.evict(1) == 1 and right[1] not in cache and left[1] in cache
    assert cache.evict(1) == 1 and left[1] not in cache and stem[0] in cache
    assert cache.evict(5) == 1 and cache.num_pages == 0 and pool.num_free == 16
    assert cache.evict(1) == 0 and cache.num_evicted_pages == 3
    check(pool, cache)


def test_locked_pages_survive_eviction() -> None:
    pool, cache = make()
    held = put(pool, cache, tokens_of("abcdefgh"))
    loose = put(pool, cache, tokens_of("abcdefghijklmnop"))
    cache.release(loose)
    assert cache.num_evictable == 2
    assert cache.evict(9) == 2 and held[0] in cache and held[1] in cache
    assert cache.evict(9) == 0
    check(pool, cache)
    cache.release(held)
    assert cache.evict(9) == 2 and pool.num_free == 16


def test_flush_only_when_nothing_is_held() -> None:
    pool, cache = make()
    pages = put(pool, cache, tokens_of("abcdefgh"))
    assert not cache.flush() and cache.match(tokens_of("abcdefghi")) == pages
    cache.release(pages)
    assert cache.flush() and cache.match(tokens_of("abcdefghi")) == []
    assert pool.num_free == 16 and cache.num_pages == 0
    check(pool, cache)


def test_a_disabled_cache_takes_the_same_calls_and_never_hits() -> None:
    """Case 176."""
    pool, cache = make(enabled=False)
    pages = put(pool, cache, tokens_of("abcdefgh"))
    assert cache.match(tokens_of("abcdefghi")) == [] and cache.num_pages == 0
    cache.release(pages)
    assert pool.num_free == 16 and cache.flush()
    check(pool, cache)


def test_integrity_check_sees_damage() -> None:
    """Control: each planted damage must be found."""
    pool, cache = make()
    pages = put(pool, cache, tokens_of("abcdefgh"))
    cache._num_evictable += 1
    with pytest.raises(AssertionError, match="counted"):
        cache.check_integrity()
    cache._num_evictable -= 1
    pool.release(pages[:1])  # the parent alone: a held page under one that nobody holds
    with pytest.raises(AssertionError, match="without its parent"):
        cache.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_random_walk_against_a_dict(seed: int) -> None:
    """The cache finds exactly the whole prefixes that were inserted and not evicted; evictions go leaf by leaf."""
    draw = random.Random(seed)
    pool, cache = make(24)
    known: dict[tuple[int, ...], int] = {}
    held: list[list[int]] = []
    hits = evictions = duplicates = 0
    for _ in range(400):
        length = draw.choice([4, 8, 12, draw.randrange(1, 14)])
        text = [draw.randrange(2) for _ in range(length)]
        if held and draw.random() < 0.45:
            cache.release(held.pop(draw.randrange(len(held))))
        expected = []
        while len(expected) * SIZE + SIZE < len(text) and tuple(text[: len(expected) * SIZE + SIZE]) in known:
            expected.append(known[tuple(text[: len(expected) * SIZE + SIZE])])
        pages = cache.match(text)
        assert pages == expected
        hits += bool(pages)
        cache.lock(pages)
        missing = len(text) // SIZE - len(pages)
        if missing > pool.num_free:
            before = dict(known)
            evictions += cache.evict(missing - pool.num_free)
            known = {prefix: page for prefix, page in known.items() if page in cache}
            gone = set(before) - set(known)
            assert not any(longer[: len(prefix)] == prefix for prefix in gone for longer in known)
        fresh = pool.allocate(missing)
        if fresh is None:
            cache.release(pages)
        else:
            start = len(pages)
            pages += fresh
            cache.insert(text, pages, start)
            for index in range(start, len(pages)):
                duplicates += pages[index] != fresh[index - start]
                prefix = tuple(text[: (index + 1) * SIZE])
                assert known.setdefault(prefix, pages[index]) == pages[index]
            held.append(pages)
        check(pool, cache)
    assert hits > 10 and evictions > 10 and duplicates > 10  # the walk went where it should
    for pages in held:
        cache.release(pages)
    assert cache.num_evictable == cache.num_pages and cache.flush() and pool.num_free == 24

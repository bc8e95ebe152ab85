"""RadixCache against a brute force that keeps every cached prefix in one dict."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from pellucid.kvcache.radix_cache import RadixCache, RadixNode

PAGE = 2
Key = tuple[int, str, tuple[int, ...]]  # (epoch, namespace, the whole prefix); a reset starts a new epoch


@dataclass
class Entry:
    page: int
    locks: int = 0
    used: tuple[int, int] = (0, 0)  # (time, -depth): of a path released at once, the deeper page is older


class PrefixTable:
    """What RadixCache promises, said the slow way."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.epoch = 0
        self.clock = 0

    def prefixes(self, epoch: int, namespace: str, tokens: tuple[int, ...]) -> list[Key]:
        return [(epoch, namespace, tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def match(self, namespace: str, tokens: tuple[int, ...], max_pages: int | None) -> list[Key]:
        found: list[Key] = []
        for key in self.prefixes(self.epoch, namespace, tokens)[:max_pages]:
            if key not in self.entries:
                break
            found.append(key)
        return found

    def unlock(self, keys: list[Key]) -> None:
        self.clock += 1
        for key in keys:
            self.entries[key].locks -= 1
            self.entries[key].used = (self.clock, -len(key[2]))

    def evict(self, count: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < count:
            parents = {(epoch, namespace, tokens[:-PAGE]) for epoch, namespace, tokens in self.entries}
            leaves = [key for key, entry in self.entries.items() if entry.locks == 0 and key not in parents]
            if not leaves:
                break
            oldest = min(leaves, key=lambda key: self.entries[key].used)
            pages.append(self.entries.pop(oldest).page)
        return pages


@dataclass
class Reader:
    epoch: int
    namespace: str
    tokens: tuple[int, ...]
    node: RadixNode


class Comparison:
    """Does every operation on both sides and compares what they answer."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.random = random.Random(seed)
        self.cache = RadixCache(PAGE)
        self.table = PrefixTable()
        self.free = list(range(1, num_pages + 1))
        self.num_pages = num_pages
        self.readers: list[Reader] = []
        self.refusals = 0

    def draw_tokens(self, max_pages: int) -> tuple[int, ...]:
        return tuple(self.random.choices((0, 1, 2), weights=(6, 2, 1), k=self.random.randint(0, max_pages * PAGE + 1)))

    def draw_namespace(self) -> str:
        return self.random.choice(("", "salt", "salt "))

    def match(self) -> None:
        namespace, tokens = self.draw_namespace(), self.draw_tokens(7)
        limit = self.random.choice((None, None, 0, 1, 3))
        expected = [self.table.entries[key].page for key in self.table.match(namespace, tokens, limit)]
        assert self.cache.match(namespace, tokens, limit).pages == expected

    def open(self) -> None:
        namespace, tokens = self.draw_namespace(), self.draw_tokens(7)
        match = self.cache.match(namespace, tokens)
        keys = self.table.match(namespace, tokens, None)
        assert match.pages == [self.table.entries[key].page for key in keys]
        self.cache.lock(match.node)
        for key in keys:
            self.table.entries[key].locks += 1
        self.readers.append(Reader(self.table.epoch, namespace, tokens[: len(keys) * PAGE], match.node))

    def extend(self) -> None:
        if not self.readers:
            return
        reader = self.random.choice(self.readers)
        count = min(self.random.randint(0, 4), len(self.free))
        tokens = tuple(self.random.choices((0, 1, 2), weights=(6, 2, 1), k=count * PAGE))
        pages = [self.free.pop() for _ in range(count)]
        reader.node, refused = self.cache.insert(reader.node, reader.namespace, tokens, pages)
        old_length, reader.tokens = len(reader.tokens), reader.tokens + tokens
        expected: list[int] = []
        for key in self.table.prefixes(reader.epoch, reader.namespace, reader.tokens)[old_length // PAGE :]:
            page = pages[len(key[2]) // PAGE - 1 - old_length // PAGE]
            if key in self.table.entries:
                expected.append(page)
            self.table.entries.setdefault(key, Entry(page)).locks += 1
        assert refused == expected
        self.refusals += len(refused)
        self.free += refused

    def close(self) -> None:
        if not self.readers:
            return
        reader = self.readers.pop(self.random.randrange(len(self.readers)))
        self.cache.unlock(reader.node)
        self.table.unlock(self.table.prefixes(reader.epoch, reader.namespace, reader.tokens))

    def evict(self) -> None:
        count = self.random.randint(0, 6)
        pages = self.cache.evict(count)
        assert pages == self.table.evict(count)
        self.free += pages

    def reset(self) -> None:
        self.table.epoch += 1
        pages = self.cache.reset()
        assert sorted(pages) == sorted(self.table.evict(self.num_pages))
        self.free += pages

    def check_counts(self) -> None:
        assert len(self.cache) == len(self.table.entries) == self.num_pages - len(self.free)
        assert self.cache.num_evictable == sum(entry.locks == 0 for entry in self.table.entries.values())


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_equals_the_brute_force_over_random_operations(seed: int) -> None:
    both = Comparison(seed, num_pages=60)
    operations = [both.match, both.open, both.extend, both.close, both.evict, both.reset]
    for _ in range(4000):
        both.random.choices(operations, weights=(30, 22, 25, 22, 14, 0.3))[0]()
        both.check_counts()
    assert both.refusals > 0
    while both.readers:
        both.close()
    both.free += both.cache.evict(both.num_pages)
    assert sorted(both.free) == list(range(1, both.num_pages + 1))


def fill(cache: RadixCache, tokens: list[int], pages: list[int], namespace: str = "") -> None:
    node = cache.match(namespace, []).node
    node, _ = cache.insert(node, namespace, tokens, pages)
    cache.unlock(node)


def test_a_partial_page_never_matches() -> None:
    cache = RadixCache(4)
    fill(cache, [1, 2, 3, 4], [9])
    assert cache.match("", [1, 2, 3]).pages == []
    assert cache.match("", [1, 2, 3, 4, 5]).pages == [9]


def test_a_namespace_never_reads_another() -> None:
    cache = RadixCache(2)
    fill(cache, [1, 2], [5], namespace="model-a")
    assert cache.match("model-b", [1, 2]).pages == []
    assert cache.match("model-a", [1, 2]).pages == [5]


def test_a_locked_prefix_survives_any_eviction_and_its_lock_protects_all_ancestors() -> None:
    cache = RadixCache(1)
    fill(cache, [1, 2, 3], [11, 12, 13])
    match = cache.match("", [1, 2])
    cache.lock(match.node)
    assert cache.evict(10) == [13]
    assert cache.match("", [1, 2, 3]).pages == [11, 12]
    cache.unlock(match.node)
    assert cache.evict(10) == [12, 11]


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(1)
    fill(cache, [1, 2], [11, 12])
    fill(cache, [1, 3], [21, 13])  # page 21 is refused: token 1 is cached already
    node = cache.match("", [1, 2]).node
    cache.lock(node)
    cache.unlock(node)
    assert cache.evict(3) == [13, 12, 11]


def test_eviction_does_not_slow_down_with_the_size_of_the_tree() -> None:
    """A scan of the tree for each page would take minutes here."""
    cache = RadixCache(1)
    for first in range(200):
        fill(cache, [first, *range(100)], list(range(first * 101 + 1, first * 101 + 102)))
    assert len({page for _ in range(20200) for page in cache.evict(1)}) == 20200
    assert len(cache) == cache.num_evictable == 0


def test_a_reset_lets_readers_go_on_but_nothing_matches_again() -> None:
    cache = RadixCache(1)
    fill(cache, [1, 2], [11, 12])
    node = cache.match("", [1]).node
    cache.lock(node)
    assert cache.reset() == [12]
    assert cache.match("", [1]).pages == []
    node, refused = cache.insert(node, "", [2], [13])
    assert refused == []
    assert cache.match("", [1, 2]).pages == []
    cache.unlock(node)
    assert cache.evict(5) == [13, 11]


def test_misuse_is_refused() -> None:
    cache = RadixCache(2)
    fill(cache, [1, 2], [5])
    match = cache.match("", [1, 2])
    with pytest.raises(ValueError, match="do not fill"):
        cache.insert(cache.match("", []).node, "", [1, 2, 3], [6])
    with pytest.raises(ValueError, match="needs a lock"):
        cache.insert(match.node, "", [3, 4], [6])
    with pytest.raises(ValueError, match="already in the prefix cache"):
        cache.insert(cache.match("", []).node, "", [3, 4], [5])
    with pytest.raises(ValueError, match="more often than locked"):
        cache.unlock(match.node)
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(0)

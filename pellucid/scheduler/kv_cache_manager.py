"""Gives sequences KV pages, from the allocator and the prefix cache, and takes them back. Called by `Scheduler`."""

from __future__ import annotations

from collections.abc import Iterable

from pellucid.kvcache.radix_cache import RadixCache, RadixNode
from pellucid.scheduler.page_allocator import FREE, PREFIX_CACHE, ConservationError, PageAllocator
from pellucid.scheduler.sequence import Refusal, Sequence


class KVCacheManager:
    """The pages of all sequences.

    A sequence holds what `admit` gave it until `release`. Pages that only the prefix cache keeps count as available:
    they are evicted when somebody needs them.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(page_size)
        self._caching = enable_prefix_caching
        self.queries = 0
        self.query_tokens = 0
        self.hit_tokens = 0

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + self.cache.num_evictable

    def num_held(self, sequences: Iterable[Sequence]) -> int:
        """Pages that belong to one of `sequences`, or that a lock protects in the prefix cache."""
        return len(self.cache) - self.cache.num_evictable + sum(len(self._private_pages(s)) for s in sequences)

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Give `sequence` its cached prefix and pages for all its known tokens, leaving `headroom` pages available.

        False, and nothing changes, when they are not there. The cached prefix never covers the last known token: its
        logits are wanted, so at least one token is left to compute.
        """
        if sequence.refusal is not None and not self._may_admit_now(sequence, sequence.refusal, headroom):
            return False
        tokens = len(sequence.token_ids)
        readable = self._caching and sequence.reads_prefix_cache
        max_pages = (tokens - 1) // self.page_size if readable else 0
        node, cached = self.cache.match(sequence.namespace, sequence.token_ids, max_pages)
        evictable = self.cache.num_evictable
        self.cache.lock(node)
        missing = -(-tokens // self.page_size) - len(cached)
        if self.num_available - headroom < missing:
            wanted = missing + evictable - self.cache.num_evictable
            self.cache.unlock(node)
            start = len(cached) * self.page_size
            next_page = sequence.token_ids[start : start + self.page_size] if len(cached) < max_pages else []
            sequence.refusal = Refusal(wanted, node, tuple(next_page))
            return False
        sequence.refusal = None
        sequence.node = node
        sequence.pages = (*cached, *self._reserve(missing, sequence.owner))
        sequence.published = sequence.computed = sequence.planned = len(cached) * self.page_size
        sequence.publish_at = sequence.published + self.page_size
        if readable and sequence.preemptions == 0:
            sequence.cached_prompt_tokens = sequence.computed
            self.queries += 1
            self.query_tokens += tokens
            self.hit_tokens += sequence.computed
        return True

    def can_grow(self, sequences: Iterable[Sequence]) -> bool:
        """Whether `grow` would be True for one after the other."""
        return sum(self._num_missing(sequence) for sequence in sequences) <= self.num_available

    def grow(self, sequence: Sequence) -> bool:
        """Make the page table cover every token, those that a plan in flight samples included.

        False, and nothing changes, when no page is available.
        """
        missing = self._num_missing(sequence)
        if missing > self.num_available:
            return False
        if missing:
            sequence.pages += tuple(self._reserve(missing, sequence.owner))
        return True

    def publish(self, sequence: Sequence) -> None:
        """Move the pages that have become full into the prefix cache, where others can read them.

        Where the cache has an equal page already, the sequence goes on with its own and publishes at `release`. To
        change over would alter its page table, and to hold both would let it need more than the pool.
        """
        if sequence.computed < sequence.publish_at or not self._caching:
            return
        sequence.publish_at = (sequence.computed // self.page_size + 1) * self.page_size
        next_page = sequence.token_ids[sequence.published : sequence.published + self.page_size]
        if not self.cache.has_next(_held_node(sequence), sequence.namespace, next_page):
            self._insert_full_pages(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take all pages of `sequence` back: full ones stay cached until evicted, the others become free."""
        if sequence.node is None:
            return
        if self._caching:
            self._insert_full_pages(sequence)
        self.allocator.free(self._private_pages(sequence), sequence.owner)
        self.cache.unlock(_held_node(sequence))
        sequence.node, sequence.pages = None, ()
        sequence.published = sequence.computed = sequence.planned = 0

    def reset_prefix_cache(self) -> None:
        self.allocator.free(self.cache.reset(), PREFIX_CACHE)

    def check_conservation(self, sequences: Iterable[Sequence]) -> None:
        """Check that every page is free, cached, or privately held by exactly one of `sequences`. O(pages).

        Raises:
            ConservationError: names the page and the owner on record, or the owner that leaks.
        """
        self.allocator.check_conservation()
        counts = self.allocator.count_by_owner()
        expected = {FREE: self.allocator.num_free, PREFIX_CACHE: len(self.cache)}
        for sequence in sequences:
            private = self._private_pages(sequence)
            expected[sequence.owner] = len(private)
            for page in private:
                self._check_owner(page, sequence.owner, sequence.owner)
            for page in set(sequence.pages).difference(private):
                self._check_owner(page, PREFIX_CACHE, f"page table of {sequence.owner}")
        for owner in counts.keys() | expected.keys():
            if counts.get(owner, 0) != expected.get(owner, 0):
                raise ConservationError(
                    f"{owner} has {counts.get(owner, 0)} KV pages on record, but {expected.get(owner, 0)} in use: leak"
                )

    def _may_admit_now(self, sequence: Sequence, refusal: Refusal, headroom: int) -> bool:
        """Whether asking again can end otherwise. O(1): the head of the line is asked about in every step."""
        node, next_page = refusal.node, refusal.next_page
        return (
            self.num_available - headroom >= refusal.pages_wanted
            or not self.cache.holds(node)
            or self.cache.has_next(node, sequence.namespace, next_page)
        )

    def _check_owner(self, page: int, owner: str, reader: str) -> None:
        if self.allocator.owner(page) != owner or (owner == PREFIX_CACHE) != (page in self.cache):
            raise ConservationError(f"{reader} has KV page {page}, which belongs to {self.allocator.owner(page)}")

    def _num_missing(self, sequence: Sequence) -> int:
        return max(-(-sequence.num_tokens // self.page_size) - len(sequence.pages), 0)

    def _private_pages(self, sequence: Sequence) -> tuple[int, ...]:
        return sequence.pages[sequence.published // self.page_size :]

    def _insert_full_pages(self, sequence: Sequence) -> None:
        """Hand the full private pages to the prefix cache; those that it has already are freed.

        The page table is right afterwards only if none was refused, or if the sequence is being released.
        """
        start, end = sequence.published // self.page_size, sequence.computed // self.page_size
        tokens = sequence.token_ids[sequence.published : end * self.page_size]
        pages = sequence.pages[start:end]
        sequence.node, refused = self.cache.insert(_held_node(sequence), sequence.namespace, tokens, pages)
        sequence.published = end * self.page_size
        self.allocator.free(refused, sequence.owner)
        self.allocator.transfer(set(pages).difference(refused), sequence.owner, PREFIX_CACHE)

    def _reserve(self, count: int, owner: str) -> list[int]:
        short = count - self.allocator.num_free
        if short > 0:
            self.allocator.free(self.cache.evict(short), PREFIX_CACHE)
        return self.allocator.reserve(count, owner)


def _held_node(sequence: Sequence) -> RadixNode:
    assert sequence.node is not None, f"{sequence.owner} holds no pages"
    return sequence.node

"""The prefix cache: a radix tree over whole KV pages. Called by the scheduler's `KVCacheManager`. No torch, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class RadixNode:
    """One cached page: the KV of `page_size` tokens that follow its parent's. The root holds no page.

    `locks` counts the locks on this node and on every node below it.
    """

    __slots__ = ("children", "key", "locks", "page", "parent")

    def __init__(self, parent: RadixNode | None, key: tuple[str | int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[str | int, ...], RadixNode] = {}
        self.locks = 0


class PrefixMatch(NamedTuple):
    """The longest cached prefix: its last node (the root when nothing matched) and its pages, in token order."""

    node: RadixNode
    pages: list[int]


# Each edge is one page, keyed by the namespace and that page's tokens, so going one page deeper hashes one page:
#
#      tokens   0 ........ 64 ....... 128 ....... 192      page_size 64; a partial page is never in the tree
#      root ----(ns, t0..63)--> A ---(ns, t64..127)--> B
#                                '---(ns, u64..127)--> C   a prompt that shares A and then differs
#
# Who reads a prefix holds one lock, on its last node; it counts in all nodes up to the root. Hence
#   locked(child) => locked(parent),
# and the nodes with no lock form whole subtrees. They are in `_lru`, oldest use first, and a lock that ends appends
# its nodes deepest first, so every child stands before its parent: the head of `_lru` is always a leaf, and
# evicting the least recently used leaf is one popitem.
class RadixCache:
    """Which page holds the KV of which token prefix. It owns the pages that `insert` took, until `evict` returns them.

    The `namespace` is part of the key: it names whatever else changes the KV (model, adapter, salt), and a prefix
    is never matched across namespaces.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self._root = RadixNode(None, (), 0)
        self._nodes: dict[int, RadixNode] = {}  # by page
        self._lru: OrderedDict[int, RadixNode] = OrderedDict()  # by page; exactly the nodes without a lock

    def __len__(self) -> int:
        """Pages in the cache, locked or not."""
        return len(self._nodes)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could return now: those that no lock protects."""
        return len(self._lru)

    def match(self, namespace: str, token_ids: Sequence[int], max_pages: int | None = None) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, of whole pages and of at most `max_pages`.

        Changes nothing: `lock` the node before anything is evicted, or its pages may go to another.
        """
        limit = len(token_ids) // self.page_size
        if max_pages is not None:
            limit = min(limit, max_pages)
        node = self._root
        pages: list[int] = []
        for index in range(limit):
            child = node.children.get(self._key(namespace, token_ids, index))
            if child is None:
                break
            node = child
            pages.append(node.page)
        return PrefixMatch(node, pages)

    def holds(self, node: RadixNode) -> bool:
        """False once `node` was evicted. True for a root."""
        return node.parent is None or self._nodes.get(node.page) is node

    def has_next(self, node: RadixNode, namespace: str, token_ids: Sequence[int]) -> bool:
        """Whether the page that follows `node` with `token_ids`, one page of them, is cached."""
        return self._key(namespace, token_ids, 0) in node.children

    def lock(self, node: RadixNode) -> None:
        """Protect `node` and all its ancestors from eviction until `unlock`."""
        while node.parent is not None:
            self._acquire(node)
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """End one lock on `node`. Pages without a lock left become evictable, as the most recently used."""
        while node.parent is not None:
            if node.locks == 0:
                raise ValueError(f"KV page {node.page} of the prefix cache is unlocked more often than locked")
            node.locks -= 1
            if node.locks == 0:
                self._lru[node.page] = node
            node = node.parent

    def insert(
        self, node: RadixNode, namespace: str, token_ids: Sequence[int], pages: Sequence[int]
    ) -> tuple[RadixNode, list[int]]:
        """Add `pages`, the KV of `token_ids`, below `node`, on which the caller holds a lock (the root needs none).

        Returns the new last node and the refused pages. The caller's lock moves to that node. A page is refused
        when the tree already has those tokens there: it stays the caller's, and the tree's own page stays in place.

        Raises:
            ValueError: `token_ids` is not exactly `pages` full pages, a page is already cached, or `node` is unlocked.
        """
        if len(token_ids) != len(pages) * self.page_size:
            raise ValueError(f"{len(token_ids)} tokens do not fill {len(pages)} pages of {self.page_size}")
        if node.parent is not None and node.locks == 0:
            raise ValueError("insert needs a lock on the node that it extends")
        refused = []
        for index, page in enumerate(pages):
            key = self._key(namespace, token_ids, index)
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, page)
            else:
                refused.append(page)
            self._acquire(child)
            node = child
        return node, refused

    def evict(self, count: int) -> list[int]:
        """Drop up to `count` unlocked pages, least recently used leaf first, and return them. O(1) a page."""
        pages: list[int] = []
        while self._lru and len(pages) < count:
            page, node = self._lru.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.key]
            del self._nodes[page]
            pages.append(page)
        return pages

    def reset(self) -> list[int]:
        """Forget every prefix, and return the unlocked pages.

        Locked pages stay with their readers, but nothing will match them again; once unlocked they are evictable.
        """
        self._root = RadixNode(None, (), 0)
        return self.evict(len(self._lru))

    def _key(self, namespace: str, token_ids: Sequence[int], index: int) -> tuple[str | int, ...]:
        start = index * self.page_size
        return (namespace, *token_ids[start : start + self.page_size])

    def _add(self, parent: RadixNode, key: tuple[str | int, ...], page: int) -> RadixNode:
        if page in self._nodes:
            raise ValueError(f"KV page {page} is already in the prefix cache")
        node = RadixNode(parent, key, page)
        parent.children[key] = self._nodes[page] = self._lru[page] = node
        return node

    def _acquire(self, node: RadixNode) -> None:
        if node.locks == 0:
            del self._lru[node.page]
        node.locks += 1

"""The physical KV pages and who owns each of them. Used by `KVCacheManager`, which shares pages between requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pellucid.core import PellucidError

SCRATCH_PAGE = 0
"""Padded rows of a batch point here. It is never handed out, so nothing real is ever read from it."""

FREE = "free list"
PREFIX_CACHE = "prefix cache"


class ConservationError(PellucidError):
    """A KV page is leaked, shared or freed against the rules: a fault of the engine, told with the page's owner."""


def request_owner(request_id: str) -> str:
    """The owner name of a request's private pages. It can never equal `FREE` or `PREFIX_CACHE`."""
    return f"request {request_id!r}"


# Every page has exactly one owner, and moves only along these arrows:
#
#      free list --reserve--> request --transfer--> prefix cache --free--> free list
#                                '---------------free------------------------^
#
# A request that reads a page of the prefix cache owns nothing of it: it locks the page's node there, which keeps
# the page from being evicted. So sharing needs no reference counts here, and a leak always has a name.
class PageAllocator:
    """Pages `1..num_pages`; page 0 is the scratch page and not counted.

    Every change names the owner, and a change that does not match the record raises `ConservationError`.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._owner = ["scratch page"] + [FREE] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def owner(self, page: int) -> str:
        return self._owner[page]

    def reserve(self, count: int, owner: str) -> list[int]:
        """Take `count` free pages for `owner`.

        Raises:
            ConservationError: fewer are free. The caller evicts or preempts first, so this is its fault.
        """
        if count > len(self._free):
            raise ConservationError(f"{owner} asks for {count} KV pages, but {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owner[page] = owner
        return pages

    def transfer(self, pages: Iterable[int], owner: str, new_owner: str) -> None:
        """Hand `pages` from `owner` to `new_owner`."""
        for page in pages:
            self._check_owner(page, owner)
            self._owner[page] = new_owner

    def free(self, pages: Iterable[int], owner: str) -> None:
        """Give `pages` of `owner` back. Freeing a page twice, or another's page, raises `ConservationError`."""
        for page in pages:
            self._check_owner(page, owner)
            self._owner[page] = FREE
            self._free.append(page)

    def count_by_owner(self) -> dict[str, int]:
        """Pages per owner, the free list included: the values sum to `num_pages`. O(pages)."""
        return dict(Counter(self._owner[1:]))

    def check_conservation(self) -> None:
        """Check that the free list and the owner record agree. O(pages).

        Raises:
            ConservationError: names the page and its owner.
        """
        seen: set[int] = set()
        for page in self._free:
            if page in seen:
                raise ConservationError(f"KV page {page} is in the free list twice")
            seen.add(page)
            self._check_owner(page, FREE)
        for page in range(1, self.num_pages + 1):
            if self._owner[page] == FREE and page not in seen:
                raise ConservationError(f"KV page {page} is recorded as free but is not in the free list")

    def _check_owner(self, page: int, owner: str) -> None:
        if not 1 <= page <= self.num_pages:
            raise ConservationError(f"{owner} gives KV page {page}, which is outside 1..{self.num_pages}")
        if self._owner[page] != owner:
            raise ConservationError(f"KV page {page} belongs to {self._owner[page]}, not to {owner}")

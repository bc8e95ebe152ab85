"""PageAllocator: one owner a page, over random histories and against misuse."""

from __future__ import annotations

import random

import pytest

from pellucid.core import PellucidError
from pellucid.scheduler.page_allocator import (
    FREE,
    PREFIX_CACHE,
    SCRATCH_PAGE,
    ConservationError,
    PageAllocator,
    request_owner,
)


def test_every_page_has_exactly_one_owner_over_random_operations() -> None:
    rng = random.Random(0)
    allocator = PageAllocator(50)
    owners = [request_owner(str(index)) for index in range(6)] + [PREFIX_CACHE]
    held: dict[str, list[int]] = {owner: [] for owner in owners}

    def take(owner: str) -> list[int]:
        rng.shuffle(held[owner])
        count = rng.randint(0, len(held[owner]))
        taken, held[owner] = held[owner][:count], held[owner][count:]
        return taken

    for step in range(100_000):
        owner, other = rng.sample(owners, 2)
        action = rng.randrange(3)
        if action == 0:
            pages = allocator.reserve(rng.randint(0, min(8, allocator.num_free)), owner)
            assert SCRATCH_PAGE not in pages
            held[owner] += pages
        elif action == 1:
            pages = take(owner)
            allocator.transfer(pages, owner, other)
            held[other] += pages
        else:
            allocator.free(take(owner), owner)
        assert allocator.num_free + sum(map(len, held.values())) == allocator.num_pages
        if step % 500 == 0:
            allocator.check_conservation()
            every = [page for pages in held.values() for page in pages]
            assert len(set(every)) == len(every)
            counts = {name: len(pages) for name, pages in held.items() if pages}
            assert allocator.count_by_owner() == {
                **counts,
                **({FREE: allocator.num_free} if allocator.num_free else {}),
            }


def test_the_scratch_page_is_never_handed_out() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.reserve(5, "a")) == [1, 2, 3, 4, 5]
    assert allocator.num_free == 0


def test_a_page_freed_twice_is_refused_with_its_owner() -> None:
    allocator = PageAllocator(4)
    pages = allocator.reserve(1, "request 'a'")
    allocator.free(pages, "request 'a'")
    with pytest.raises(ConservationError, match=f"page {pages[0]} belongs to free list, not to request 'a'"):
        allocator.free(pages, "request 'a'")
    allocator.check_conservation()


def test_another_owner_cannot_free_or_hand_on_a_page() -> None:
    allocator = PageAllocator(4)
    pages = allocator.reserve(2, "request 'a'")
    with pytest.raises(ConservationError, match="belongs to request 'a', not to request 'b'"):
        allocator.free(pages, "request 'b'")
    with pytest.raises(ConservationError, match="belongs to request 'a', not to request 'b'"):
        allocator.transfer(pages, "request 'b'", PREFIX_CACHE)
    assert allocator.num_free == 2


@pytest.mark.parametrize("page", [SCRATCH_PAGE, -1, 5])
def test_a_page_outside_the_pool_is_refused(page: int) -> None:
    with pytest.raises(ConservationError, match=r"outside 1\.\.4"):
        PageAllocator(4).free([page], FREE)


def test_more_than_what_is_free_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(3)
    with pytest.raises(PellucidError, match="asks for 4 KV pages, but 3 are free"):
        allocator.reserve(4, "request 'a'")
    assert allocator.num_free == 3


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)


def test_no_request_id_can_pose_as_the_free_list_or_the_cache() -> None:
    assert not {request_owner(name) for name in (FREE, PREFIX_CACHE, "")} & {FREE, PREFIX_CACHE}

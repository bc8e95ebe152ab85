"""Who reads the prefix cache, how far, and who must not."""

from __future__ import annotations

from collections import defaultdict

import pytest

from pellucid.core import Request, SamplingParams
from pellucid.scheduler.scheduler import Scheduler, SchedulerConfig

P1 = tuple(range(500))
P2 = P1[:448] + tuple(range(1000, 1052))
P3 = P1[:64]


def make_scheduler(num_pages: int = 64, force_preempt_every: int | None = None) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=1024,
            num_pages=num_pages,
            page_size=64,
            prefill_chunk_tokens=128,
            force_preempt_every=force_preempt_every,
        )
    )


def computed_ranges(scheduler: Scheduler) -> dict[str, list[tuple[int, int]]]:
    """Run to the end; the half-open ranges that were computed for each request, in order."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    while (plan := scheduler.plan_step()) is not None:
        assert plan.step < 2000, "no end in sight"
        for row in plan.scheduled:
            ranges[row.request_id].append((row.start, row.start + len(row.token_ids)))
        scheduler.commit(plan, {row.request_id: 7 for row in plan.scheduled if row.sample})
    return dict(ranges)


def serve(scheduler: Scheduler, name: str, prompt: tuple[int, ...], salt: str = "") -> int:
    """Serve one plain request alone; how many of its prompt tokens came from the cache."""
    scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=1), cache_salt=salt))
    return computed_ranges(scheduler)[name][0][0]


def bypassing(name: str, prompt: tuple[int, ...], how: str) -> Request:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0 if how == "prompt_logprobs" else None)
    return Request(name, prompt, params, capture_hidden=how == "capture_hidden")


@pytest.mark.parametrize("how", ["capture_hidden", "prompt_logprobs"])
@pytest.mark.parametrize("force_preempt_every", [None, 2])
def test_c11_every_prompt_position_is_computed_whatever_is_cached(how: str, force_preempt_every: int | None) -> None:
    scheduler = make_scheduler(force_preempt_every=force_preempt_every)
    for repeat in range(2):
        prompts = {f"p1-{repeat}": P1, f"p2-{repeat}": P2, f"p3-{repeat}": P3}
        for name, prompt in prompts.items():
            scheduler.add_request(bypassing(name, prompt, how))
        for name, ranges in computed_ranges(scheduler).items():
            restarts = [index for index, (start, _) in enumerate(ranges) if start == 0]
            last_run = ranges[restarts[-1] :]
            assert [start for start, _ in last_run] == [0] + [end for _, end in last_run[:-1]]
            assert last_run[-1][1] == len(prompts[name])
            assert all(end - start <= 128 for start, end in ranges)
        scheduler.check_conservation()
    assert scheduler.stats().prefix_cache_queries == 0


@pytest.mark.parametrize("how", ["capture_hidden", "prompt_logprobs"])
def test_a_request_that_must_not_read_the_cache_still_writes_it(how: str) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(bypassing("a", P1, how))
    computed_ranges(scheduler)
    assert serve(scheduler, "b", P2) == 448


def test_a_shared_prefix_is_read_in_whole_pages_and_counted() -> None:
    scheduler = make_scheduler()
    assert serve(scheduler, "p1", P1) == 0
    assert serve(scheduler, "p2", P2) == 448
    assert serve(scheduler, "shorter", P1[:447]) == 384
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_query_tokens) == (3, 500 + 500 + 447)
    assert stats.prefix_cache_hit_tokens == 448 + 384


def test_a_match_never_covers_the_last_prompt_token() -> None:
    scheduler = make_scheduler()
    assert serve(scheduler, "a", P1[:128]) == 0
    assert serve(scheduler, "b", P1[:128]) == 64
    assert serve(scheduler, "c", P1[:129]) == 128


def test_different_salts_never_share() -> None:
    scheduler = make_scheduler()
    assert serve(scheduler, "a", P1, salt="x") == 0
    assert serve(scheduler, "b", P1, salt="y") == 0
    assert serve(scheduler, "c", P1) == 0
    assert serve(scheduler, "d", P1, salt="x") == 448


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(Request("a", P1[:60], SamplingParams(max_tokens=70)))
    computed_ranges(scheduler)
    assert serve(scheduler, "b", (*P1[:60], *(7,) * 70)) == 128


def test_a_running_prefill_is_shared_chunk_by_chunk() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(Request("a", P1, SamplingParams(max_tokens=1)))
    first = scheduler.plan_step()
    assert first is not None
    scheduler.commit(first, {})
    scheduler.add_request(Request("b", P1, SamplingParams(max_tokens=1)))
    second = scheduler.plan_step()
    assert second is not None
    assert [(row.request_id, row.start) for row in second.scheduled] == [("a", 128), ("b", 128)]
    assert second.scheduled[0].pages[:2] == second.scheduled[1].pages[:2]


def test_a_reset_forgets_every_prefix() -> None:
    scheduler = make_scheduler()
    serve(scheduler, "a", P1)
    scheduler.reset_prefix_cache()
    assert scheduler.stats().free_pages == 64
    assert serve(scheduler, "b", P1) == 0


def test_an_update_tells_how_much_of_the_prompt_was_cached() -> None:
    scheduler = make_scheduler()
    serve(scheduler, "a", P1)
    scheduler.add_request(Request("b", P2, SamplingParams(max_tokens=1)))
    plan = scheduler.plan_step()
    assert plan is not None
    (update,) = scheduler.commit(plan, {"b": 7})
    assert update.cached_prompt_tokens == 448


def test_twins_need_no_more_pages_than_strangers() -> None:
    """A pool that holds one of two equal requests: what one has cached must not count against the other."""
    scheduler = make_scheduler(num_pages=2)
    for name in ("a", "b"):
        scheduler.add_request(Request(name, P3, SamplingParams(max_tokens=64), capture_hidden=True))
    ranges = computed_ranges(scheduler)
    assert {name: spans[-1] for name, spans in ranges.items()} == {"a": (126, 127), "b": (126, 127)}


def test_a_waiting_request_is_admitted_as_soon_as_another_has_computed_enough_of_its_prefix() -> None:
    """Each needs 8 of the 14 pages, but the second only 4 once the first has computed 256 tokens, in two steps."""
    scheduler = make_scheduler(num_pages=14)
    for name in ("a", "b"):
        scheduler.add_request(Request(name, P1, SamplingParams(max_tokens=100)))
    first_rows: dict[str, tuple[int, int]] = {}
    while "b" not in first_rows:
        plan = scheduler.plan_step()
        assert plan is not None
        for row in plan.scheduled:
            first_rows.setdefault(row.request_id, (plan.step, row.start))
        scheduler.commit(plan, {row.request_id: 7 for row in plan.scheduled if row.sample})
    assert first_rows == {"a": (1, 0), "b": (3, 256)}

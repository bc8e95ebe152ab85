"""The order of a step, its budget, preemption, and ending a request in each of its states."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import PlanError, Request, SamplingParams
from pellucid.scheduler.page_allocator import ConservationError
from pellucid.scheduler.scheduler import Scheduler, SchedulerConfig
from pellucid.step_plan import SequenceUpdate, StepPlan


def make_scheduler(**changes: Any) -> Scheduler:
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 256,
        "num_pages": 32,
        "page_size": 4,
        "enable_prefix_caching": False,
    }
    return Scheduler(SchedulerConfig(**(settings | changes)))


def add(scheduler: Scheduler, name: str, prompt_tokens: int, max_tokens: int = 4) -> None:
    prompt = tuple(range(prompt_tokens))
    scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=max_tokens)))


def plan_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan_step()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan) -> tuple[SequenceUpdate, ...]:
    return scheduler.commit(plan, {row.request_id: 99 for row in plan.scheduled if row.sample})


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step; the (request, start, tokens) of its rows."""
    plan = plan_step(scheduler)
    commit(scheduler, plan)
    return [(row.request_id, row.start, len(row.token_ids)) for row in plan.scheduled]


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = make_scheduler()
    assert scheduler.plan_step() is None
    assert not scheduler.has_unfinished()


def test_decode_rows_come_first_then_prefill_chunks_within_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 7)
    add(scheduler, "b", 25)
    assert step(scheduler) == [("a", 0, 7), ("b", 0, 3)]
    plan = plan_step(scheduler)
    assert [(row.request_id, row.start, row.is_prefill, row.sample) for row in plan.scheduled] == [
        ("a", 7, False, True),
        ("b", 3, True, False),
    ]
    assert (plan.num_decode, plan.num_tokens) == (1, 10)
    commit(scheduler, plan)
    assert step(scheduler) == [("a", 8, 1), ("b", 12, 9)]
    assert step(scheduler) == [("a", 9, 1), ("b", 21, 4)]
    assert step(scheduler) == [("b", 25, 1)]


def test_a_prefill_advances_even_when_decode_rows_leave_one_token_of_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64)
    for name in "abc":
        add(scheduler, name, 1, max_tokens=20)
    step(scheduler)
    add(scheduler, "d", 5)
    for position in range(5):
        assert step(scheduler)[-1] == ("d", position, 1)


def test_the_chunk_cap_of_a_long_prompt_leaves_budget_to_the_next() -> None:
    scheduler = make_scheduler(prefill_chunk_tokens=6)
    add(scheduler, "a", 20)
    add(scheduler, "b", 5)
    assert step(scheduler) == [("a", 0, 6), ("b", 0, 5)]


def test_admission_is_in_order_of_arrival_even_when_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_pages=6)
    add(scheduler, "a", 12, max_tokens=3)
    add(scheduler, "b", 16)
    add(scheduler, "c", 1, max_tokens=1)
    seen = [name for _ in range(8) if scheduler.has_unfinished() for name, start, _ in step(scheduler) if start == 0]
    assert seen == ["a", "b", "c"]


def test_at_most_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2)
    assert [name for name, _, _ in step(scheduler)] == ["a", "b"]
    assert (scheduler.stats().running, scheduler.stats().waiting) == (2, 1)


def test_the_newest_is_preempted_for_the_oldest_and_recomputes_what_it_had() -> None:
    scheduler = make_scheduler(num_pages=5)
    add(scheduler, "a", 7, max_tokens=12)
    add(scheduler, "b", 7, max_tokens=3)
    assert step(scheduler) == [("a", 0, 7), ("b", 0, 7)]
    assert step(scheduler) == [("a", 7, 1), ("b", 7, 1)]
    plan = plan_step(scheduler)
    assert plan.preempted == ("b",)
    assert [row.request_id for row in plan.scheduled] == ["a"]
    commit(scheduler, plan)
    while (rows := step(scheduler))[0][0] != "b":
        assert [name for name, _, _ in rows] == ["a"]
    assert rows == [("b", 0, 9)]
    assert scheduler.stats().preemptions == 1


def test_nobody_is_admitted_into_the_page_that_a_running_request_needs_next() -> None:
    scheduler = make_scheduler(num_pages=6)
    add(scheduler, "a", 7, max_tokens=6)
    add(scheduler, "b", 15, max_tokens=2)
    while scheduler.has_unfinished():
        step(scheduler)
    assert scheduler.stats().preemptions == 0


def test_a_preempted_request_finds_its_pages_in_the_prefix_cache() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True, force_preempt_every=4)
    add(scheduler, "a", 6, max_tokens=12)
    scheduler.add_request(Request("b", (50, 51, 52, 53, 54, 55), SamplingParams(max_tokens=12)))
    for _ in range(3):
        step(scheduler)
    plan = plan_step(scheduler)
    assert plan.preempted == ("b",)
    commit(scheduler, plan)
    plan = plan_step(scheduler)
    row = plan.scheduled[-1]
    assert (row.request_id, row.start, row.token_ids, row.is_prefill) == ("b", 8, (99,), True)
    (_, update) = commit(scheduler, plan)
    assert (update.preemptions, update.cached_prompt_tokens) == (1, 0)


def test_the_page_table_of_a_running_request_only_grows_at_its_end() -> None:
    """Twin requests: what the first caches must not change the table of the second under its feet."""
    scheduler = make_scheduler(enable_prefix_caching=True)
    add(scheduler, "a", 6, max_tokens=20)
    add(scheduler, "b", 6, max_tokens=20)
    tables: dict[str, tuple[int, ...]] = {}
    while (plan := scheduler.plan_step()) is not None:
        for row in plan.scheduled:
            assert row.pages[: len(tables.get(row.request_id, ()))] == tables.get(row.request_id, ())
            tables[row.request_id] = row.pages
        commit(scheduler, plan)
    assert {name: len(table) for name, table in tables.items()} == {"a": 7, "b": 7}


def free_pages(scheduler: Scheduler) -> int:
    scheduler.check_conservation()
    return scheduler.stats().free_pages


def test_abort_ends_a_waiting_request() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    assert scheduler.abort("a")
    assert not scheduler.has_unfinished()
    assert scheduler.plan_step() is None


@pytest.mark.parametrize("prompt_tokens", [4, 40])
def test_abort_ends_a_running_request_in_prefill_or_decode_and_frees_its_pages(prompt_tokens: int) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", prompt_tokens)
    step(scheduler)
    assert free_pages(scheduler) < 32
    assert scheduler.abort("a")
    assert free_pages(scheduler) == 32
    assert scheduler.plan_step() is None


def test_abort_ends_a_preempted_request() -> None:
    scheduler = make_scheduler(force_preempt_every=2)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    step(scheduler)
    plan = plan_step(scheduler)
    assert plan.preempted == ("b",)
    commit(scheduler, plan)
    assert scheduler.abort("b")
    assert [name for name, _, _ in step(scheduler)] == ["a"]
    assert scheduler.stats().waiting == 0


def test_abort_between_plan_and_commit_frees_the_pages_only_at_the_commit() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    plan = plan_step(scheduler)
    assert scheduler.abort("a")
    assert free_pages(scheduler) == 30
    assert (scheduler.stats().running, scheduler.stats().held_pages) == (1, 2)
    assert [update.request_id for update in commit(scheduler, plan)] == ["b"]
    assert free_pages(scheduler) == 31
    assert [name for name, _, _ in step(scheduler)] == ["b"]


def test_abort_of_a_waiting_request_while_others_compute_takes_effect_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    plan = plan_step(scheduler)
    assert scheduler.abort("b")
    assert scheduler.stats().waiting == 0
    add(scheduler, "b", 2)
    assert [update.request_id for update in commit(scheduler, plan)] == ["a"]
    assert free_pages(scheduler) == 31


def test_abort_of_an_unknown_or_ended_request_is_false() -> None:
    scheduler = make_scheduler()
    assert not scheduler.abort("a")
    add(scheduler, "a", 4, max_tokens=1)
    step(scheduler)
    assert not scheduler.abort("a")


@pytest.mark.parametrize("in_flight", [False, True])
def test_finish_ends_with_stop_and_the_stop_string(in_flight: bool) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    step(scheduler)
    plan = plan_step(scheduler) if in_flight else None
    update = scheduler.finish("a", "END")
    assert update is not None
    assert update[:4] == ("a", None, "stop", "END")
    assert scheduler.finish("a", "END") is None
    if plan is not None:
        assert commit(scheduler, plan) == ()
    assert free_pages(scheduler) == 32
    assert not scheduler.has_unfinished()


def test_a_second_plan_before_the_commit_is_refused() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    plan = plan_step(scheduler)
    with pytest.raises(RuntimeError, match="not committed"):
        scheduler.plan_step()
    commit(scheduler, plan)
    with pytest.raises(RuntimeError, match="not in flight"):
        commit(scheduler, plan)


def test_a_commit_without_a_token_for_a_sampled_row_changes_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    plan = plan_step(scheduler)
    with pytest.raises(KeyError, match="'a'"):
        scheduler.commit(plan, {})
    assert [update.token_id for update in commit(scheduler, plan)] == [99]


def test_equal_calls_give_equal_plans() -> None:
    left, right = (make_scheduler(num_pages=6, enable_prefix_caching=True) for _ in range(2))
    for scheduler in (left, right):
        for name in "abc":
            add(scheduler, name, 6, max_tokens=8)
    while (plan := left.plan_step()) is not None:
        assert right.plan_step() == plan
        assert commit(left, plan) == commit(right, plan)
    assert right.plan_step() is None


def test_a_leaked_page_is_reported_with_its_owner() -> None:
    scheduler = make_scheduler()
    scheduler._kv.allocator.reserve(2, "request 'ghost'")
    with pytest.raises(ConservationError, match="request 'ghost' has 2 KV pages on record, but 0 in use: leak"):
        scheduler.check_conservation()
    stats = scheduler.stats()
    assert stats.free_pages + stats.cached_pages + stats.held_pages == stats.total_pages - 2


def test_a_page_freed_under_a_running_request_is_reported_with_that_request() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    plan = plan_step(scheduler)
    commit(scheduler, plan)
    scheduler._kv.allocator.free(plan.scheduled[0].pages, "request 'a'")
    with pytest.raises(ConservationError, match="request 'a' has KV page 1, which belongs to free list"):
        scheduler.check_conservation()


def test_without_chunked_prefill_a_prompt_waits_for_room_and_is_computed_whole() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16)
    add(scheduler, "short", 4, max_tokens=2)
    add(scheduler, "long", 14, max_tokens=1)
    chunks: dict[str, list[int]] = {}
    while scheduler.has_unfinished():
        plan = plan_step(scheduler)
        for row in plan.scheduled:
            chunks.setdefault(row.request_id, []).append(len(row.token_ids))
        commit(scheduler, plan)
    assert chunks == {"short": [4, 1], "long": [14]}


def test_without_chunked_prefill_a_step_must_hold_a_whole_prompt() -> None:
    with pytest.raises(PlanError, match="max_num_batched_tokens"):
        make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=256)


def test_a_prompt_that_is_scored_is_computed_in_small_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1024, max_model_len=1024, num_pages=256)
    prompt = tuple(range(600))
    scheduler.add_request(Request("scored", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    chunks = []
    while scheduler.has_unfinished():
        plan = plan_step(scheduler)
        chunks += [len(row.token_ids) for row in plan.scheduled]
        commit(scheduler, plan)
    assert chunks == [256, 256, 88]


def test_a_chunk_of_a_long_context_is_no_dearer_than_the_limit() -> None:
    """Tokens of a chunk times the context at its end; a first chunk as large as the limit's root."""
    config = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=512, max_model_len=2048, num_pages=64, max_chunk_context=64 * 64
    )
    scheduler = Scheduler(config)
    scheduler.add_request(Request("long", tuple(range(1000)), SamplingParams(max_tokens=1)))
    chunks = []
    while (plan := scheduler.plan_step()) is not None:
        chunks.append((plan.scheduled[0].start, len(plan.scheduled[0].token_ids)))
        scheduler.commit(plan, {"long": 1})
    assert chunks[0] == (0, 64)
    assert sum(count for _, count in chunks) == 1000
    assert all(count == 1 or count * (start + count) <= 64 * 64 for start, count in chunks)
    # And no smaller than it has to be.
    assert all((count + 1) * (start + count + 1) > 64 * 64 for start, count in chunks[:-1])

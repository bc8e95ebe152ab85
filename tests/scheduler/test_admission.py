"""What `add_request` refuses, and that a refused request costs the others nothing."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.core import InvalidRequestError, PlanError, Request, SamplingParams
from pellucid.scheduler.scheduler import Scheduler, SchedulerConfig


def small_engine(max_model_len: int = 256, num_pages: int = 4) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=512,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=16,
        )
    )


def request(name: str, prompt_tokens: int, max_tokens: int | None, min_tokens: int = 0) -> Request:
    return Request(name, tuple(range(prompt_tokens)), SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens))


def drain(scheduler: Scheduler) -> dict[str, tuple[int, str]]:
    """Run to the end; the number of output tokens and the finish reason of each request."""
    tokens: dict[str, int] = {}
    ends: dict[str, tuple[int, str]] = {}
    while (plan := scheduler.plan_step()) is not None:
        for update in scheduler.commit(plan, {row.request_id: 7 for row in plan.scheduled if row.sample}):
            tokens[update.request_id] = tokens.get(update.request_id, 0) + (update.token_id is not None)
            if update.finish_reason is not None:
                ends[update.request_id] = (tokens[update.request_id], update.finish_reason)
    return ends


def test_c06_a_request_that_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    scheduler = small_engine()
    with pytest.raises(InvalidRequestError, match=r"100 tokens and max_tokens 8 .* 64 tokens \(the KV pool"):
        scheduler.add_request(request("a", 100, 8))
    scheduler.add_request(request("b", 10, 8))
    for name, prompt_tokens, max_tokens in (("c", 60, 8), ("d", 256, 1), ("e", 257, 0)):
        with pytest.raises(InvalidRequestError, match=f"{prompt_tokens} tokens and max_tokens {max_tokens} "):
            scheduler.add_request(request(name, prompt_tokens, max_tokens))
    assert drain(scheduler) == {"b": (8, "length")}

    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.held_pages) == (0, 0, 0)
    scheduler.reset_prefix_cache()
    assert scheduler.stats().free_pages * 16 == 64
    scheduler.add_request(request("b", 10, 8))
    assert drain(scheduler) == {"b": (8, "length")}


def test_the_message_names_the_limit_that_binds_and_its_remedy() -> None:
    with pytest.raises(InvalidRequestError, match=r"32 tokens \(max_model_len\); .*--max-model-len") as refusal:
        small_engine(max_model_len=32).add_request(request("a", 40, 1))
    assert refusal.value.param == "prompt_token_ids"
    with pytest.raises(InvalidRequestError, match=r"4 pages of 16.*--gpu-memory-utilization") as refusal:
        small_engine().add_request(request("a", 40, 30))
    assert refusal.value.param == "max_tokens"


@pytest.mark.parametrize("max_model_len", [64, 256])
def test_what_fits_exactly_is_served(max_model_len: int) -> None:
    scheduler = small_engine(max_model_len)
    scheduler.add_request(request("a", 56, 8))
    scheduler.add_request(request("b", 64, 0))
    with pytest.raises(InvalidRequestError, match="57 tokens and max_tokens 8 make 65 tokens"):
        scheduler.add_request(request("c", 57, 8))
    assert drain(scheduler) == {"a": (8, "length"), "b": (0, "length")}


@pytest.mark.parametrize(("max_model_len", "limit"), [(40, 40), (256, 64)])
def test_without_max_tokens_a_request_ends_with_length_at_the_smaller_limit(max_model_len: int, limit: int) -> None:
    scheduler = small_engine(max_model_len)
    scheduler.add_request(request("a", 30, None))
    assert drain(scheduler) == {"a": (limit - 30, "length")}


def test_without_max_tokens_there_must_be_room_for_one_token_and_for_min_tokens() -> None:
    scheduler = small_engine()
    with pytest.raises(InvalidRequestError, match="64 tokens and one generated token make 65"):
        scheduler.add_request(request("a", 64, None))
    with pytest.raises(InvalidRequestError, match="60 tokens and min_tokens 5 make 65") as refusal:
        scheduler.add_request(request("a", 60, None, min_tokens=5))
    assert refusal.value.param == "min_tokens"
    assert not scheduler.has_unfinished()


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'a' has an empty prompt"):
        small_engine().add_request(request("a", 0, 8))


def test_an_id_is_refused_while_it_is_in_use_and_free_again_afterwards() -> None:
    scheduler = small_engine()
    scheduler.add_request(request("a", 10, 8))
    with pytest.raises(InvalidRequestError, match="'a' is still being served"):
        scheduler.add_request(request("a", 3, 1))
    plan = scheduler.plan_step()
    assert plan is not None
    scheduler.abort("a")
    with pytest.raises(InvalidRequestError, match="'a' is still being served"):
        scheduler.add_request(request("a", 3, 1))  # the step in flight still writes to the pages of the old one
    scheduler.commit(plan, {"a": 7})
    scheduler.add_request(request("a", 3, 1))
    assert drain(scheduler) == {"a": (1, "length")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3},
        {"max_model_len": 0},
        {"num_pages": 0},
        {"page_size": 0},
        {"prefill_chunk_tokens": 0},
        {"force_preempt_every": 0},
    ],
)
def test_a_config_out_of_range_is_refused_by_name(wrong: dict[str, int]) -> None:
    right: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64, "num_pages": 4}
    SchedulerConfig(**right)
    with pytest.raises(PlanError, match=next(iter(wrong))):
        SchedulerConfig(**(right | wrong))

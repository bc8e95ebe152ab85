"""What passes between the scheduler and the engine loop, as frozen plain values: plans, updates, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pellucid.core import FinishReason

UNKNOWN_TOKEN = -1
"""Stands in a decode row for the token that the step before it samples: the newest of that request."""


class ScheduledSequence(NamedTuple):
    """One row of a step: compute the KV of positions `[start, start + len(token_ids))`.

    `pages` is the page table of the sequence from position 0: position p lies in `pages[p // page_size]` at offset
    `p % page_size`, and the table covers every position of the row. From row to row of a request it only grows at its
    end, unless the request was preempted in between. With `sample`, the logits of the last position
    are sampled. A row with `is_prefill` False is a decode row: one generated token, `UNKNOWN_TOKEN` where the step that
    samples it is still in flight. All others are prefill, a single prompt token and a recomputation after preemption
    included.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]
    sample: bool
    is_prefill: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the model: `num_decode` decode rows first, then the prefill chunks.

    `preempted` lists the requests that lost their pages when this step was planned; they come back as prefill rows
    from an earlier start. All pages that the rows need are reserved.
    """

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    num_decode: int
    num_tokens: int
    preempted: tuple[str, ...] = ()


class SequenceUpdate(NamedTuple):
    """What a step, or a stop string, did to one request.

    `token_id` is None when nothing was sampled (`max_tokens=0`, or a stop string). `stop_reason` is the token id or
    the stop string that ended it, None for an end-of-sequence token. A token that ends the request is reported here;
    whether its text is shown is the detokenizer's decision. The last two fields are for the request's metrics.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cached_prompt_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts now, then totals since the start.

    `free_pages + cached_pages + held_pages == total_pages`. Held pages belong to requests or are read by them; cached
    pages are only kept for reuse and are given up on demand. The prefix cache is asked once a request, when it is
    first admitted: `prefix_cache_query_tokens` counts the prompt tokens asked for, `hit_tokens` those found.
    """

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    held_pages: int
    total_pages: int
    steps: int
    preemptions: int
    prefix_cache_queries: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int

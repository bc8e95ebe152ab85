"""Turns the scheduler's `StepPlan` into the tensors of a step. Called by `runner.model_runner`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pellucid.attention.base import AttentionBackend, AttentionMetadata, Span
from pellucid.kernels.device import to_device
from pellucid.kvcache.pool import KVPool
from pellucid.layers.batch import AttentionSegment, ForwardBatch
from pellucid.step_plan import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    import torch


def build_forward_batch(
    plan: StepPlan,
    pool: KVPool,
    device: torch.device,
    decode_backend: AttentionBackend,
    prefill_backend: AttentionBackend,
    all_logits: frozenset[str],
) -> ForwardBatch:
    """The batch of one step. `all_logits` are the requests that want logits of every row, not of the last."""
    import torch

    places = place_tokens(plan.scheduled, pool.page_size, all_logits)
    groups = [(plan.scheduled[: plan.num_decode], decode_backend), (plan.scheduled[plan.num_decode :], prefill_backend)]
    if decode_backend == prefill_backend:
        # One kernel serves both phases: one call for all rows.
        groups = [(plan.scheduled, decode_backend)]
    segments, start = [], 0
    for rows, backend in groups:
        if rows:
            stop = start + sum(len(row.token_ids) for row in rows)
            segments.append(AttentionSegment(start, stop, backend, attention_metadata(rows, device)))
            start = stop

    token_ids, positions, slots, logit_rows = (to_device(values, torch.int64, device) for values in places)
    return ForwardBatch(token_ids, positions, slots, tuple(segments), pool, logit_rows)


class TokenPlaces(NamedTuple):
    """Of every token of some rows, one after another: id, position, and slot of the pool; and the rows with logits."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    logit_rows: list[int]


def place_tokens(rows: Sequence[ScheduledSequence], page_size: int, all_logits: Container[str] = ()) -> TokenPlaces:
    """`all_logits` as in `build_forward_batch`."""
    places = TokenPlaces([], [], [], [])
    for row in rows:
        begin, stop = len(places.token_ids), row.start + len(row.token_ids)
        places.token_ids.extend(row.token_ids)
        places.positions.extend(range(row.start, stop))
        places.slots.extend(row.pages[p // page_size] * page_size + p % page_size for p in range(row.start, stop))
        if row.request_id in all_logits:
            places.logit_rows.extend(range(begin, len(places.token_ids)))
        elif row.sample:
            places.logit_rows.append(len(places.token_ids) - 1)
    return places


def attention_metadata(rows: Sequence[ScheduledSequence], device: torch.device) -> AttentionMetadata:
    """Where the query rows of `rows`, numbered from 0, look."""
    import torch

    width = max(len(row.pages) for row in rows)
    table = [row.pages + (0,) * (width - len(row.pages)) for row in rows]
    sequence: list[int] = []
    context: list[int] = []
    spans = []
    for index, row in enumerate(rows):
        begin, stop = len(sequence), row.start + len(row.token_ids)
        sequence += [index] * len(row.token_ids)
        context += range(row.start + 1, stop + 1)
        spans.append(Span(begin, len(sequence), stop))

    page_table, sequences, contexts = (to_device(values, torch.int32, device) for values in (table, sequence, context))
    return AttentionMetadata(page_table, sequences, contexts, tuple(spans))

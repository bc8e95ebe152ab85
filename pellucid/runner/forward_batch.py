"""Turns the scheduler's `StepPlan` into the tensors of a step. Called by `runner.model_runner`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pellucid.attention.base import AttentionBackend, AttentionMetadata, Span
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

    page_size = pool.page_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for row in plan.scheduled:
        begin, stop = len(token_ids), row.start + len(row.token_ids)
        token_ids += row.token_ids
        positions += range(row.start, stop)
        slots += [row.pages[p // page_size] * page_size + p % page_size for p in range(row.start, stop)]
        if row.request_id in all_logits:
            logit_rows += range(begin, len(token_ids))
        elif row.sample:
            logit_rows.append(len(token_ids) - 1)

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

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ForwardBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        segments=tuple(segments),
        pool=pool,
        logit_rows=tensor(logit_rows),
    )


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

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionMetadata(tensor(table), tensor(sequence), tensor(context), tuple(spans))

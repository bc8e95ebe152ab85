"""`ForwardBatch`: the tensors of one step, complete at birth. Built by `runner.forward_batch`, read by layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import AttentionBackend, AttentionMetadata
from pellucid.kvcache.pool import KVPool

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Rows [start, stop) of the batch that one attention backend computes: the decode rows, or the prefill rows."""

    start: int
    stop: int
    backend: AttentionBackend
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One row per token: decode rows first, then prefill chunks.

    `slots`: where a token's KV row goes, page * page_size + offset; -1 writes nothing (a padded row).
    `logit_rows`: the rows whose logits are wanted, ascending.
    """

    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: torch.Tensor  # int64 [tokens]
    segments: tuple[AttentionSegment, ...]
    pool: KVPool
    logit_rows: torch.Tensor  # int64 [wanted]

    def attend(self, compute: Callable[[AttentionSegment], torch.Tensor]) -> torch.Tensor:
        """`compute` of every segment, rows in batch order."""
        import torch

        outputs = [compute(segment) for segment in self.segments]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

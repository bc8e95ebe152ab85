"""Attention in plain torch: the reference every other backend is compared with, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata, Expand
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="reference",
    op="attention",
    summary="plain torch, gathers the pages and multiplies",
    priority=Priority.REFERENCE,
    source="this file",
    built_in=True,
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cpu", "cuda"}),
    sm=ANY,
    attention=frozenset({"mla", "gqa"}),
    mla_dims=ANY,
    head_dims=ANY,
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"fp32", "bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row", "nhd"}),
    compute_dtypes=frozenset({"fp32", "bf16", "fp16"}),
)


MAX_SCORES = 1 << 24
"""Scores held at once, fp32: a long prompt is attended to in blocks of queries, or its scores would fill the memory."""


def create(context: KernelContext, phase: Phase) -> ReferenceAttention:
    """Prefill rebuilds K and V from the latent (fewer multiplications for long queries); decode stays absorbed."""
    return ReferenceAttention(expands_latent=phase == "prefill")


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """Gathers each sequence's pages and multiplies, in fp32. Implements `AttentionBackend`."""

    expands_latent: bool = False

    def gqa(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        out = q.new_zeros(q.shape)
        for index, span in enumerate(metadata.spans):
            if span.context == 0:
                continue
            pages = metadata.page_table[index]
            k = _context_rows(keys, pages, span.context).unflatten(-1, (num_kv_heads, -1))
            v = _context_rows(values, pages, span.context).unflatten(-1, (num_kv_heads, -1))
            group = q.shape[1] // num_kv_heads
            out[span.start : span.stop] = _attend(
                q[span.start : span.stop], k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scale
            )
        return out

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        out = q.new_zeros(q.shape[0], q.shape[1], kv_lora_rank)
        for index, span in enumerate(metadata.spans):
            if span.context == 0:
                continue
            rows = _context_rows(latent, metadata.page_table[index], span.context).unsqueeze(1)
            rows = rows.expand(-1, q.shape[1], -1)
            out[span.start : span.stop] = _attend(q[span.start : span.stop], rows, rows[..., :kv_lora_rank], scale)
        return out

    def mla_expanded(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        kv_lora_rank: int,
        scale: float,
        expand: Expand,
    ) -> torch.Tensor:
        import torch

        pieces = []
        for index, span in enumerate(metadata.spans):
            # A padded span still takes part, on one scratch row, because only `expand` knows the width of V.
            rows = _context_rows(latent, metadata.page_table[index], max(span.context, 1)).to(q.dtype)
            k_nope, v = expand(rows[:, :kv_lora_rank])
            k_rope = rows[:, None, kv_lora_rank:].expand(-1, q.shape[1], -1)
            if span.context == 0:
                pieces.append(v.new_zeros(span.stop - span.start, *v.shape[1:]))
                continue
            pieces.append(_attend(q[span.start : span.stop], torch.cat([k_nope, k_rope], dim=-1), v, scale))
        return torch.cat(pieces)


def _context_rows(cache: torch.Tensor, pages: torch.Tensor, context: int) -> torch.Tensor:
    """The first `context` cached rows of one sequence, [context, width]."""
    count = -(-context // cache.shape[1])
    return cache[pages[:count].long()].flatten(0, 1)[:context]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, heads, d] are the last n of the positions that k [keys, heads, d] and v cover; causal."""
    import torch

    queries, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    k, v = k.float(), v.float()
    out = q.new_empty(queries, heads, v.shape[-1])
    rows = max(1, MAX_SCORES // (heads * keys))
    for start in range(0, queries, rows):
        part = q[start : start + rows].float()
        scores = torch.einsum("qhd,khd->hqk", part, k) * scale
        visible = torch.ones(part.shape[0], keys, dtype=torch.bool, device=q.device).tril(keys - queries + start)
        probabilities = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[start : start + rows] = torch.einsum("hqk,khd->qhd", probabilities, v).to(q.dtype)
    return out

"""Scattered caches with NaN wherever nothing may be read, and fp64 attention to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pellucid.attention.base import AttentionMetadata, Span


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, float("nan"))


def rope_table(positions: int, dim: int, device: torch.device) -> torch.Tensor:
    """fp32 [positions, dim]: cos of dim/2 angles, then sin."""
    angles = torch.arange(positions)[:, None] * 0.7 ** torch.arange(dim // 2)
    return torch.cat([angles.cos(), angles.sin()], -1).float().to(device)


class ScatteredCache:
    """Keys and values of several sequences, [pages, page, width] each, pages shuffled; all else is NaN.

    `key_rows[i]`, `value_rows[i]` [context, width] are those of sequence i in order. Page 0 belongs to nobody.
    """

    def __init__(
        self, contexts: Sequence[int], page: int, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        counts = [-(-context // page) for context in contexts]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(sum(counts))) + 1
        self.page_table = torch.zeros(len(contexts), max(counts, default=0) + 1, dtype=torch.int32, device=device)
        blank = torch.full((sum(counts) + 1, page, width), float("nan"), dtype=dtype, device=device)
        self.keys, self.values = blank, blank.clone()
        self.key_rows: list[torch.Tensor] = []
        self.value_rows: list[torch.Tensor] = []
        for index, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            own, order = order[:count].to(device), order[count:]
            self.page_table[index, :count] = own
            for cache, rows in ((self.keys, self.key_rows), (self.values, self.value_rows)):
                rows.append(normal(context, width, seed=len(rows) + 50 * index, device=device, dtype=dtype))
                filled = torch.full((count * page, width), float("nan"), dtype=dtype, device=device)
                filled[:context] = rows[-1]
                cache[own] = filled.view(count, page, width)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in fp64 on the CPU, and the log of each sum of exponentials [queries, heads].

    q [queries, heads, d] are the last positions of those that k, v [keys, kv_heads, ..] cover; no keys give zeros.
    """
    q, k, v = (x.double().cpu() for x in (q, k, v))
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    if keys == 0:
        return q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full(q.shape[:2], float("-inf"))
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(group, 1)) * scale
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)), scores.logsumexp(-1)


def check_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Relative error of the whole below 1e-2 (bf16) or 3e-3; NaN never passes."""
    tolerance = 1e-2 if found.dtype == torch.bfloat16 else 3e-3
    error = (found.double().cpu() - wanted).norm()
    assert error <= tolerance * wanted.norm(), float(error / wanted.norm().clamp_min(1e-30))


def ragged_metadata(queries: Sequence[int], contexts: Sequence[int], page_table: torch.Tensor) -> AttentionMetadata:
    """`queries[i]` rows of sequence i, the last of which sees `contexts[i]` keys (0: padded rows)."""
    spans, sequence, context = [], [], []
    for index, (count, last) in enumerate(zip(queries, contexts, strict=True)):
        start = len(sequence)
        spans.append(Span(start, start + count, last))
        sequence += [index] * count
        context += range(last - count + 1, last + 1) if last else [0] * count
    device = page_table.device
    return AttentionMetadata(
        page_table,
        torch.tensor(sequence, dtype=torch.int32, device=device),
        torch.tensor(context, dtype=torch.int32, device=device),
        tuple(spans),
    )

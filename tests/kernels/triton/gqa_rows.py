"""Rows of a grouped-query decode step before attention: projected, with the newest key in no cache yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.kernels.triton.attention_cases import ScatteredCache, attend, normal, rope_table

EPS, SCALE = 1e-5, 0.3


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [heads, dim], fp64."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin.double()[:half], cos_sin.double()[half:]
    a, b = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    pairs = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)


@dataclass
class Step:
    """Rows of sequences whose newest keys are in `qkv` alone: their slots of the cache are NaN."""

    heads: int
    kv_heads: int
    dim: int
    page: int
    contexts: tuple[int, ...]
    norm: bool
    interleaved: bool
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        heads, kv_heads, dim, device, dtype = self.heads, self.kv_heads, self.dim, self.device, self.dtype
        rows, width = len(self.contexts), (heads + 2 * kv_heads) * dim
        # Sequences lie in the page table the other way round.
        self.sequence = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
        self.cache = ScatteredCache(self.contexts[::-1], self.page, kv_heads * dim, device, dtype)
        for row, context in enumerate(self.contexts):
            if context:
                page, at = self.slot(row)
                self.cache.keys[page, at] = self.cache.values[page, at] = float("nan")
        self.context = torch.tensor(self.contexts, dtype=torch.int32, device=device)
        self.wide = normal(rows, width + 16, seed=1, device=device, dtype=dtype)
        self.qkv = self.wide[:, :width]
        self.norms = [normal(dim, seed=2 + i, device=device, dtype=dtype) if self.norm else None for i in range(2)]
        self.table = rope_table(max(self.contexts) + 3, dim, device)
        self.counter = torch.zeros(rows, kv_heads, dtype=torch.int32, device=device)

    def slot(self, row: int) -> tuple[int, int]:
        position = self.contexts[row] - 1
        return int(self.cache.page_table[self.sequence[row], position // self.page]), position % self.page

    def run(self, ops, splits: int, block_n: int, scale: float = SCALE) -> torch.Tensor:
        """The output, in the middle of rows that are wider."""
        rows, nan = len(self.contexts), float("nan")
        partial = torch.full((rows, splits, self.heads, self.dim), nan, device=self.device)
        lse = torch.full((rows, splits, self.heads), nan, device=self.device)
        out = torch.full((rows, self.heads * self.dim + 8), nan, device=self.device, dtype=self.dtype)
        ops.attend(
            self.qkv, *self.norms, EPS, self.table, self.interleaved, self.cache.keys, self.cache.values,
            self.cache.page_table, self.sequence, self.context, scale, partial, lse, self.counter,
            out[:, : self.heads * self.dim], tile=ops.DecodeTile(block_n, 4, 2),
        )  # fmt: skip
        assert out[:, self.heads * self.dim :].isnan().all()
        return out[:, : self.heads * self.dim]

    def wanted(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """fp64 output [heads, dim] of a row with keys, and its new key and value [kv_heads, dim]."""
        heads, kv_heads, dim, context = self.heads, self.kv_heads, self.dim, self.contexts[row]
        q, new_k, new_v = self.qkv[row].double().cpu().view(-1, dim).split([heads, kv_heads, kv_heads])
        if self.norm:
            q, new_k = (
                x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double().cpu()
                for x, weight in zip((q, new_k), self.norms, strict=True)
            )
        q, new_k = (rotated(x, self.table[context - 1].cpu(), self.interleaved) for x in (q, new_k))
        older = (rows[self.sequence[row]].double().cpu() for rows in (self.cache.key_rows, self.cache.value_rows))
        k, v = (
            torch.cat([x[:-1].view(-1, kv_heads, dim), new[None]]) for x, new in zip(older, (new_k, new_v), strict=True)
        )
        return attend(q[None], k, v, SCALE)[0][0], new_k, new_v


CASES = [
    # heads, kv_heads, dim, page, contexts, norm, interleaved, splits, block_n
    (8, 2, 64, 16, (37, 0, 1, 70), True, False, 3, 16),  # the last block of 37 and of 70 is begun
    (2, 2, 128, 64, (65, 1, 0), False, False, 1, 32),  # one split: a block of nothing but the newest key
    (8, 1, 64, 32, (32, 33, 97), True, True, 4, 16),  # borders of splits
    (3, 1, 24, 5, (33, 8), False, True, 2, 16),  # blocks cross pages
    (16, 1, 48, 16, (50,), True, False, 8, 16),  # more splits than blocks; K needs a second tile of heads
]

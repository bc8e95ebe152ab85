# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A kernel that reads a buffer and writes next to nothing. Called by `bench.bandwidth`, where there is a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""int32 values a program reads at a time: with 256 threads, four loads of 16 bytes each in flight."""


@triton.jit
def _read(source, sums, count, blocks, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for turn in range(blocks):
        values = (turn * tl.num_programs(0) + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + values, mask=values < count, other=0, eviction_policy="evict_first")
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read(source: torch.Tensor, sums: torch.Tensor) -> None:
    """source int32 [n], n below 2**30 -> sums int32 [programs]: their total is that of `source`, wrapped around."""
    blocks = triton.cdiv(source.shape[0], BLOCK * sums.shape[0])
    _read[(sums.shape[0],)](source, sums, source.shape[0], blocks, BLOCK=BLOCK, num_warps=8)

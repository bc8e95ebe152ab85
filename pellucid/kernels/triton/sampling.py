# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How slots sample, and the noise that makes the best token a draw. Called by kernels of `head` and `token_filters`.

The best by logit / T + Gumbel noise is a draw from softmax(logits / T) (https://arxiv.org/abs/1411.0030), and the best
of some tokens one from what the softmax gives those. The noise depends on seed, position and token id alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class SlotSampling(NamedTuple):
    """How each slot samples, [slots] each: temperature fp32 (0 is greedy) and seed int64; as in `SamplingParams`
    top_k int32 (0 is off), top_p fp32 (1) and min_p fp32 (0), or None where no slot filters."""

    temperature: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


@triton.jit
def _mix(h):
    """MurmurHash3's 32-bit finalizer: every bit of h reaches every bit of the result."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def gumbel(seed, position, token):
    """-log(E), E = -log(1 - u) exponential: a draw for each (seed, position) and token; shapes are broadcast."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(_mix(low + 0x9E3779B9) ^ high)
    key = _mix(key ^ position.to(tl.uint32))
    h = _mix(_mix(token.to(tl.uint32) ^ key) + key)
    # fp32 is finest near u = 0, where the largest noise comes from.
    u = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    exponential = tl.where(u < 1e-3, u * (1.0 + 0.5 * u), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def filters(slot, real, heat, top_k, top_p, min_p):
    """Whether slots of temperature `heat` filter; slots that are not `real` do not."""
    if top_k is None:
        return heat < 0
    else:  # noqa: RET505 (the compiler reads on behind a return)
        k = tl.load(top_k + slot, mask=real, other=0)
        p = tl.load(top_p + slot, mask=real, other=1.0)
        least = tl.load(min_p + slot, mask=real, other=0.0)
        return (heat > 0) & ((k > 0) | (p < 1) | (least > 0))


@triton.jit
def store_best(
    values, token, row, rows, program, programs, vocab, best_value, best_index,
    temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
):  # fmt: skip
    """values fp32 [rows of a tile, tokens]: each row's maximum, of equal ones the first. NaN counts as infinite.

    With noise where the row has a temperature, but not where it filters: filters begin with the best logit itself.
    """
    real = row < rows
    if temperature is not None:
        slot = tl.load(row_slots + row, mask=real, other=0)
        heat = tl.load(temperature + slot, mask=real, other=0.0)
        hot = heat > 0
        if tl.max(hot.to(tl.int32), 0) > 0:
            hot = hot & (filters(slot, real, heat, top_k, top_p, min_p) == 0)
        if tl.max(hot.to(tl.int32), 0) > 0:
            seeds = tl.load(seed + slot, mask=real, other=0)
            positions = tl.load(state_positions + slot, mask=real, other=0)
            noise = gumbel(seeds[:, None], positions[:, None], token[None, :])
            noisy = values / tl.where(hot, heat, 1.0)[:, None] + noise
            values = tl.where(hot[:, None], noisy, values)
    values = tl.where(values == values, values, float("inf"))
    value, at = tl.max(tl.where((token < vocab)[None, :], values, float("-inf")), 1, return_indices=True)
    row = row.to(tl.int64) * programs + program
    tl.store(best_value + row, value, mask=real)
    tl.store(best_index + row, tl.min(token, 0) + at, mask=real)

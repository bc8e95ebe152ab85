# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Both ends of a decode step: tokens to embeddings, hidden rows to logits to the next tokens. Called by decode graphs.

A token is chosen in two passes: programs of `small_head` or `partial_best` each find the best token of their part of
the vocabulary, `finish_step` the best of those. How a temperature makes it a draw is in `sampling`, and in
`token_filters` what rows with top-k, top-p or min-p need in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input
from pellucid.kernels.triton.linear import (
    FMA_ROWS,
    LinearTile,
    dot_first,
    dot_tile,
    gemv_first,
    gemv_tile,
    linear_tile,
)
from pellucid.kernels.triton.sampling import SlotSampling, filters, store_best
from pellucid.kernels.triton.token_filters import FilterSpace, choice_arguments, filter_and_choose

MAX_ROWS = 16
"""Most rows of `small_head`."""

GROUP = 4
"""Tiles of a program of `small_head` on the fp32 path, one after another: fewer partial maxima to reduce."""

PARTIAL_BLOCK = 4096
"""Logits of a program of `partial_best`."""

GREEDY = (None,) * len(SlotSampling._fields)
"""In place of `SlotSampling` where no row draws."""


def head_tile(vocab: int, k: int, rows: int) -> LinearTile:
    """The default tile of `small_head`."""
    tile = linear_tile(vocab, k, rows)
    if rows > FMA_ROWS:
        # Two stages: 72 KB, which every device has.
        return tile._replace(block_n=64, stages=2)
    block_k = min(tile.block_k, 1024)
    return LinearTile(8, block_k, max(1, block_k // 256))


def head_programs(vocab: int, rows: int, tile: LinearTile | None = None) -> int:
    """Columns of `best_value` and `best_index`: for `small_head` up to 16 rows, else for `partial_best`."""
    if rows > MAX_ROWS:
        return -(-vocab // PARTIAL_BLOCK)
    if tile is None:
        tile = head_tile(vocab, 2048, rows)
    return -(-vocab // (tile.block_n if tile.dot else tile.block_n * GROUP))


@triton.jit
def _begin_step_kernel(
    state_tokens, state_positions, row_slots, scratch_slot, embedding, x, context, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_input(PDL)
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    token = tl.load(state_tokens + slot).to(tl.int64)
    position = tl.load(state_positions + slot)
    columns = tl.arange(0, BLOCK)
    vector = tl.load(embedding + token * WIDTH + columns, mask=columns < WIDTH)
    tl.store(x + row * x_stride + columns, vector, mask=columns < WIDTH)
    tl.store(context + row, tl.where(slot == scratch_slot, 0, position + 1))


def begin_step(
    state_tokens: torch.Tensor,
    state_positions: torch.Tensor,
    row_slots: torch.Tensor,
    scratch_slot: int,
    embedding: torch.Tensor,
    x: torch.Tensor,
    context: torch.Tensor,
    pdl: bool = False,
) -> None:
    """x[r] = embedding[state_tokens[slot]], context[r] = state_positions[slot] + 1 (0 for the scratch slot).

    slot = row_slots[r]. State int32 [slots], row_slots and context int32 [rows], x [rows, hidden].
    """
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _begin_step_kernel[(rows,)](
        state_tokens, state_positions, row_slots, scratch_slot, embedding, x, context, x.stride(0),
        WIDTH=width, BLOCK=block, PDL=pdl, num_warps=min(8, max(1, block // 256)), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gemv_head_kernel(
    x, x_stride, norm, eps, weight, logits, logits_stride, best_value, best_index, programs, vocab,
    temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
    K: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr, GROUP: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK_N * GROUP
    stop = tl.minimum(start + BLOCK_N * GROUP, vocab)
    first = gemv_first(weight, norm, start, stop, K, BLOCK_N, BLOCK_K, False, EVEN_N)
    wait_for_input(PDL)
    for tile in range(GROUP):
        n0 = start + tile * BLOCK_N
        totals = gemv_tile(
            first, x, x_stride, weight, norm, eps, n0, stop, K, ROWS, BLOCK_N, BLOCK_K, WARPS, False, EVEN_N
        )
        # Behind the last tile no row is there, and nothing is read.
        first = gemv_first(weight, norm, n0 + BLOCK_N, stop, K, BLOCK_N, BLOCK_K, False, False)
        token = n0 + tl.arange(0, BLOCK_N)
        for r in tl.static_range(ROWS):
            tl.store(logits + r * logits_stride + token, totals[r], mask=token < stop)
    # Read back with a token for each thread: noise is computed once, not by every thread that has a sum.
    tl.debug_barrier()
    row = tl.arange(0, ROW_BLOCK)
    token = start + tl.arange(0, BLOCK_N * GROUP)
    there = (row < ROWS)[:, None] & (token < vocab)[None, :]
    values = tl.load(logits + row[:, None] * logits_stride + token[None, :], mask=there, other=0.0)
    store_best(
        values, token, row, ROWS, tl.program_id(0), programs, vocab, best_value, best_index,
        temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
    )  # fmt: skip


@triton.jit
def _dot_head_kernel(
    x, x_stride, rows, norm, eps, weight, logits, logits_stride, best_value, best_index, programs, vocab,
    temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
    K: tl.constexpr, RP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BLOCK_N
    first = dot_first(weight, norm, n0, vocab, K, BLOCK_N, BLOCK_K, SPLIT, False, EVEN_N)
    wait_for_input(PDL)
    total = dot_tile(
        first, x, x_stride, rows, weight, norm, eps, n0, vocab, K, RP, BLOCK_N, BLOCK_K, SPLIT, STAGES, False, EVEN_N
    )
    token = n0 + tl.arange(0, BLOCK_N)[:, None]
    r = tl.arange(0, RP)
    tl.store(logits + r[None, :] * logits_stride + token, total, mask=(token < vocab) & (r < rows)[None, :])
    store_best(
        tl.trans(total), n0 + tl.arange(0, BLOCK_N), r, rows, tl.program_id(0), programs, vocab, best_value, best_index,
        temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
    )  # fmt: skip


def small_head(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    logits: torch.Tensor,
    best_value: torch.Tensor,
    best_index: torch.Tensor,
    *,
    sampling: SlotSampling | None = None,
    state_positions: torch.Tensor | None = None,
    row_slots: torch.Tensor | None = None,
    pdl: bool = False,
    tile: LinearTile | None = None,
) -> None:
    """logits fp32 [rows <= 16, vocab] = rms_norm(x; norm, eps) @ weight.T, and the best token of each program's part.

    best_value fp32 and best_index int32 are [rows, head_programs(vocab, rows)]; of equal values the lowest id wins.
    Without `sampling` the choice is greedy, else state_positions int32 is [slots] and row_slots int32 [rows]. Of slots
    that filter it is the best logit: `token_filters.sampling_bins` and `finish_step` draw for them.

    Raises:
        ValueError: more than 16 rows.
    """
    rows, k = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"small_head takes up to {MAX_ROWS} rows, got {rows}")
    vocab = weight.shape[0]
    if tile is None:
        tile = head_tile(vocab, k, rows)
    programs = head_programs(vocab, rows, tile)
    common = {
        "K": k, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "PDL": pdl,
        "num_warps": tile.warps, "launch_pdl": pdl,
    }  # fmt: skip
    if tile.dot:
        _dot_head_kernel[(programs,)](
            x, x.stride(0), rows, norm, eps, weight, logits, logits.stride(0), best_value, best_index, programs, vocab,
            *(sampling or GREEDY), state_positions, row_slots,
            RP=8 if rows <= 8 else 16, SPLIT=tile.split, STAGES=tile.stages, EVEN_N=vocab % tile.block_n == 0, **common,
        )  # fmt: skip
    else:
        _gemv_head_kernel[(programs,)](
            x, x.stride(0), norm, eps, weight, logits, logits.stride(0), best_value, best_index, programs, vocab,
            *(sampling or GREEDY), state_positions, row_slots,
            ROWS=rows, ROW_BLOCK=triton.next_power_of_2(rows), WARPS=tile.warps, GROUP=GROUP,
            EVEN_N=vocab % (tile.block_n * GROUP) == 0, **common,
        )  # fmt: skip


@triton.jit
def _partial_best_kernel(
    logits, logits_stride, best_value, best_index, programs, vocab,
    temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_input(PDL)
    row = tl.program_id(0) + tl.arange(0, 1)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (token < vocab)[None, :]
    values = tl.load(logits + row.to(tl.int64)[:, None] * logits_stride + token[None, :], mask=there, other=0.0)
    store_best(
        values.to(tl.float32), token, row, tl.num_programs(0), tl.program_id(1), programs, vocab, best_value,
        best_index, temperature, seed, top_k, top_p, min_p, state_positions, row_slots,
    )  # fmt: skip


def partial_best(
    logits: torch.Tensor,
    best_value: torch.Tensor,
    best_index: torch.Tensor,
    *,
    sampling: SlotSampling | None = None,
    state_positions: torch.Tensor | None = None,
    row_slots: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """The best token of each part of logits [rows, vocab], any float dtype and number of rows; see `small_head`.

    best_value and best_index are [rows, programs]; programs = head_programs(vocab, rows) for more than 16 rows.
    """
    rows, vocab = logits.shape
    programs = triton.cdiv(vocab, PARTIAL_BLOCK)
    _partial_best_kernel[(rows, programs)](
        logits, logits.stride(0), best_value, best_index, programs, vocab, *(sampling or GREEDY), state_positions,
        row_slots, BLOCK=PARTIAL_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _finish_step_kernel(
    best_value, best_index, row_slots, scratch_slot, state_tokens, state_positions,
    ring, ring_length, ring_stride, step, finite, rows,
    logits, logits_stride, vocab, temperature, seed, top_k, top_p, min_p,
    words, arrived, length, listed, kept_value, kept_token, span,
    LISTED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row)
    position = tl.load(state_positions + slot)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    done = tl.program_id(1) == 0
    filtered = slot < 0  # never
    if words is not None:
        top = tl.load(words + row * 8 + 6).to(tl.int32).to(tl.float32, bitcast=True)
        filtered = filters(slot, True, tl.load(temperature + slot), top_k, top_p, min_p) & (tl.abs(top) < float("inf"))
        if filtered:
            best, token, done = filter_and_choose(
                logits + row * logits_stride, vocab, row, slot, top, position, temperature, seed, top_p, min_p,
                words, arrived, length, listed, kept_value, kept_token, span, LISTED, BLOCK, PARTS, BINS,
            )  # fmt: skip
    if done & (filtered == 0):
        best_at = tl.full([], 0, tl.int32)
        for start in range(0, PROGRAMS, WIDTH):
            i = start + tl.arange(0, WIDTH)
            values = tl.load(best_value + row * PROGRAMS + i, mask=i < PROGRAMS, other=float("-inf"))
            value, at = tl.max(values, 0, return_indices=True)
            best_at = tl.where(value > best, start + at, best_at)
            best = tl.maximum(value, best)
        token = tl.load(best_index + row * PROGRAMS + best_at)
    if done:
        usable = tl.abs(best) < float("inf")
        # Arrivals are counted in the upper half of the word: the last row, when all have read, makes it step + 1.
        ticket = tl.atomic_add(step, 1 << 32, sem="relaxed")
        if ticket >> 32 == rows - 1:
            tl.atomic_xchg(step, ((ticket & 0xFFFFFFFF) + 1) & 0x7FFFFFFF, sem="relaxed")
        place = (ticket & 0x7FFFFFFF).to(tl.int32) % ring_length
        tl.store(ring + place * ring_stride + row, tl.where(usable, token, -1))
        real = slot != scratch_slot
        tl.store(state_tokens + slot, token, mask=real)
        tl.store(state_positions + slot, position + 1, mask=real)
        if finite is not None:
            tl.store(finite, 0, mask=real & (usable == 0))


def finish_step(
    best_value: torch.Tensor,
    best_index: torch.Tensor,
    row_slots: torch.Tensor,
    scratch_slot: int,
    state_tokens: torch.Tensor,
    state_positions: torch.Tensor,
    ring: torch.Tensor,
    step: torch.Tensor,
    finite: torch.Tensor | None = None,
    *,
    logits: torch.Tensor | None = None,
    sampling: SlotSampling | None = None,
    space: FilterSpace | None = None,
    pdl: bool = False,
) -> None:
    """The best of each row's partial maxima becomes its slot's token, and the step ends.

    state_tokens[slot] = token and state_positions[slot] += 1 (not for the scratch slot); ring int32 [length, >= rows]
    gets ring[step % length, row] = token, -1 where the row's maximum was not finite; then `finite` int32 [1], which the
    owner sets to 1, becomes 0 if the row is not padding. step int64 [1], below 2^32, goes up by one; it is whole only
    between steps. With logits [rows, vocab], `sampling` and `space` as `sampling_bins` had them, rows that filter get
    the best token that they keep.
    """
    rows, programs = best_value.shape
    width = min(4096, triton.next_power_of_2(programs))
    parts, choice = choice_arguments(logits, sampling, space)
    _finish_step_kernel[(rows, parts)](
        best_value, best_index, row_slots, scratch_slot, state_tokens, state_positions,
        ring, ring.shape[0], ring.stride(0), step, finite, rows, **choice, PROGRAMS=programs, WIDTH=width, PDL=pdl,
        # Without a limit the compiler stops at 64 registers, and spills on some devices.
        num_warps=8 if width > 1024 or logits is not None else 4, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip

# mypy: disable-error-code="no-untyped-def,import-untyped,untyped-decorator,assignment"
"""Grouped-query decode attention over pages, split-K, and the merging of the splits.

Called by `attention.triton_gqa`, for rows ready in the cache; `combine` also by `attention.triton_mla`. The captured
decode step has it all in one launch (`gqa_attend`), which shares the functions below. Launchers allocate nothing and
never look at a context, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input

LOG2E = tl.constexpr(1.4426950408889634)


LONG_CONTEXT = 16384
"""Tokens from which on the keys of one row fill the device for longer than their partial results take to merge."""


class DecodeTile(NamedTuple):
    """Keys a step of the loop, warps a program, and stages of the pipeline that fetches the keys."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(head_dim: int, programs: int) -> DecodeTile:
    """Two buffers of at most 32 KB of keys and values, 16-bit, where two or three programs share an SM, else one.

    Two fit every device, and three programs an SM on sm_90. One where each has an SM for itself: it has a block or two
    to read, and starts sooner.
    """
    stages = 3 if 132 < programs <= 384 else 2
    return DecodeTile(block_n=64 if head_dim <= 128 else 32, num_warps=4, num_stages=stages)


def splits_for(rows: int, kv_heads: int, sm_count: int, max_context: int, per_sm: int = 4) -> int:
    """Splits of each row's keys: half of `per_sm` to `per_sm` programs an SM, but no split below 64 keys at
    `max_context`.

    A power of two, so that few kernels are compiled; up to 128 programs a row, about one an SM, beyond which merging
    costs more than it saves, and more where contexts can be so long that it does not.
    """
    most = max(8, 128 // kv_heads) if max_context <= LONG_CONTEXT else 64
    wanted = min(max(1, per_sm * sm_count // (rows * kv_heads)), triton.cdiv(max_context, 64), most)
    return int(1 << (int(wanted).bit_length() - 1))


def split_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    sequence: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    kv_heads: int,
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    pdl: bool = False,
    tile: DecodeTile | None = None,
) -> None:
    """Attention of each row over each of `partial.shape[1]` parts of its keys (flash decoding).

    q [rows, heads, d] with unit stride in d; keys, values [pages, page, kv_heads * d]; partial [rows, splits, heads, d]
    and lse fp32 [rows, splits, heads], both contiguous. lse is the natural log of the sum of exponentials, -inf for a
    part without keys, whose `partial` is then left as it was. With one split `partial` is the result, zeros for a row
    without keys: it may be the output itself, in its own dtype.
    """
    rows, heads, dim = q.shape
    splits, group = partial.shape[1], heads // kv_heads
    tile = tile or decode_tile(dim, rows * splits * kv_heads)
    _split_decode[(kv_heads, splits, rows)](
        q, keys, values, page_table, sequence, context, partial, lse,
        q.stride(0), q.stride(1), page_table.stride(0), scale,
        SPLITS=splits, KV_HEADS=kv_heads, GROUP=group, BLOCK_H=max(16, triton.next_power_of_2(group)), DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), PAGE=keys.shape[1], BLOCK_N=tile.block_n, PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip


def combine(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
    """Merges the splits. partial [rows, splits, heads, d], lse [rows, splits, heads] -> out [rows, heads * d].

    Rows of `out` may be apart. Parts without keys (lse -inf) come last and are never read; a row of such parts alone
    gives zeros.
    """
    rows, splits, heads, dim = partial.shape
    _combine[(heads, rows)](
        partial, lse, out, out.stride(0),
        SPLITS=splits, BLOCK_SPLITS=triton.next_power_of_2(splits), HEADS=heads, DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim), CHUNK=min(8, triton.next_power_of_2(splits)), PDL=pdl,
        num_warps=4 if dim > 64 else 2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def attend_block(
    query, keys, values, pages, page, start, end, seen_end, kv_head, scale, top, total, acc,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One more block of keys, those before `seen_end`, into the running softmax; and the next block's page.

    That is asked for one block ahead: the next keys' address must not wait for the page table.
    """
    WHOLE_PAGES: tl.constexpr = PAGE % BLOCK_N == 0
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, acc.shape[1])
    inside = start + n < seen_end
    slot = page.to(tl.int64) * PAGE + (start % PAGE + n if WHOLE_PAGES else (start + n) % PAGE)
    page = page_of(pages, start + BLOCK_N, end, n, PAGE, WHOLE_PAGES)
    at = slot[:, None] * (KV_HEADS * DIM) + (kv_head * DIM + d)[None, :]
    mask = inside[:, None]
    if acc.shape[1] != DIM:
        mask = mask & (d < DIM)[None, :]
    k = tl.load(keys + at, mask=mask, other=0.0)
    v = tl.load(values + at, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(k)) * (scale * LOG2E)  # [BLOCK_H, BLOCK_N], base 2
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return page, new_top, total, acc


@triton.jit
def page_of(pages, start, end, n, PAGE: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    """The page of the block at `start`, or of each of its keys where a block crosses pages; 0 past the end."""
    key = start if WHOLE_PAGES else start + n
    return tl.load(pages + key // PAGE, mask=key < end, other=0)


@triton.jit
def merge_parts(
    partial, lse, at, in_group, parts, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_G, BLOCK_D]: the first `parts` parts of some heads of a row, whose first part lies at `at`."""
    d = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, parts, CHUNK):
        logs, values = (), ()
        for i in tl.static_range(CHUNK):
            of_part = at + (start + i) * HEADS
            there = in_group & (start + i < parts)
            logs += (tl.load(lse + of_part, mask=there, other=float("-inf")) * LOG2E,)
            mask = there[:, None] & (d < DIM)[None, :]
            part = tl.load(partial + of_part[:, None] * DIM + d[None, :], mask=mask, other=0.0)
            values += (part.to(tl.float32),)
        new_top = top
        for i in tl.static_range(CHUNK):
            new_top = tl.maximum(new_top, logs[i])
        # -inf - -inf is NaN: heads of padding get 0 instead.
        new_top = tl.where(in_group, new_top, 0.0)
        fade = tl.exp2(top - new_top)
        total *= fade
        acc *= fade[:, None]
        for i in tl.static_range(CHUNK):
            weight = tl.exp2(logs[i] - new_top)
            total += weight
            acc += values[i] * weight[:, None]
        top = new_top
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["table_stride"])
def _split_decode(
    q, keys, values, page_table, sequence, context, partial, lse, q_stride, q_head_stride, table_stride, scale,
    SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    wait_for_input(PDL)
    seen = tl.load(context + row)
    # Whole blocks, so that a block never crosses a page it fits into.
    part = tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK_N) * BLOCK_N
    begin = tl.minimum(split * part, seen)
    end = tl.minimum(begin + part, seen)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + h
    mask = (h < GROUP)[:, None] & (d < DIM)[None, :]
    at = (row * SPLITS + split) * (KV_HEADS * GROUP) + head
    out = partial + at[:, None] * DIM + d[None, :]
    if begin == end:
        tl.store(lse + at, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=h < GROUP)
        if SPLITS == 1:
            tl.store(out, tl.zeros([BLOCK_H, BLOCK_D], partial.dtype.element_ty), mask=mask)
        return
    pages = page_table + tl.load(sequence + row).to(tl.int64) * table_stride
    query = tl.load(q + row * q_stride + head[:, None] * q_head_stride + d[None, :], mask=mask, other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    page = page_of(pages, begin, end, tl.arange(0, BLOCK_N), PAGE, PAGE % BLOCK_N == 0)
    for start in range(begin, end, BLOCK_N):
        page, top, total, acc = attend_block(
            query, keys, values, pages, page, start, end, end, kv_head, scale, top, total, acc,
            KV_HEADS, DIM, PAGE, BLOCK_N,
        )  # fmt: skip
    tl.store(lse + at, (top + tl.log2(total)) / LOG2E, mask=h < GROUP)
    tl.store(out, (acc / total[:, None]).to(partial.dtype.element_ty), mask=mask)


@triton.jit
def _combine(
    partial, lse, out, out_stride, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) + tl.arange(0, 1)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_SPLITS)
    wait_for_input(PDL)
    at = row * SPLITS * HEADS + head
    log = tl.load(lse + at + s * HEADS, mask=s < SPLITS, other=float("-inf"))
    parts = tl.sum((log > float("-inf")).to(tl.int32), 0)
    result = merge_parts(partial, lse, at, head < HEADS, parts, HEADS, DIM, 1, BLOCK_D, CHUNK)
    out_at = out + row * out_stride + head[:, None] * DIM + d[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(d < DIM)[None, :])

# mypy: disable-error-code="no-untyped-def,import-untyped,untyped-decorator"
"""Grouped-query decode kernels: norm + rope + cache write, split-K attention over pages, merging of the splits.

Called by `attention.triton_gqa` and by the captured decode step; `combine` also by `attention.triton_mla`. Launchers
allocate nothing and never look at a context, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


LONG_CONTEXT = 16384
"""Tokens from which on the keys of one row fill the device for longer than their partial results take to merge."""


class DecodeTile(NamedTuple):
    """Keys a step of the loop, warps a program, and stages of the pipeline that fetches the keys."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(head_dim: int) -> DecodeTile:
    """Two buffers of at most 32 KB of keys and values, 16-bit: fits every device, and three programs an SM on sm_90."""
    return DecodeTile(block_n=64 if head_dim <= 128 else 32, num_warps=4, num_stages=2)


def splits_for(rows: int, kv_heads: int, sm_count: int, max_context: int) -> int:
    """Splits of each row's keys: two to four programs an SM, but no split below 64 keys at `max_context`.

    A power of two, so that few kernels are compiled; up to 64 programs a row, beyond which merging costs more than it
    saves, and more where contexts can be so long that it does not.
    """
    most = max(8, 64 // kv_heads) if max_context <= LONG_CONTEXT else 64
    wanted = min(max(1, 4 * sm_count // (rows * kv_heads)), triton.cdiv(max_context, 64), most)
    return int(1 << (int(wanted).bit_length() - 1))


def norm_rope_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    table: torch.Tensor,
    interleaved: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    sequence: torch.Tensor,
    context: torch.Tensor,
    pdl: bool = False,
) -> None:
    """q is normed and rotated where it lies; k likewise, and v as it is, go to the cache only.

    qkv [rows, (heads + 2 kv_heads) * head_dim], any row stride; norms [head_dim] or None; table fp32
    [positions, head_dim], cos then sin; keys, values [pages, page, kv_heads * head_dim]; a row's position is
    context - 1, and a row with context 0 writes nothing to the cache.
    """
    rows, all_heads = qkv.shape[0], heads + 2 * kv_heads
    # Few rows are bound by latency: spread the heads. Many rows: fewer, fuller programs.
    block_heads = 4 if rows <= 16 else 16
    half = head_dim // 2
    _norm_rope_write[(triton.cdiv(all_heads, block_heads), rows)](
        qkv,
        q_norm if q_norm is not None else table,
        k_norm if k_norm is not None else table,
        table,
        keys,
        values,
        page_table,
        sequence,
        context,
        qkv.stride(0),
        page_table.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_HEADS=block_heads,
        PAGE=keys.shape[1],
        NORM=q_norm is not None,
        INTERLEAVED=interleaved,
        PDL=pdl,
        num_warps=4 if rows > 16 else 2,
        launch_pdl=pdl,
    )


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
    tile = tile or decode_tile(dim)
    # Heads of one row are neighbours in launch order: together they read whole rows of the cache.
    _split_decode[(kv_heads, splits, rows)](
        q,
        keys,
        values,
        page_table,
        sequence,
        context,
        partial,
        lse,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        scale,
        SPLITS=splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_H=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        PAGE=keys.shape[1],
        BLOCK_N=tile.block_n,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )


def combine(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
    """Merges the splits. partial [rows, splits, heads, d], lse [rows, splits, heads] -> out [rows, heads * d].

    Rows of `out` may be apart. A part whose lse is -inf is never read; a row of such parts alone gives zeros.
    """
    rows, splits, heads, dim = partial.shape
    _combine[(heads, rows)](
        partial,
        lse,
        out,
        out.stride(0),
        SPLITS=splits,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        CHUNK=min(8, triton.next_power_of_2(splits)),
        PDL=pdl,
        num_warps=4 if dim > 64 else 2,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _norm_rope_write(
    qkv,
    q_norm,
    k_norm,
    table,
    keys,
    values,
    page_table,
    sequence,
    context,
    row_stride,
    table_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    in_half = i < HALF
    # The pairs that turn together: (2i, 2i + 1), or (i, i + d/2).
    a = 2 * i if INTERLEAVED else i
    b = 2 * i + 1 if INTERLEAVED else i + HALF
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    if NORM:
        weight_a = tl.where(
            is_q[:, None],
            tl.load(q_norm + a, mask=in_half, other=0.0)[None, :],
            tl.load(k_norm + a, mask=in_half, other=0.0)[None, :],
        )
        weight_b = tl.where(
            is_q[:, None],
            tl.load(q_norm + b, mask=in_half, other=0.0)[None, :],
            tl.load(k_norm + b, mask=in_half, other=0.0)[None, :],
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seen = tl.load(context + row)
    position = tl.maximum(seen - 1, 0)
    base = qkv + row * row_stride + head[:, None] * DIM
    x_a = tl.load(base + a[None, :], mask=mask, other=0.0)
    x_b = tl.load(base + b[None, :], mask=mask, other=0.0)
    page = tl.load(page_table + tl.load(sequence + row).to(tl.int64) * table_stride + position // PAGE)
    cos = tl.load(table + position.to(tl.int64) * DIM + i, mask=in_half, other=0.0)[None, :]
    sin = tl.load(table + position.to(tl.int64) * DIM + HALF + i, mask=in_half, other=0.0)[None, :]
    y_a, y_b = x_a.to(tl.float32), x_b.to(tl.float32)
    if NORM:
        square = tl.sum(y_a * y_a, 1) + tl.sum(y_b * y_b, 1)
        factor = tl.rsqrt(square / DIM + eps)[:, None]
        # Rounded before and after the weight, as the models were trained.
        y_a = ((y_a * factor).to(x_a.dtype).to(tl.float32) * weight_a.to(tl.float32)).to(x_a.dtype).to(tl.float32)
        y_b = ((y_b * factor).to(x_b.dtype).to(tl.float32) * weight_b.to(tl.float32)).to(x_b.dtype).to(tl.float32)
    r_a = (y_a * cos - y_b * sin).to(x_a.dtype)
    r_b = (y_b * cos + y_a * sin).to(x_b.dtype)
    q_mask = mask & is_q[:, None]
    tl.store(base + a[None, :], r_a, mask=q_mask)
    tl.store(base + b[None, :], r_b, mask=q_mask)
    slot = (page.to(tl.int64) * PAGE + position % PAGE) * (KV_HEADS * DIM)
    kv_mask = mask & (seen > 0) & (head >= HEADS)[:, None]
    k_at = keys + slot + (head - HEADS)[:, None] * DIM
    k_mask = kv_mask & (head < HEADS + KV_HEADS)[:, None]
    tl.store(k_at + a[None, :], r_a.to(keys.dtype.element_ty), mask=k_mask)
    tl.store(k_at + b[None, :], r_b.to(keys.dtype.element_ty), mask=k_mask)
    v_at = values + slot + (head - HEADS - KV_HEADS)[:, None] * DIM
    v_mask = kv_mask & is_v[:, None]
    tl.store(v_at + a[None, :], x_a.to(values.dtype.element_ty), mask=v_mask)
    tl.store(v_at + b[None, :], x_b.to(values.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=["table_stride"])
def _split_decode(
    q,
    keys,
    values,
    page_table,
    sequence,
    context,
    partial,
    lse,
    q_stride,
    q_head_stride,
    table_stride,
    scale,
    SPLITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = KV_HEADS * DIM
    WHOLE_PAGES: tl.constexpr = PAGE % BLOCK_N == 0
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seen = tl.load(context + row)
    # Every split but the last has `part` keys: whole blocks, so that a block never crosses a page it fits into.
    part = tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK_N) * BLOCK_N
    begin = tl.minimum(split * part, seen)
    end = tl.minimum(begin + part, seen)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    in_group = h < GROUP
    head = kv_head * GROUP + h
    lse_at = lse + (row * SPLITS + split) * (KV_HEADS * GROUP) + head
    out_mask = in_group[:, None] & (d < DIM)[None, :]
    if begin == end:
        tl.store(lse_at, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=in_group)
        if SPLITS == 1:
            out = partial + (row * (KV_HEADS * GROUP) + head[:, None]) * DIM + d[None, :]
            tl.store(out, tl.zeros([BLOCK_H, BLOCK_D], partial.dtype.element_ty), mask=out_mask)
        return
    pages = page_table + tl.load(sequence + row).to(tl.int64) * table_stride
    query = tl.load(q + row * q_stride + head[:, None] * q_head_stride + d[None, :], mask=out_mask, other=0.0)
    n = tl.arange(0, BLOCK_N)
    column = kv_head * DIM + d
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    # The next block's page is asked for one block ahead: its address must not wait for the page table.
    page = page_of(pages, begin, end, n, PAGE, WHOLE_PAGES)
    for start in range(begin, end, BLOCK_N):
        inside = start + n < end
        if WHOLE_PAGES:
            slot = page.to(tl.int64) * PAGE + start % PAGE + n
        else:
            slot = page.to(tl.int64) * PAGE + (start + n) % PAGE
        page = page_of(pages, start + BLOCK_N, end, n, PAGE, WHOLE_PAGES)
        at = slot[:, None] * WIDTH + column[None, :]
        mask = inside[:, None]
        if BLOCK_D != DIM:
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
        top = new_top
    tl.store(lse_at, (top + tl.log2(total)) / LOG2E, mask=in_group)
    out = partial + ((row * SPLITS + split) * (KV_HEADS * GROUP) + head[:, None]) * DIM + d[None, :]
    tl.store(out, (acc / total[:, None]).to(partial.dtype.element_ty), mask=out_mask)


@triton.jit
def page_of(pages, start, end, n, PAGE: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    """The page of the block at `start`, or of each of its keys where a block crosses pages; 0 past the end."""
    key = start if WHOLE_PAGES else start + n
    return tl.load(pages + key // PAGE, mask=key < end, other=0)


@triton.jit
def _combine(
    partial,
    lse,
    out,
    out_stride,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_SPLITS)
    c = tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    base = row * SPLITS * HEADS + head
    logs = tl.load(lse + base + s * HEADS, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(logs, 0)
    # -inf - -inf is NaN: a row without keys gets weights of zero instead.
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((logs - top) * LOG2E), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, SPLITS, CHUNK):
        part = start + c
        log = tl.load(lse + base + part * HEADS, mask=part < SPLITS, other=float("-inf"))
        at = partial + (base + part * HEADS)[:, None] * DIM + d[None, :]
        value = tl.load(at, mask=(log > float("-inf"))[:, None] & (d < DIM)[None, :], other=0.0)
        acc += tl.sum(value.to(tl.float32) * tl.exp2((log - top) * LOG2E)[:, None], 0)
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_stride + head * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)

# mypy: disable-error-code="no-untyped-def,import-untyped,untyped-decorator"
"""Grouped-query attention of a decode step in one launch: norm, rope, cache rows, split-K attention, merging.

Called by the captured decode step, whose rows are of different sequences: a row needs no other row's new key. The
launcher allocates nothing and never looks at a context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import fetch_to_l2, wait_for_input
from pellucid.kernels.triton.gqa_decode import LOG2E, DecodeTile, attend_block, decode_tile, merge_parts, page_of

MERGED_AT_ONCE = 16384
"""Partial results that a program holds while it merges: 128 registers of each of 128 threads."""


def attend(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    table: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    sequence: torch.Tensor,
    context: torch.Tensor,
    scale: float,
    partial: torch.Tensor,
    lse: torch.Tensor,
    counter: torch.Tensor,
    out: torch.Tensor,
    *,
    pdl: bool = False,
    tile: DecodeTile | None = None,
) -> None:
    """Attention of rows of different sequences as they were projected: q and k are normed and rotated, k and v join
    the cache, and out [rows, heads * d] is what each row sees in it.

    qkv [rows, (heads + 2 kv_heads) * d], any row stride, is left as it was; norms [d] or None; table fp32
    [positions, d], cos then sin; keys, values [pages, page, kv_heads * d]. A row's position is context - 1; a row with
    context 0 writes nothing to the cache, and zeros to `out`. partial fp32 [rows, splits, heads, d] and lse fp32
    [rows, splits, heads] are room for parts of rows, merged in their order by the last program to come (neither is
    touched with one split). counter int32 [rows, kv_heads] is 0, and is 0 again afterwards.
    """
    rows, splits, heads, dim = partial.shape
    kv_heads = keys.shape[-1] // dim
    group, block_d = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    block_g = triton.next_power_of_2(group)
    tile = tile or decode_tile(dim, rows * splits * kv_heads)
    # Heads of one row are neighbours in launch order: together they read whole rows of the cache.
    _attend[(kv_heads, splits, rows)](
        qkv, q_norm, k_norm, table, keys, values, page_table, sequence, context, partial, lse, counter, out,
        qkv.stride(0), page_table.stride(0), out.stride(0), eps, scale,
        SPLITS=splits, KV_HEADS=kv_heads, GROUP=group, BLOCK_H=max(16, triton.next_power_of_2(group + 1)),
        BLOCK_G=block_g, DIM=dim, BLOCK_D=block_d, PAGE=keys.shape[1], BLOCK_N=tile.block_n,
        CHUNK=min(16, triton.next_power_of_2(splits), max(1, MERGED_AT_ONCE // (block_g * block_d))),
        INTERLEAVED=interleaved, PDL=pdl, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    qkv, q_norm, k_norm, table, keys, values, page_table, sequence, context, partial, lse, counter, out,
    row_stride, table_stride, out_stride, eps, scale,
    SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (kv head, split, row). Its tile of heads is the group's queries, then the head of K."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    HALF: tl.constexpr = DIM // 2
    # Few programs: the first keys are asked for before q is ready. Many: registers for more programs an SM.
    EARLY: tl.constexpr = SPLITS > 1
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    in_dim = d < DIM
    is_k = (h == GROUP)[:, None]
    # Column d turns with its partner: (2i, 2i + 1), or (i, i + d/2).
    partner = d ^ 1 if INTERLEAVED else tl.where(d < HALF, d + HALF, d - HALF)
    weights = None
    if q_norm is not None:
        weights = (
            tl.load(q_norm + d, mask=in_dim, other=0.0),
            tl.load(k_norm + d, mask=in_dim, other=0.0),
            tl.load(q_norm + partner, mask=in_dim, other=0.0),
            tl.load(k_norm + partner, mask=in_dim, other=0.0),
        )
    # Where the row stands was written before the kernel ahead began, and so were the keys of earlier steps: all is
    # looked up, and the first keys are on their way to the L2, while q is still being made.
    seen = tl.load(context + row)
    pages = page_table + tl.load(sequence + row).to(tl.int64) * table_stride
    part = part_size(seen, SPLITS, GROUP, BLOCK_N)
    begin = tl.minimum(split * part, seen)
    end = tl.minimum(begin + part, seen)
    # Contexts are mostly far below what the grid is for: without keys, a program makes room for another's at once. The
    # first of each row waits all the same, so that this launch does not end before the one ahead.
    if (begin == end) & (split > 0):
        return
    n = tl.arange(0, BLOCK_N)
    page = page_of(pages, begin, end, n, PAGE, PAGE % BLOCK_N == 0)
    position = tl.maximum(seen - 1, 0)
    new_page = tl.load(pages + position // PAGE).to(tl.int64)
    angles = table + position.to(tl.int64) * DIM + (d // 2 if INTERLEAVED else d % HALF)
    cos = tl.load(angles, mask=in_dim, other=0.0)
    sin = tl.load(angles + HALF, mask=in_dim, other=0.0)
    sin = tl.where(d % 2 == 0 if INTERLEAVED else d < HALF, -sin, sin)
    if PDL:
        first = page.to(tl.int64) * PAGE + (begin + n) % PAGE
        fetch_to_l2(keys, first, begin + n < end, kv_head * DIM, KV_HEADS * DIM, DIM)
        fetch_to_l2(values, first, begin + n < end, kv_head * DIM, KV_HEADS * DIM, DIM)
    wait_for_input(PDL)

    head_at = qkv + row * row_stride + tl.where(h == GROUP, HEADS + kv_head, kv_head * GROUP + h)[:, None] * DIM
    there = (h <= GROUP)[:, None] & in_dim[None, :]
    query = tl.load(head_at + d[None, :], mask=there, other=0.0)
    turned = tl.load(head_at + partner[None, :], mask=there, other=0.0)
    new_value = tl.load(qkv + row * row_stride + (HEADS + KV_HEADS + kv_head) * DIM + d, mask=in_dim, other=0.0)

    head = kv_head * GROUP + h
    out_mask = (h < GROUP)[:, None] & in_dim[None, :]
    out_at = out + row * out_stride + head[:, None] * DIM + d[None, :]
    if begin == end:
        tl.store(out_at, tl.zeros([BLOCK_H, BLOCK_D], out.dtype.element_ty), mask=out_mask)
        return
    # The newest key is not in the cache yet: its part starts from it, and reads the older ones.
    newest = end == seen
    older_end = tl.where(newest, end - 1, end)
    new_at = (new_page * PAGE + position % PAGE) * (KV_HEADS * DIM) + kv_head * DIM + d

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if not EARLY:
        query, top, total, acc = start_part(
            query, turned, weights, cos, sin, eps, scale, newest, new_value, keys + new_at, values + new_at,
            top, total, acc, is_k, in_dim, DIM,
        )  # fmt: skip
    for start in range(begin, end, BLOCK_N):
        if EARLY:  # noqa: SIM102 (joined, it would be compiled for many programs too)
            if start == begin:
                query, top, total, acc = start_part(
                    query, turned, weights, cos, sin, eps, scale, newest, new_value, keys + new_at, values + new_at,
                    top, total, acc, is_k, in_dim, DIM,
                )  # fmt: skip
        page, top, total, acc = attend_block(
            query, keys, values, pages, page, start, end, older_end, kv_head, scale, top, total, acc,
            KV_HEADS, DIM, PAGE, BLOCK_N,
        )  # fmt: skip

    result = acc / total[:, None]
    if SPLITS == 1 or end - begin == seen:
        tl.store(out_at, result.to(out.dtype.element_ty), mask=out_mask)
    else:
        at = (row * SPLITS + split) * HEADS + head
        tl.store(partial + at[:, None] * DIM + d[None, :], result, mask=out_mask)
        tl.store(lse + at, (top + tl.log2(total)) / LOG2E, mask=h < GROUP)
        # All threads' results are stored before one of them says so.
        tl.debug_barrier()
        parts = tl.cdiv(seen, part)
        arrived = counter + row * KV_HEADS + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(arrived, 0)
            g = tl.arange(0, BLOCK_G)
            heads = kv_head * GROUP + g
            merged = merge_parts(
                partial, lse, row * SPLITS * HEADS + heads, g < GROUP, parts, HEADS, DIM, BLOCK_G, BLOCK_D, CHUNK
            )
            tl.store(
                out + row * out_stride + heads[:, None] * DIM + d[None, :],
                merged.to(out.dtype.element_ty),
                mask=(g < GROUP)[:, None] & in_dim[None, :],
            )


@triton.jit
def part_size(seen, SPLITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys of every part but the last: whole blocks, so that a block never crosses a page that it fits into.

    A part reads 4 d bytes a key, and costs the program that merges 4 d GROUP; with both read at one speed, parts of
    sqrt(keys * GROUP) keys are the quickest.
    """
    blocks = (tl.sqrt((seen * GROUP).to(tl.float32)) / BLOCK_N + 0.5).to(tl.int32)
    return tl.maximum(tl.maximum(blocks, 1), tl.cdiv(tl.cdiv(seen, SPLITS), BLOCK_N)) * BLOCK_N


@triton.jit
def start_part(
    query, turned, weights, cos, sin, eps, scale, newest, new_value, key_at, value_at, top, total, acc, is_k, in_dim,
    DIM: tl.constexpr,
):  # fmt: skip
    """The tile normed and rotated; and the empty softmax, with the newest key in it where that is in this part.

    The newest key and its value go to the cache as well.
    """
    wide, other = query.to(tl.float32), turned.to(tl.float32)
    if weights is not None:
        q_weight, k_weight, q_partner, k_partner = weights
        # Rounded before and after the weight, as the models were trained.
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        weight = tl.where(is_k, k_weight[None, :], q_weight[None, :])
        wide = ((wide * factor).to(query.dtype).to(tl.float32) * weight.to(tl.float32)).to(query.dtype).to(tl.float32)
        weight = tl.where(is_k, k_partner[None, :], q_partner[None, :])
        other = ((other * factor).to(query.dtype).to(tl.float32) * weight.to(tl.float32)).to(query.dtype).to(tl.float32)
    query = (wide * cos[None, :] + other * sin[None, :]).to(query.dtype)
    if newest:
        key = tl.sum(tl.where(is_k, query.to(tl.float32), 0.0), 0)
        top = tl.sum(query.to(tl.float32) * key[None, :], 1) * (scale * LOG2E)
        total += 1.0
        acc += new_value.to(tl.float32)[None, :]
        tl.store(key_at, key.to(key_at.dtype.element_ty), mask=in_dim)
        tl.store(value_at, new_value.to(value_at.dtype.element_ty), mask=in_dim)
    return query, top, total, acc

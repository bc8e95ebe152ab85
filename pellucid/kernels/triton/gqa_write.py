# mypy: disable-error-code="no-untyped-def,import-untyped,untyped-decorator"
"""What grouped-query attention needs before it, in one launch: q and k normed and rotated, k and v in the cache.

Called by layers, for prompts (`TritonOps`), and by the captured decode step where another project's kernel attends;
ours does this itself (`gqa_attend`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input

HEADS_AT_ONCE = 8


class ByContext(NamedTuple):
    """Rows of different sequences, int32: a row's position is context - 1; one with context 0 writes no cache."""

    page_table: torch.Tensor  # [sequences, pages]
    sequence: torch.Tensor  # [rows]
    context: torch.Tensor  # [rows]


class BySlot(NamedTuple):
    """Tokens of any sequences, int64 [rows] each; one of slot -1 writes no cache."""

    positions: torch.Tensor
    slots: torch.Tensor


def norm_rope_write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    table: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: ByContext | BySlot,
    query: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """query [rows, heads, d] = rope(norm(q)); rope(norm(k)) and v join the cache, `where` the rows stand.

    qkv [rows, (heads + 2 kv_heads) * d], any row stride; norms [d] or None; table fp32 [positions, d], cos then sin;
    keys, values [pages, page, kv_heads * d]. `query` may be the heads of q in `qkv` itself where rows stand by slot.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[-1] // dim
    block_h = min(HEADS_AT_ONCE, triton.next_power_of_2(heads + 2 * kv_heads))
    if isinstance(where, BySlot):
        standing, table_stride = (where.slots, where.slots, where.positions), 0
    else:
        standing, table_stride = where, where.page_table.stride(0)
    # Rows first: they may be more than the 65,535 that a grid has in its other dimensions.
    _norm_rope_write[(rows, triton.cdiv(heads + 2 * kv_heads, block_h))](
        qkv, q_norm, k_norm, table, keys, values, *standing, query, qkv.stride(0), table_stride, query.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_H=block_h, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        PAGE=keys.shape[1], BY_SLOT=isinstance(where, BySlot), INTERLEAVED=interleaved, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _norm_rope_write(
    qkv, q_norm, k_norm, table, keys, values, table_or_slots, sequence, context, query, row_stride, table_stride,
    query_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BY_SLOT: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, heads), of the heads of q, k and v one after another.

    BY_SLOT: `table_or_slots` has each row's slot, and `context` its position.
    """
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    in_dim = d < DIM
    # Column d turns with its partner: (2i, 2i + 1), or (i, i + d/2).
    partner = d ^ 1 if INTERLEAVED else tl.where(d < HALF, d + HALF, d - HALF)
    is_q = (h < HEADS)[:, None]
    is_k = ((h >= HEADS) & (h < HEADS + KV_HEADS))[:, None]
    weight = tl.full([BLOCK_H, BLOCK_D], 1.0, tl.float32)
    other_weight = weight
    if q_norm is not None:
        weight = tl.where(
            is_q,
            tl.load(q_norm + d, mask=in_dim, other=0.0)[None, :].to(tl.float32),
            tl.load(k_norm + d, mask=in_dim, other=0.0)[None, :].to(tl.float32),
        )
        other_weight = tl.where(
            is_q,
            tl.load(q_norm + partner, mask=in_dim, other=0.0)[None, :].to(tl.float32),
            tl.load(k_norm + partner, mask=in_dim, other=0.0)[None, :].to(tl.float32),
        )
    # Where the row stands was written before the kernel ahead began.
    if BY_SLOT:
        position = tl.load(context + row)
        slot = tl.load(table_or_slots + row).to(tl.int64)
        caches = slot >= 0
    else:
        seen = tl.load(context + row)
        position = tl.maximum(seen - 1, 0)
        pages = table_or_slots + tl.load(sequence + row).to(tl.int64) * table_stride
        slot = tl.load(pages + position // PAGE).to(tl.int64) * PAGE + position % PAGE
        caches = seen > 0
    angles = table + position.to(tl.int64) * DIM + (d // 2 if INTERLEAVED else d % HALF)
    cos = tl.load(angles, mask=in_dim, other=0.0)
    sin = tl.load(angles + HALF, mask=in_dim, other=0.0)
    sin = tl.where(d % 2 == 0 if INTERLEAVED else d < HALF, -sin, sin)
    wait_for_input(PDL)

    there = (h < HEADS + 2 * KV_HEADS)[:, None] & in_dim[None, :]
    head_at = qkv + row * row_stride + h[:, None] * DIM
    x = tl.load(head_at + d[None, :], mask=there, other=0.0)
    turned = tl.load(head_at + partner[None, :], mask=there, other=0.0)
    wide, other = x.to(tl.float32), turned.to(tl.float32)
    if q_norm is not None:
        # Rounded before and after the weight, as the models were trained.
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        wide = ((wide * factor).to(x.dtype).to(tl.float32) * weight).to(x.dtype).to(tl.float32)
        other = ((other * factor).to(x.dtype).to(tl.float32) * other_weight).to(x.dtype).to(tl.float32)
    rotated = (wide * cos[None, :] + other * sin[None, :]).to(x.dtype)
    if BY_SLOT:
        # `query` may be where x lies: all of a head is read before any of it is written.
        tl.debug_barrier()
    tl.store(query + row * query_stride + h[:, None] * DIM + d[None, :], rotated, mask=is_q & in_dim[None, :])
    at = slot * (KV_HEADS * DIM) + d[None, :]
    tl.store(keys + at + (h - HEADS)[:, None] * DIM, rotated, mask=is_k & in_dim[None, :] & caches)
    tl.store(
        values + at + (h - HEADS - KV_HEADS)[:, None] * DIM,
        x,
        mask=(h >= HEADS + KV_HEADS)[:, None] & there & caches,
    )

# mypy: disable-error-code="no-untyped-def,import-untyped,untyped-decorator"
"""Causal flash attention over ragged chunks: paged keys (GQA), or rows of expanded keys (MLA).

Called by `attention.triton_gqa` and `attention.triton_mla` in prefill. One kernel serves both: it only asks at which
row of K and V key n lies. Query tiles come from `prefill_tiles`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.gqa_decode import page_of
from pellucid.kernels.triton.prefill_tiles import PrefillTile, block_width, power_below

LOG2E = tl.constexpr(1.4426950408889634)


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    kv_heads: int,
    out: torch.Tensor,
    *,
    tile: PrefillTile,
) -> None:
    """Chunks whose keys, the chunk's own included, lie in the paged cache.

    q, out [tokens, heads, d] with unit stride in d; keys, values [pages, page, kv_heads * d]; page_table int32
    [sequences, pages]; tiles: `query_tiles(spans, tile.block_m, device)`.
    """
    heads, dim = q.shape[1:]
    page = keys.shape[1]
    cache_keys, cache_values = keys.view(-1, kv_heads, dim), values.view(-1, kv_heads, dim)
    first = power_below(dim)
    rest = cache_keys[..., first:] if first < dim else cache_keys
    _launch(q, cache_keys, rest, cache_values, page_table, tiles, scale, out, tile, heads // kv_heads, first, page)


def ragged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    tile: PrefillTile,
    k_shared: torch.Tensor | None = None,
) -> None:
    """Chunks whose keys lie one after another, those of a sequence from the `key_start` of its tiles on.

    q [tokens, heads, qk]; k [keys, heads, qk], v [keys, heads, v], out [tokens, heads, v], all with unit stride in the
    last dim. With `k_shared` [keys, rest] a key is [k of the head | k_shared], the second part the same for all heads
    (the rotated part of MLA), and k is [keys, heads, qk - rest].
    """
    dim = q.shape[-1]
    if k_shared is not None:
        first, rest = k.shape[-1], k_shared[:, None].expand(-1, q.shape[1], -1)
    else:
        first = power_below(dim)
        rest = k[..., first:] if first < dim else k
    _launch(q, k, rest, v, tiles, tiles, scale, out, tile, 1, first, 0)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    rest: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tile: PrefillTile,
    group: int,
    first: int,
    page: int,
) -> None:
    remaining, v_dim = q.shape[-1] - first, v.shape[-1]
    strides = (stride for x in (q, k, rest, v, out) for stride in x.stride()[:2])
    _prefill[(q.shape[1], tiles.shape[0])](
        q, k, rest, v, page_table, tiles, out, *strides, page_table.stride(0), scale,
        GROUP=group, FIRST=first, REST=remaining, BLOCK_FIRST=block_width(first),
        BLOCK_REST=block_width(remaining) if remaining else 0, V_DIM=v_dim, BLOCK_V=block_width(v_dim), PAGE=page,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    q, k, k_rest, v, page_table, tiles, out, q_stride, q_head_stride, k_stride, k_head_stride, rest_stride,
    rest_head_stride, v_stride, v_head_stride, out_stride, out_head_stride, table_stride, scale,
    GROUP: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_FIRST: tl.constexpr, BLOCK_REST: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Heads of one tile are neighbours in launch order: those of a group share their keys in the L2 cache.
    head = tl.program_id(0)
    at = tiles + tl.program_id(1) * 5
    start = tl.load(at)
    rows = tl.load(at + 1) - start
    seen = tl.load(at + 2)
    sequence = tl.load(at + 3)
    key_start = tl.load(at + 4)
    m = tl.arange(0, BLOCK_M)
    real = m < rows
    c_v = tl.arange(0, BLOCK_V)
    out_at = out + start.to(tl.int64) * out_stride + head * out_head_stride + m[:, None] * out_stride + c_v[None, :]
    out_mask = real[:, None] & (c_v < V_DIM)[None, :]
    if seen == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_V], out.dtype.element_ty), mask=out_mask)
        return

    q_at = q + start.to(tl.int64) * q_stride + head * q_head_stride + m[:, None] * q_stride
    c_first = tl.arange(0, BLOCK_FIRST)
    query = tl.load(q_at + c_first[None, :], mask=real[:, None] & (c_first < FIRST)[None, :], other=0.0)
    if REST > 0:
        c_rest = tl.arange(0, BLOCK_REST)
        rest_mask = real[:, None] & (c_rest < REST)[None, :]
        query_rest = tl.load(q_at + FIRST + c_rest[None, :], mask=rest_mask, other=0.0)
    else:
        query_rest = query
    kv_head = head // GROUP
    k += kv_head * k_head_stride
    k_rest += kv_head * rest_head_stride
    v += kv_head * v_head_stride
    pages = page_table + sequence.to(tl.int64) * table_stride
    row_seen = seen + m
    last = seen + rows - 1
    # Keys below `full` are seen by every row of the tile: whole blocks that need no mask.
    full = seen // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for masked in tl.static_range(2):
        acc, total, top = _attend(
            acc, total, top, query, query_rest, k, k_rest, v, pages, key_start, full if masked else 0,
            last if masked else full, row_seen, k_stride, rest_stride, v_stride, scale * LOG2E, FIRST, REST,
            BLOCK_FIRST, BLOCK_REST, V_DIM, BLOCK_V, PAGE, BLOCK_N, masked,
        )  # fmt: skip
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def _attend(
    acc, total, top, query, query_rest, k, k_rest, v, pages, key_start, begin, end, row_seen, k_stride, rest_stride,
    v_stride, scale,
    FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_FIRST: tl.constexpr, BLOCK_REST: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys [begin, end), a multiple of BLOCK_N of them unless MASKED; `scale` is for exp2."""
    WHOLE_PAGES: tl.constexpr = PAGE > 0 and PAGE % BLOCK_N == 0
    n = tl.arange(0, BLOCK_N)
    c_first = tl.arange(0, BLOCK_FIRST)
    c_v = tl.arange(0, BLOCK_V)
    if PAGE > 0:
        page = page_of(pages, begin, end, n, PAGE, WHOLE_PAGES)
    for start in range(begin, end, BLOCK_N):
        base = (key_start + start).to(tl.int64)
        row = n
        if WHOLE_PAGES:
            base = page.to(tl.int64) * PAGE + start % PAGE
        elif PAGE > 0:
            base = tl.zeros([], tl.int64)
            row = page.to(tl.int64) * PAGE + (start + n) % PAGE
        if PAGE > 0:
            page = page_of(pages, start + BLOCK_N, end, n, PAGE, WHOLE_PAGES)
        key = _load(k + base * k_stride, row, k_stride, c_first, start + n < end, FIRST, BLOCK_FIRST, MASKED)
        value = _load(v + base * v_stride, row, v_stride, c_v, start + n < end, V_DIM, BLOCK_V, MASKED)
        if REST > 0:
            c_rest = tl.arange(0, BLOCK_REST)
            at = k_rest + base * rest_stride
            key_rest = _load(at, row, rest_stride, c_rest, start + n < end, REST, BLOCK_REST, MASKED)
            scores = tl.dot(query_rest, tl.trans(key_rest))
            scores = tl.dot(query, tl.trans(key), scores)  # [BLOCK_M, BLOCK_N]
        else:
            scores = tl.dot(query, tl.trans(key))
        if MASKED:
            scores = tl.where((start + n)[None, :] < row_seen[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        fade = tl.exp2(top - new_top)
        p = tl.exp2(scores * scale - new_top[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * fade[:, None])
        top = new_top
    return acc, total, top


@triton.jit
def _load(at, row, stride, column, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK_N, BLOCK] rows; zeros right of WIDTH and, if MASKED, where not `inside`."""
    at = at + row[:, None] * stride + column[None, :]
    if WIDTH != BLOCK:
        right = (column < WIDTH)[None, :]
        values = tl.load(at, mask=right & inside[:, None] if MASKED else right, other=0.0)
    elif MASKED:
        values = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        values = tl.load(at)
    return values

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Decode attention of MLA in three launches: absorb, attend, combine. Called by `layers.fused_attention`.

    q, kv ---absorb_rope_write--> q_latent, one cache row ---split_decode--> partial, lse ---combine_project--> out

A cache row [latent | rope] is key and value of every head, so that one program reads it once for 16 heads or more.
Padded rows have context 0: they write nothing to the cache and their output is zeros. Grids depend on the number of
rows and never on contexts, so that a captured graph serves every context.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from pellucid.core import PlanError
from pellucid.kernels.device import DeviceLimits, device_limits
from pellucid.kernels.triton.chain import fetch_to_l2, wait_for_input
from pellucid.kernels.triton.mla_tiles import (
    AbsorbTile,
    DecodeTile,
    ProjectTile,
    absorb_tile,
    decode_tile,
    project_tile,
)


@triton.jit(do_not_specialize=["page_table_stride"])
def _absorb_rope_write(
    q, kv, kv_norm, eps, absorb, table, latent, page_table, sequence, context, q_latent, rows, q_stride, kv_stride,
    table_stride, page_table_stride, out_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    ONE_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `rows` programs rotate q, and norm, rotate and cache kv of one row; the others multiply."""
    TILES: tl.constexpr = (RANK + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    if pid < rows:
        _rope_write_row(
            pid, q, kv, kv_norm, eps, table, latent, page_table, sequence, context, q_latent,
            q_stride, kv_stride, table_stride, page_table_stride, out_stride,
            HEADS, NOPE, ROPE, RANK, PAGE, INTERLEAVED, PDL,
        )  # fmt: skip
        return
    # Neighbours share weights: the second tile of rows finds them in the L2.
    tile = pid - rows
    row_tiles = tl.cdiv(rows, BLOCK_R)
    row = tile % row_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tile // row_tiles // TILES
    channel = tile // row_tiles % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    weight = tl.load(
        absorb + (head * RANK + channel[:, None]) * NOPE + k[None, :],
        mask=(channel[:, None] < RANK) & (k[None, :] < NOPE),
        other=0.0,
        eviction_policy="evict_first" if ONE_TILE else "",
    )
    wait_for_input(PDL)
    x = tl.load(
        q + row[:, None] * q_stride + head * (NOPE + ROPE) + k[None, :],
        mask=(row[:, None] < rows) & (k[None, :] < NOPE),
        other=0.0,
    )
    # One row goes through the tensor cores too: the compiler pads it, and sums in fp32 lanes take more instructions.
    tl.store(
        q_latent + row[:, None] * out_stride + head * (RANK + ROPE) + channel[None, :],
        tl.dot(x, tl.trans(weight)),
        mask=(row[:, None] < rows) & (channel[None, :] < RANK),
    )


@triton.jit
def _rope_write_row(
    row, q, kv, kv_norm, eps, table, latent, page_table, sequence, context, q_latent, q_stride, kv_stride,
    table_stride, page_table_stride, out_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = RANK + ROPE
    HALF: tl.constexpr = ROPE // 2
    channel = tl.arange(0, triton.next_power_of_2(RANK))
    is_latent = channel < RANK
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    is_pair = pair < HALF
    # The two that turn together: (2i, 2i + 1), or (i, i + rope/2).
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else HALF)
    head = tl.arange(0, triton.next_power_of_2(HEADS))[:, None]
    is_query = (head < HEADS) & is_pair[None, :]
    norm = tl.load(kv_norm + channel, mask=is_latent, other=0.0).to(tl.float32)
    # Where the row stands was written before the kernel ahead began, so it need not be waited for.
    keys = tl.load(context + row)
    pages = page_table + tl.load(sequence + row) * page_table_stride
    position = tl.maximum(keys - 1, 0)
    page = tl.load(pages + position // PAGE)
    cos = tl.load(table + position * table_stride + pair, mask=is_pair, other=0.0)
    sin = tl.load(table + position * table_stride + HALF + pair, mask=is_pair, other=0.0)
    wait_for_input(PDL)
    # All loads before all stores: none may be moved over a store.
    kv_row = kv + row * kv_stride
    x = tl.load(kv_row + channel, mask=is_latent, other=0.0)
    k_a = tl.load(kv_row + RANK + first, mask=is_pair, other=0.0).to(tl.float32)
    k_b = tl.load(kv_row + RANK + second, mask=is_pair, other=0.0).to(tl.float32)
    q_rope = q + row * q_stride + head * (NOPE + ROPE) + NOPE
    q_a = tl.load(q_rope + first[None, :], mask=is_query, other=0.0).to(tl.float32)
    q_b = tl.load(q_rope + second[None, :], mask=is_query, other=0.0).to(tl.float32)

    rotated = q_latent + row * out_stride + head * WIDTH + RANK
    tl.store(rotated + first[None, :], q_a * cos[None, :] - q_b * sin[None, :], mask=is_query)
    tl.store(rotated + second[None, :], q_b * cos[None, :] + q_a * sin[None, :], mask=is_query)
    wide = x.to(tl.float32)
    # Rounded before and after the weight, as the models were trained.
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / RANK + eps)).to(x.dtype).to(tl.float32)
    cached = latent + (page.to(tl.int64) * PAGE + position % PAGE) * WIDTH
    tl.store(cached + channel, normed * norm, mask=is_latent & (keys > 0))
    tl.store(cached + RANK + first, k_a * cos - k_b * sin, mask=is_pair & (keys > 0))
    tl.store(cached + RANK + second, k_b * cos + k_a * sin, mask=is_pair & (keys > 0))


def absorb_rope_write(
    q: torch.Tensor, kv: torch.Tensor, kv_norm: torch.Tensor, eps: float, absorb: torch.Tensor, table: torch.Tensor,
    interleaved: bool, latent: torch.Tensor, page_table: torch.Tensor, sequence: torch.Tensor, context: torch.Tensor,
    q_latent: torch.Tensor, pdl: bool = False, tile: AbsorbTile | None = None,
) -> None:  # fmt: skip
    """Queries in latent space, and the cache row of every token: RMSNorm of its latent, rotation of its rope part.

    q [rows, heads * (nope + rope)] and kv [rows, kv_lora_rank + rope] may be slices of wider rows. absorb [heads,
    kv_lora_rank, nope]; table fp32 [positions, rope] (cos, then sin); latent [pages, page, kv_lora_rank + rope];
    page_table int32 [sequences, pages]; sequence, context int32 [rows]. Writes q_latent [rows, heads, kv_lora_rank +
    rope] = [absorb[h] @ q_nope | rotated q_rope], and latent at position context - 1.
    """
    heads, rank, nope = absorb.shape
    rows, rope = q.shape[0], latent.shape[2] - rank
    tile = tile or absorb_tile(rows, heads)
    tiles = heads * triton.cdiv(rank, tile.block_c) * triton.cdiv(rows, tile.block_r)
    _absorb_rope_write[(rows + tiles,)](
        q, kv, kv_norm, eps, absorb, table, latent, page_table, sequence, context, q_latent, rows, q.stride(0),
        kv.stride(0), table.stride(0), page_table.stride(0), q_latent.stride(0),
        HEADS=heads, NOPE=nope, ROPE=rope, RANK=rank, PAGE=latent.shape[1], INTERLEAVED=interleaved,
        BLOCK_R=tile.block_r, BLOCK_C=tile.block_c, BLOCK_K=max(16, triton.next_power_of_2(nope)),
        ONE_TILE=rows <= tile.block_r, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["page_table_stride"])
def _split_decode(
    q, latent, page_table, sequence, context, partial, lse, scale, splits, q_stride, page_table_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Online softmax in base 2 (`scale` includes log2 e) over the keys of one split, for BLOCK_H heads of one row."""
    WIDTH: tl.constexpr = RANK + ROPE
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    keys = tl.load(context + row)
    pages = page_table + tl.load(sequence + row) * page_table_stride
    share = tl.cdiv(tl.cdiv(keys, splits), SPLIT_KEYS) * SPLIT_KEYS
    start = split * share
    stop = tl.minimum(start + share, keys)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < HEADS
    part = (row * splits + split) * HEADS
    step = tl.arange(0, BLOCK_N)
    # Where the row stands was written before the kernel ahead began, and so were all keys but the newest: the first of
    # them are on their way to the L2 while q is still being made.
    page = tl.load(pages + start // PAGE, mask=start < stop, other=0)
    # Contexts are mostly far below what the grid is for: without keys, a program makes room for another's at once. The
    # first of each row waits all the same, so that this launch does not end before the one ahead.
    if (start >= stop) & (split > 0):
        tl.store(lse + part + head, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=real)
        return
    if PDL:
        first = page.to(tl.int64) * PAGE + start % PAGE + step
        fetch_to_l2(latent, first, start + step < stop, 0, WIDTH, WIDTH)
    wait_for_input(PDL)
    if start >= stop:
        tl.store(lse + part + head, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=real)
        return

    channel = tl.arange(0, BLOCK_C)
    turned = tl.arange(0, BLOCK_P)
    channel_real = (channel < RANK)[None, :]
    turned_real = (turned < ROPE)[None, :]
    source = q + row * q_stride + head[:, None] * WIDTH
    q_latent = tl.load(source + channel[None, :], mask=real[:, None] & channel_real, other=0.0)
    q_rope = tl.load(source + RANK + turned[None, :], mask=real[:, None] & turned_real, other=0.0)

    best = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for key in range(start, stop, BLOCK_N):
        tile = latent + (page.to(tl.int64) * PAGE + key % PAGE) * WIDTH + step[:, None] * WIDTH
        # A tile lies in one page; the next one's number is on its way while this tile is worked on.
        page = tl.load(pages + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < stop, other=0)
        inside = key + step < stop
        # Of the usual widths no channel is padding, and a comparison less is made for every 16 bytes.
        latent_mask = inside[:, None] if BLOCK_C == RANK else inside[:, None] & channel_real
        rope_mask = inside[:, None] if BLOCK_P == ROPE else inside[:, None] & turned_real
        row_latent = tl.load(tile + channel[None, :], mask=latent_mask, other=0.0)
        row_rope = tl.load(tile + RANK + turned[None, :], mask=rope_mask, other=0.0)
        score = tl.dot(q_latent, tl.trans(row_latent))
        score = tl.dot(q_rope, tl.trans(row_rope), score) * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        # Every tile has a key inside, so the new maximum is finite.
        higher = tl.maximum(best, tl.max(score, 1))
        fade = tl.exp2(best - higher)
        weight = tl.exp2(score - higher[:, None])
        total = total * fade + tl.sum(weight, 1)
        acc = tl.dot(weight.to(row_latent.dtype), row_latent, acc * fade[:, None])
        best = higher

    target = partial + part * RANK + head[:, None] * RANK + channel[None, :]
    tl.store(target, acc / total[:, None], mask=real[:, None] & channel_real)
    tl.store(lse + part + head, (best + tl.log2(total)) * 0.6931471805599453, mask=real)


def split_decode(
    q_latent: torch.Tensor, latent: torch.Tensor, page_table: torch.Tensor, sequence: torch.Tensor,
    context: torch.Tensor, scale: float, kv_lora_rank: int, partial: torch.Tensor, lse: torch.Tensor, *,
    pdl: bool = False, tile: DecodeTile | None = None,
) -> None:  # fmt: skip
    """Attention of each row over each split of its keys, in latent space (flash decoding).

    q_latent [rows, heads, kv_lora_rank + rope]; latent [pages, page, kv_lora_rank + rope]; page_table int32
    [sequences, pages]; sequence, context int32 [rows]. Writes partial fp32 [rows, splits, heads, kv_lora_rank], the
    normalized output of every split that has keys, and lse fp32 [rows, splits, heads], the log of its sum of
    exponentials; -inf for a split without keys, whose partial is left as it was. Splits with keys come first.

    Raises:
        PlanError: the page size is no multiple of 16, or of the keys of a `tile` that was asked for.
    """
    rows, heads, width = q_latent.shape
    page, splits = latent.shape[1], partial.shape[1]
    tile = tile or decode_tile(rows, heads, page, width, _limits(q_latent.device))
    if tile.block_n < 16 or page % tile.block_n or tile.split_keys % tile.block_n:
        raise PlanError(f"MLA decode in tiles of {tile.block_n} keys of pages of {page}; use a page size of 64")
    _split_decode[(triton.cdiv(heads, tile.block_h), splits, rows)](
        q_latent, latent, page_table, sequence, context, partial, lse, scale * math.log2(math.e), splits,
        q_latent.stride(0), page_table.stride(0),
        HEADS=heads, RANK=kv_lora_rank, ROPE=width - kv_lora_rank, PAGE=page, BLOCK_H=tile.block_h,
        BLOCK_N=tile.block_n, BLOCK_C=max(16, triton.next_power_of_2(kv_lora_rank)),
        BLOCK_P=max(16, triton.next_power_of_2(width - kv_lora_rank)), SPLIT_KEYS=tile.split_keys, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


@cache
def _limits(device: torch.device) -> DeviceLimits:
    """The interpreter's CPU stands for the smallest device."""
    return device_limits(device) if device.type == "cuda" else DeviceLimits(0, 1, 101_376)


@triton.jit
def _combine_project(
    partial, lse, value_up, out, rows, splits, out_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, ALL_SPLITS: tl.constexpr, ONE_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_C)
    real = row < rows
    weight = tl.load(
        value_up + (head * V + v[:, None]) * RANK + channel[None, :],
        mask=(v[:, None] < V) & (channel[None, :] < RANK),
        other=0.0,
        eviction_policy="evict_first" if ONE_TILE else "",
    )
    wait_for_input(PDL)

    every = tl.arange(0, ALL_SPLITS)
    first = row[:, None] * splits  # of the row in [rows * splits, heads]
    sums = tl.load(
        lse + (first + every[None, :]) * HEADS + head,
        mask=real[:, None] & (every[None, :] < splits),
        other=float("-inf"),
    )
    used = tl.sum((sums > float("-inf")).to(tl.int32), 1)  # splits with keys come first
    highest = tl.where(used > 0, tl.max(sums, 1), 0.0)
    total = tl.sum(tl.exp(sums - highest[:, None]), 1)
    acc = tl.zeros([BLOCK_R, BLOCK_S, BLOCK_C], tl.float32)
    for begin in range(0, tl.max(used, 0), BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        there = split[None, :] < used[:, None]
        part = first + split[None, :]
        share = tl.exp(tl.load(lse + part * HEADS + head, mask=there, other=float("-inf")) - highest[:, None])
        latent = tl.load(
            partial + (part[:, :, None] * HEADS + head) * RANK + channel[None, None, :],
            mask=there[:, :, None] & (channel[None, None, :] < RANK),
            other=0.0,
        )
        acc += share[:, :, None] * latent
    merged = tl.sum(acc, 1) / tl.where(used > 0, total, 1.0)[:, None]

    tl.store(
        out + row[:, None] * out_stride + head * V + v[None, :],
        tl.dot(merged.to(weight.dtype), tl.trans(weight)),
        mask=real[:, None] & (v[None, :] < V),
    )


def combine_project(
    partial: torch.Tensor,
    lse: torch.Tensor,
    value_up: torch.Tensor,
    out: torch.Tensor,
    pdl: bool = False,
    tile: ProjectTile | None = None,
) -> None:
    """Merges the splits and projects each head's latent output to its values.

    partial [rows, splits, heads, kv_lora_rank], fp32 of `split_decode` or of 16 bits, and lse fp32 [rows, splits,
    heads], contiguous;
    value_up [heads, v, kv_lora_rank]; out [rows, heads * v] with any row stride. A row without keys gives zeros.
    """
    rows, splits, heads, rank = partial.shape
    v_head_dim = value_up.shape[1]
    tile = tile or project_tile(rows, heads, v_head_dim)
    _combine_project[(triton.cdiv(rows, tile.block_r), heads, triton.cdiv(v_head_dim, tile.block_v))](
        partial, lse, value_up, out, rows, splits, out.stride(0),
        HEADS=heads, RANK=rank, V=v_head_dim, BLOCK_R=tile.block_r, BLOCK_S=tile.block_s, BLOCK_V=tile.block_v,
        BLOCK_C=max(16, triton.next_power_of_2(rank)), ALL_SPLITS=triton.next_power_of_2(splits),
        ONE_TILE=rows <= tile.block_r, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip

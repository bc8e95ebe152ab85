# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""One MoE layer for a step of at most 16 rows: router beside shared experts, routed up, routed down.

Called by the captured decode step. Every launcher works on preallocated tensors and can be captured in a CUDA graph.

One row is a chain of matrix-vector products. For 2 to 16 rows a tile of weights is the M side of a `dot` and the rows,
padded to 16, its N side; rows that did not choose the tile's expert are masked off, so that each expert is read once
and nothing is gathered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input
from pellucid.kernels.triton.few_rows import (
    MAX_ROWS,
    SmallTile,
    fetch_ahead,
    fit_block_k,
    gate_up_rows,
    project,
    store_silu_mul,
    weight_tile,
)
from pellucid.kernels.triton.routing import RoutingRule, route_topk, router, router_and_shared, shared_tile

__all__ = [
    "MAX_ROWS",
    "RoutingRule",
    "SmallTile",
    "down_tile",
    "route_topk",
    "router",
    "router_and_shared",
    "shared_tile",
    "small_experts_down",
    "small_experts_up",
    "up_tile",
]


def up_tile(hidden: int, rows: int) -> SmallTile:
    """Of `small_experts_up`. Several rows: 64 rows of weights, the least a Hopper warpgroup multiplies; 60 KB."""
    return SmallTile(2, fit_block_k(hidden, 2048)) if rows == 1 else SmallTile(32, fit_block_k(hidden, 128))


def down_tile(intermediate: int, rows: int) -> SmallTile:
    """Of `small_experts_down`. One row: two outputs a program, so that a hidden size of 2048 is one full wave.

    All of up to eight narrow experts are loaded at once, of wide ones two: sixteen steps of K, or six, in registers.
    """
    if rows == 1:
        block_k = fit_block_k(intermediate, 512)
        return SmallTile(2, block_k, warps=2, stages=8 if intermediate <= 2 * block_k else 2)
    return SmallTile(64, fit_block_k(intermediate, 128))


def small_experts_up(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor,
    pdl: bool = False,
    tile: SmallTile | None = None,
) -> None:
    """act[r * k + j] = silu(g) * u of expert experts[r, j] on rms_norm(x[r]).

    x [rows, hidden], any row stride; experts int32 [rows, k], -1 where nobody is chosen: its row of `act` is undefined;
    gate_up [experts, 2 * intermediate, hidden], gate above up; act [rows * k, intermediate]; norm None: x is normed.
    """
    (rows, hidden), top_k = x.shape, experts.shape[1]
    intermediate = act.shape[1]
    tile = tile or up_tile(hidden, rows)
    _experts_up_kernel[(rows * top_k * triton.cdiv(intermediate, tile.block_n),)](
        x, x.stride(0), rows, norm, eps, experts, gate_up, act, act.stride(0),
        HIDDEN=hidden, INTERMEDIATE=intermediate, TOP_K=top_k, PADDED_K=triton.next_power_of_2(top_k),
        BLOCK_R=1 if rows == 1 else MAX_ROWS, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


def small_experts_down(
    act: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    down: torch.Tensor,
    shared_act: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    residual: torch.Tensor,
    pair_out: torch.Tensor | None = None,
    pdl: bool = False,
    tile: SmallTile | None = None,
) -> None:
    """residual[r] += sum_j weights[r, j] * down[experts[r, j]] @ act[r * k + j] + shared_down @ shared_act[r].

    act [rows * k, intermediate], shared_act [rows, shared] and residual [rows, hidden] with any row stride; weights
    fp32 [rows, k]; down [experts, hidden, intermediate]; shared_down [hidden, shared]. pair_out fp32
    [at least rows * k, and rows more with shared experts; hidden], contiguous, is scratch of more than one row. The sum
    is in a fixed order, in fp32, and rounded once.
    """
    (rows, hidden), top_k = residual.shape, experts.shape[1]
    intermediate, shared = act.shape[1], 0 if shared_act is None else shared_act.shape[1]
    tile = tile or down_tile(intermediate, rows)
    tiles = triton.cdiv(hidden, tile.block_n)
    shared_stride = 0 if shared_act is None else shared_act.stride(0)
    if rows == 1:
        # What of the shared experts fits 32 registers a thread is read while the kernel before still runs.
        first_k = min(triton.next_power_of_2(shared + 1) // 2, 8192 * tile.warps // 4 // tile.block_n) if shared else 0
        _down_row_kernel[(tiles,)](
            act, act.stride(0), experts, weights, down, shared_act, shared_down, residual,
            HIDDEN=hidden, INTERMEDIATE=intermediate, SHARED=shared, TOP_K=top_k, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, FIRST_K=first_k, UNROLL=tile.stages, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
        )  # fmt: skip
        return
    groups = rows * top_k + (1 if shared else 0)
    _down_rows_kernel[(groups * tiles,)](
        act, act.stride(0), rows, experts, weights, down, shared_act, shared_stride, shared_down, pair_out,
        HIDDEN=hidden, INTERMEDIATE=intermediate, SHARED=shared, TOP_K=top_k, PADDED_K=triton.next_power_of_2(top_k),
        BLOCK_R=MAX_ROWS, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip
    block = 256
    _reduce_kernel[(rows, triton.cdiv(hidden, block))](
        pair_out, experts, residual, residual.stride(0), rows,
        HIDDEN=hidden, TOP_K=top_k, SHARED=shared, BLOCK=block, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _pairs_of(experts, pair, rows, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK_R: tl.constexpr):
    """The expert of `pair` (-1: none), its pair in each row or -1 [BLOCK_R], and whether `pair` is its first."""
    index = tl.arange(0, BLOCK_R)[:, None] * TOP_K + tl.arange(0, PADDED_K)[None, :]
    inside = (tl.arange(0, BLOCK_R) < rows)[:, None] & (tl.arange(0, PADDED_K) < TOP_K)[None, :]
    expert = tl.load(experts + pair)
    same = inside & (tl.load(experts + index, mask=inside, other=-1) == expert)
    pairs = tl.max(tl.where(same, index, -1), axis=1)
    return expert, pairs, (expert >= 0) & (tl.min(tl.where(pairs >= 0, pairs, pair), axis=0) == pair)


@triton.jit
def _experts_up_kernel(
    x, x_stride, rows, norm, eps, experts, gate_up, act, act_stride,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N outputs of one expert for every row that chose it; later pairs of it just exit."""
    TILES: tl.constexpr = (INTERMEDIATE + BLOCK_N - 1) // BLOCK_N
    pair, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    m, mask = gate_up_rows(tile, INTERMEDIATE, BLOCK_N)
    wait_for_input(PDL)
    if BLOCK_R == 1:
        expert = tl.load(experts + pair)
        pairs, leads = pair + tl.arange(0, 1), expert >= 0
        use = tl.arange(0, 1) == 0
    else:
        expert, pairs, leads = _pairs_of(experts, pair, rows, TOP_K, PADDED_K, BLOCK_R)
        use = pairs >= 0
    if leads:
        weight = gate_up + expert.to(tl.int64) * (2 * INTERMEDIATE * HIDDEN)
        first = fetch_ahead(weight, m, mask, HIDDEN, BLOCK_K, BLOCK_R, False)
        offsets = tl.arange(0, BLOCK_R) * x_stride
        both = project(
            first, weight, m, mask, x, offsets, use, norm, eps, HIDDEN, 2 * BLOCK_N, BLOCK_R, BLOCK_K
        )  # fmt: skip
        store_silu_mul(both, act, act_stride, pairs, tile, INTERMEDIATE, BLOCK_N, BLOCK_R)


@triton.jit
def _down_row_kernel(
    act, act_stride, experts, weights, down, shared_act, shared_down, residual,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FIRST_K: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of the only row over all its experts. Sums stay in registers until one reduction at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < HIDDEN
    if SHARED > 0:
        first = weight_tile(shared_down, n, mask, 0, SHARED, FIRST_K)
    wait_for_input(PDL)
    total = tl.load(residual + n, mask=mask, other=0.0).to(tl.float32)
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for j in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        # Expert -1 adds nothing: it reads expert 0, whose weight here is 0.
        expert = tl.load(experts + j)
        share = tl.where(expert >= 0, tl.load(weights + j), 0.0)
        weight = down + tl.maximum(expert, 0).to(tl.int64) * (HIDDEN * INTERMEDIATE)
        for k in tl.static_range(0, INTERMEDIATE, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            tile = weight_tile(weight, n, mask, k, INTERMEDIATE, BLOCK_K)
            values = tl.load(act + j * act_stride + columns, mask=(columns < INTERMEDIATE) & (expert >= 0), other=0.0)
            products += tile.to(tl.float32) * (values.to(tl.float32) * share)[None, :]
    if SHARED > 0:
        values = tl.load(shared_act + tl.arange(0, FIRST_K)).to(tl.float32)
        total += tl.sum(first.to(tl.float32) * values[None, :], axis=1)
        for k in tl.static_range(FIRST_K, SHARED, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            tile = weight_tile(shared_down, n, mask, k, SHARED, BLOCK_K)
            values = tl.load(shared_act + columns, mask=columns < SHARED, other=0.0)
            products += tile.to(tl.float32) * values.to(tl.float32)[None, :]
    total += tl.sum(products, axis=1)
    tl.store(residual + n, total.to(residual.dtype.element_ty), mask=mask)


@triton.jit
def _down_rows_kernel(
    act, act_stride, rows, experts, weights, down, shared_act, shared_stride, shared_down, pair_out,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """pair_out of BLOCK_N outputs of one expert, weighted, as in `_experts_up_kernel`. Shared experts come first."""
    TILES: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    pair, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < HIDDEN
    if SHARED > 0:
        if pair == 0:
            fetch_ahead(shared_down, n, mask, SHARED, BLOCK_K, BLOCK_R, PDL)
        pair -= 1
    wait_for_input(PDL)
    row = tl.arange(0, BLOCK_R)
    if pair < 0:
        if SHARED > 0:
            out = project(
                n, shared_down, n, mask, shared_act, row * shared_stride, row < rows, None, 0.0,
                SHARED, BLOCK_N, BLOCK_R, BLOCK_K,
            )  # fmt: skip
            target = pair_out + (rows * TOP_K + row)[None, :] * HIDDEN + n[:, None]
            tl.store(target, out, mask=mask[:, None] & (row < rows)[None, :])
    else:
        expert, pairs, leads = _pairs_of(experts, pair, rows, TOP_K, PADDED_K, BLOCK_R)
        if leads:
            weight = down + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
            out = project(
                n, weight, n, mask, act, pairs * act_stride, pairs >= 0, None, 0.0,
                INTERMEDIATE, BLOCK_N, BLOCK_R, BLOCK_K,
            )  # fmt: skip
            share = tl.load(weights + pairs, mask=pairs >= 0, other=0.0)
            target = pair_out + pairs[None, :] * HIDDEN + n[:, None]
            tl.store(target, out * share[None, :], mask=mask[:, None] & (pairs >= 0)[None, :])


@triton.jit
def _reduce_kernel(
    pair_out, experts, residual, residual_stride, rows,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual[r] += its pairs in order, then its shared output."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < HIDDEN
    wait_for_input(PDL)
    total = tl.load(residual + row * residual_stride + n, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        total += tl.load(pair_out + pair * HIDDEN + n, mask=mask & (tl.load(experts + pair) >= 0), other=0.0)
    if SHARED > 0:
        total += tl.load(pair_out + (rows * TOP_K + row) * HIDDEN + n, mask=mask, other=0.0)
    tl.store(residual + row * residual_stride + n, total.to(residual.dtype.element_ty), mask=mask)

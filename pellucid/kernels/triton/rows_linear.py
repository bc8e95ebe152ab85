# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code=assignment
"""Dense projections of decode steps of 3 to 128 rows. Called by `layers.fused_step`.

Such a step still takes as long as its weights, but every weight meets all rows: tiles of weights are the M side of the
tensor cores' products and the rows the N side, so that no row is padding. Where the tiles are too few for the device,
the columns are split as well; the last program of a tile adds the parts up, always in the same order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pellucid.kernels.device import DeviceLimits
from pellucid.kernels.triton.chain import fetch_to_l2, wait_for_input

MAX_ROWS = 128
"""Most rows of `rows_linear`."""


class RowsTile(NamedTuple):
    """Weight rows (gate and up rows alike) and columns of a tile, parts that the columns are split into, warps, stages
    of the pipeline, and the first columns of each part that are fetched to the L2 while the input is not there yet.

    `split` is a power of two. `tma` copies tiles by descriptors, which devices have from SM 9.0 on. `together` promises
    that the device holds all programs at a time: then those of a tile wait for each other and share the adding up.
    """

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int
    ahead: int = 0
    tma: bool = True
    together: bool = False


@triton.jit
def _weights(weight, n, k, N, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, BLOCK_K] of weight rows from n and columns from k; zeros past the end."""
    if TMA:
        return weight.load([n, k])
    else:  # noqa: RET505 (the compiler reads on behind a return)
        row = n + tl.arange(0, ROWS)
        column = k + tl.arange(0, BLOCK_K)
        inside = (row < N)[:, None] & (column < K)[None, :]
        return tl.load(
            weight + row.to(tl.int64)[:, None] * K + column[None, :], mask=inside, other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip


@triton.jit
def _inputs(x, x_stride, k, rows, K: tl.constexpr, RP: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """[RP, BLOCK_K] of all rows of x; zeros past the end."""
    if TMA:
        return x.load([0, k])
    else:  # noqa: RET505
        r = tl.arange(0, RP)
        column = k + tl.arange(0, BLOCK_K)
        inside = (r < rows)[:, None] & (column < K)[None, :]
        return tl.load(x + r[:, None] * x_stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(
    total, second, n, bias, out, out_stride, rows, N,
    OUTPUTS: tl.constexpr, RP: tl.constexpr, PAIR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias, SwiGLU and residual on sums [OUTPUTS, RP] of the outputs from n on, then out[r, n]."""
    o = n + tl.arange(0, OUTPUTS)
    r = tl.arange(0, RP)
    if bias is not None:
        total += tl.load(bias + o, mask=o < N, other=0.0).to(tl.float32)[:, None]
    if PAIR:
        if bias is not None:
            second += tl.load(bias + N + o, mask=o < N, other=0.0).to(tl.float32)[:, None]
        total = total / (1.0 + tl.exp(-total)) * second
    there = (r < rows)[:, None] & (o < N)[None, :]
    target = out + r[:, None] * out_stride + o[None, :]
    result = tl.trans(total)
    if RESIDUAL:
        result += tl.load(target, mask=there, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_up(
    parts, first, n, bias, out, out_stride, rows, N,
    SPLIT: tl.constexpr, OUTPUTS: tl.constexpr, RP: tl.constexpr, PAIR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores OUTPUTS / SPLIT outputs of the tile at n, from output `first` of it on. parts [SPLIT, 1 or 2, OUTPUTS, RP]
    were written by programs that have arrived."""
    SLICE: tl.constexpr = OUTPUTS // SPLIT
    SIZE: tl.constexpr = (2 if PAIR else 1) * OUTPUTS * RP
    at = (first + tl.arange(0, SLICE))[:, None] * RP + tl.arange(0, RP)[None, :]
    total = tl.zeros([SLICE, RP], tl.float32)
    second = tl.zeros([SLICE, RP], tl.float32)
    for one in tl.static_range(SPLIT):
        total += tl.load(parts + one * SIZE + at, cache_modifier=".cg")
        if PAIR:
            second += tl.load(parts + one * SIZE + OUTPUTS * RP + at, cache_modifier=".cg")
    _store(total, second, n + first, bias, out, out_stride, rows, N, SLICE, RP, PAIR, RESIDUAL)


@triton.jit
def _rows_kernel(
    x, x_stride, rows, weight, weight_rows, bias, out, out_stride, N, parts, arrived, address,
    K: tl.constexpr, RP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PAIR: tl.constexpr, RESIDUAL: tl.constexpr, TMA: tl.constexpr,
    TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    PART: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * OUTPUTS
    begin = split * PART
    end = tl.minimum(begin + PART, K)
    COLUMNS: tl.constexpr = min(AHEAD, PART, K)
    if PDL and COLUMNS > 0:
        i = n + tl.arange(0, OUTPUTS)
        fetch_to_l2(address, i.to(tl.int64), i < N, begin, K, COLUMNS)
        if PAIR:
            fetch_to_l2(address, N + i.to(tl.int64), i < N, begin, K, COLUMNS)
    wait_for_input(PDL)
    total = tl.zeros([OUTPUTS, RP], tl.float32)
    second = tl.zeros([OUTPUTS, RP], tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        w = _weights(weight, n, k, weight_rows, K, OUTPUTS, BLOCK_K, TMA)
        if PAIR:
            up = _weights(weight, N + n, k, weight_rows, K, OUTPUTS, BLOCK_K, TMA)
        values = tl.trans(_inputs(x, x_stride, k, rows, K, RP, BLOCK_K, TMA))
        total = tl.dot(w, values, total)
        if PAIR:
            second = tl.dot(up, values, second)
    if SPLIT == 1:
        _store(total, second, n, bias, out, out_stride, rows, N, OUTPUTS, RP, PAIR, RESIDUAL)
    else:
        SIZE: tl.constexpr = BLOCK_N * RP
        at = tl.arange(0, OUTPUTS)[:, None] * RP + tl.arange(0, RP)[None, :]
        mine = parts + (tile * SPLIT + split).to(tl.int64) * SIZE
        tl.store(mine + at, total)
        if PAIR:
            tl.store(mine + OUTPUTS * RP + at, second)
        tl.debug_barrier()
        there = tl.atomic_add(arrived + 2 * tile, 1, sem="acq_rel") + 1
        last = there == SPLIT
        if TOGETHER:
            while there < SPLIT:
                there = tl.atomic_add(arrived + 2 * tile, 0, sem="acquire")
        # Each program adds up its slice of the tile, or the last of them every slice.
        from_slice = split if TOGETHER else 0
        to_slice = split + 1 if TOGETHER else tl.where(last, SPLIT, 0)
        for slice in range(from_slice, to_slice):
            _add_up(
                parts + (tile * SPLIT).to(tl.int64) * SIZE, slice * (OUTPUTS // SPLIT), n, bias, out, out_stride, rows,
                N, SPLIT, OUTPUTS, RP, PAIR, RESIDUAL,
            )  # fmt: skip
        if TOGETHER:
            last = tl.atomic_add(arrived + 2 * tile + 1, 1, sem="acq_rel") == SPLIT - 1
        if last:
            tl.store(arrived + 2 * tile, 0)
            tl.store(arrived + 2 * tile + 1, 0)


def rows_tile(weight_rows: int, k: int, rows: int, pair: bool, limits: DeviceLimits) -> RowsTile | None:
    """The default for weight [weight_rows, k] and `rows` rows; None where another kernel is faster, as on an H200.

    Ours are the products that end in SwiGLU, and those back to the hidden size, whose few weight rows are split over
    the columns: up to 32 rows all, up to 64 the long. At most one wave of those, each with as deep a pipeline as shared
    memory holds. Up to 16 rows `linear.small_linear` has what does not gain by copies by descriptors.
    """
    count, back = limits.sm_count, weight_rows <= k
    # Descriptors want rows of whole 16 bytes.
    tma = limits.tma and k % 8 == 0
    wide = pair and triton.cdiv(weight_rows, 256) * 4 >= 3 * count
    long = back and k > 8192
    if rows > MAX_ROWS or (rows <= 16 and not (tma and (wide or (long and rows > 8)))):
        return None
    if wide:
        tile = RowsTile(256, 64, 1, 8, 4) if rows > 64 else RowsTile(128, 128, 1, 4, 6, 128)
    elif (rows <= 32 and (back or pair)) or (rows <= 64 and long and tma):
        block_n = 128 if rows <= 16 else 64
        tiles = triton.cdiv(weight_rows, block_n)
        split = max([1] + [s for s in (2, 4, 8) if tiles * s <= count and 3 * s * 128 <= k])
        tile = RowsTile(block_n, 128, split, 4, 8, 128, together=split > 1)
    else:
        return None
    tile = tile._replace(tma=tma)
    while tile.stages > 2 and tile_bytes(tile, rows) > limits.shared_memory:
        tile = tile._replace(stages=tile.stages - 1)
    # Of few rows its gain is the depth of its pipeline.
    deep = tile.stages >= 4 or rows > 16
    return tile if deep and tile_bytes(tile, rows) <= limits.shared_memory else None


def tile_bytes(tile: RowsTile, rows: int) -> int:
    """Shared memory that a program takes: the buffers of the pipeline, and the barriers of their copies."""
    return tile.stages * (tile.block_n + _padded(rows)) * tile.block_k * 2 + 1024


def parts_size(weight_rows: int, rows: int, tile: RowsTile) -> tuple[int, int]:
    """Elements that `parts` and `arrived` must have at least."""
    tiles = triton.cdiv(weight_rows, tile.block_n)
    return tiles * tile.split * tile.block_n * _padded(rows), 2 * tiles


def _padded(rows: int) -> int:
    return max(16, int(triton.next_power_of_2(rows)))


def rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    arrived: torch.Tensor,
    tile: RowsTile,
    *,
    bias: torch.Tensor | None = None,
    activation: Literal["silu_mul"] | None = None,
    residual: bool = False,
    pdl: bool = False,
) -> None:
    """out [rows, N] = activation(x @ weight.T + bias), plus out itself with `residual`.

    x [rows <= 128, K] and out have a unit column stride and a row stride of whole 16 bytes; weight [N, K] contiguous,
    with "silu_mul" [gate | up], [2N, K], and bias [2N]. parts fp32 and arrived int32, zeros, are workspace of
    `parts_size`. Sums are fp32, the result is rounded once.

    Raises:
        ValueError: more rows than `MAX_ROWS`.
    """
    rows, k = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"rows_linear takes up to {MAX_ROWS} rows, got {rows}")
    weight_rows, pair, rp = weight.shape[0], activation == "silu_mul", _padded(rows)
    n = weight_rows // 2 if pair else weight_rows
    outputs = tile.block_n // 2 if pair else tile.block_n
    source, matrix = (
        (
            TensorDescriptor.from_tensor(x, [rp, tile.block_k]),
            TensorDescriptor.from_tensor(weight, [outputs, tile.block_k]),
        )
        if tile.tma
        else (x, weight)
    )
    _rows_kernel[(triton.cdiv(n, outputs), tile.split)](
        source, x.stride(0), rows, matrix, weight_rows, bias, out, out.stride(0), n, parts, arrived, weight,
        K=k, RP=rp, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SPLIT=tile.split, STAGES=tile.stages,
        AHEAD=tile.ahead, PAIR=pair, RESIDUAL=residual, TMA=tile.tma,
        TOGETHER=tile.together, PDL=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip

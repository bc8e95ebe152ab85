# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""Device functions that multiply tiles of weights with a few rows. Called by the kernels of `moe_small` and `routing`.

A set of rows is a pointer, one offset per row [BLOCK_R], and which of them are in use. BLOCK_R is 1, or 16: the least
that a `dot` takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pellucid.kernels.triton.chain import fetch_to_l2

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class SmallTile:
    """Outputs a program computes (two rows of weights each for gate and up), columns of K a step, warps, and stages.

    Stages: of several rows the buffers of the pipeline; of the one-row down, experts whose loads are in flight
    together. The others are powers of two; of one row, a block_k of 256 times the warps saves shuffling activations.
    """

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3


def fit_block_k(columns: int, most: int) -> int:
    """The power of two that covers `columns`, between 16 (the least that a `dot` takes) and `most`."""
    return int(max(16, min(most, triton.next_power_of_2(columns))))


@triton.jit
def weight_tile(weight, m, mask, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows m of weight [*, K], columns from k: read once, so evicted first."""
    columns = k + tl.arange(0, BLOCK_K)
    inside = mask[:, None] & (columns < K)[None, :]
    return tl.load(weight + m[:, None] * K + columns[None, :], mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def fetch_ahead(weight, m, mask, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr):
    """Before `wait_for_input`: of one row the first tile goes to registers, of several rows all of m to the L2."""
    if BLOCK_R == 1:
        first = weight_tile(weight, m, mask, 0, K, BLOCK_K)
    else:
        first = m
        if PDL:
            fetch_to_l2(weight, m.to(tl.int64), mask, 0, K, K)
    return first


@triton.jit
def inverse_rms(x, offsets, use, eps, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / rms of the rows in use, [BLOCK_R]."""
    squares = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, loop_unroll_factor=4):
        columns = k + tl.arange(0, BLOCK_K)
        inside = use[:, None] & (columns < K)[None, :]
        values = tl.load(x + offsets[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += values * values
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def normed_tile(x, offsets, use, norm, scale, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from k of the normed rows, [BLOCK_R, BLOCK_K], rounded where the layers round. norm None: as they are."""
    columns = k + tl.arange(0, BLOCK_K)
    inside = use[:, None] & (columns < K)[None, :]
    values = tl.load(x + offsets[:, None] + columns[None, :], mask=inside, other=0.0)
    if norm is not None:
        gain = tl.load(norm + columns, mask=columns < K, other=0.0).to(tl.float32)
        unit = (values.to(tl.float32) * scale[:, None]).to(values.dtype)
        values = (unit.to(tl.float32) * gain[None, :]).to(values.dtype)
    return values


@triton.jit
def project(
    first, weight, m, mask, x, offsets, use, norm, eps,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows m of weight [*, K] times the normed rows in use, [BLOCK_M, BLOCK_R] fp32. `first` is from `fetch_ahead`."""
    scale = 1.0
    if norm is not None:
        scale = inverse_rms(x, offsets, use, eps, K, BLOCK_R, 1024 if BLOCK_R == 1 else 256)
    if BLOCK_R == 1:
        values = normed_tile(x, offsets, use, norm, scale, 0, K, BLOCK_K)
        products = first.to(tl.float32) * values.to(tl.float32)
        for k in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=2):
            tile = weight_tile(weight, m, mask, k, K, BLOCK_K)
            values = normed_tile(x, offsets, use, norm, scale, k, K, BLOCK_K)
            products += tile.to(tl.float32) * values.to(tl.float32)
        total = tl.sum(products, axis=1)[:, None]
    else:
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            tile = weight_tile(weight, m, mask, k, K, BLOCK_K)
            values = normed_tile(x, offsets, use, norm, scale, k, K, BLOCK_K)
            total = tl.dot(tile, tl.trans(values), total)
    return total


@triton.jit
def gate_up_rows(tile, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """The 2 * BLOCK_N weight rows of outputs tile * BLOCK_N ...: gate's, then up's; and which of them exist."""
    index = tl.arange(0, 2 * BLOCK_N)
    n = tile * BLOCK_N + index % BLOCK_N
    return tl.where(index < BLOCK_N, n, N + n), n < N


@triton.jit
def store_silu_mul(
    gate_up, out, out_stride, out_row, tile, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """out[out_row[r], n] = silu(gate) * up of column r of gate_up [2 * BLOCK_N, BLOCK_R]; row -1 is not stored."""
    halves = tl.permute(tl.reshape(gate_up, (2, BLOCK_N, BLOCK_R)), (2, 1, 0))
    gate, up = tl.split(halves)  # [BLOCK_R, BLOCK_N] each
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    result = gate / (1.0 + tl.exp(-gate)) * up
    mask = (out_row >= 0)[:, None] & (n < N)[None, :]
    tl.store(out + out_row[:, None] * out_stride + n[None, :], result.to(out.dtype.element_ty), mask=mask)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Grouped matrix products over experts, for steps of more than 16 rows. Called by `moe.triton_fused` and decode graphs.

Four launches: the step's (token, expert) pairs are put in order of their expert, in blocks of one expert each; up and
down are products over those blocks; the last sums each token's pairs into the residual. Nothing waits for the host:
grids cover the worst case and surplus programs leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

SORT_CHUNK = 4096
"""Pairs that one program of the sort looks at; up to so many are sorted in one launch."""

H100_SHARED_MEMORY = 232448
"""Bytes of shared memory that one block may ask for on sm 90 and 100."""

ALL_BLOCKS = 1 << 20
"""`group_m` that takes all blocks as one group."""


class GroupedTile(NamedTuple):
    """How one product is cut. `block_n` counts output columns: `grouped_up` reads two weight rows for each.

    `group_m` blocks of pairs share their column tiles in L2 before the next group begins.
    """

    block_n: int
    block_k: int
    group_m: int
    warps: int
    stages: int


class GroupedTiles(NamedTuple):
    """What a layer runs with at some number of pairs. `block_m` is the pairs of a block, for both products."""

    block_m: int
    up: GroupedTile
    down: GroupedTile


def grouped_tiles(
    pairs: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    shared_memory: int = H100_SHARED_MEMORY,
    block_m: int | None = None,
) -> GroupedTiles:
    """The default tiles for `pairs` = rows * top_k, or those of another `block_m` of 16 to 128.

    `shared_memory`: bytes one block may ask for on the device.

    Few pairs an expert: bound by the bytes of the weights, so small tiles, several programs a multiprocessor, and
    blocks that hold most experts whole. Many: bound by the tensor cores and L2, so the largest tiles that fit.
    """
    mean = pairs / num_experts
    block_m = block_m or (16 if mean <= 16 else 32 if mean <= 24 else 64 if mean <= 56 else 128)
    if block_m <= 32:
        columns, warps, group_m, budget = 64, 4, ALL_BLOCKS, shared_memory // 3
    elif block_m == 64:
        columns, warps, group_m, budget = 128, 4, ALL_BLOCKS, shared_memory // 2
    else:
        columns, warps, group_m, budget = 256 if shared_memory >= 4 * 49152 else 128, 8, 8, shared_memory

    def tile(block_n: int, k: int) -> GroupedTile:
        block_k = 128 if block_m <= 32 and k % 128 == 0 else 64
        fitting = (budget - 1024) // ((block_m + columns) * block_k * 2)
        # mma.sync, which has blocks under 64 rows, keeps the last stage in registers.
        stages = min(4, max(3, fitting + (block_m < 64)))
        return GroupedTile(block_n, block_k, group_m, warps, stages)

    return GroupedTiles(block_m, tile(columns // 2, hidden), tile(columns, intermediate))


def max_blocks(pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks of `block_m` pairs of one expert, at most: each expert taken begins one, every full block is another."""
    taken = min(pairs, num_experts)
    return taken + (pairs - taken) // block_m


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs in order of their expert, in blocks of `block_m`; written by `sort_by_expert`, read by both products.

    `pair` p is the (p % top_k)-th expert of row p // top_k. sorted_pairs int32 [max_blocks * block_m]: pairs of one
    expert in ascending order, then `pairs` as filler to the end of its last block. block_experts int32 [max_blocks].
    count int32 [1]: how many blocks there are; entries beyond are not written. chunk_counts int32 [chunks, experts].
    """

    pairs: int
    num_experts: int
    block_m: int
    sorted_pairs: torch.Tensor
    block_experts: torch.Tensor
    count: torch.Tensor
    chunk_counts: torch.Tensor

    @classmethod
    def allocate(cls, pairs: int, num_experts: int, block_m: int, device: torch.device) -> ExpertBlocks:
        """Room for any routing of `pairs` pairs."""
        blocks = max_blocks(pairs, num_experts, block_m)
        chunks = triton.cdiv(pairs, SORT_CHUNK)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            pairs, num_experts, block_m, empty(blocks * block_m), empty(blocks), empty(1), empty(chunks, num_experts)
        )

    @property
    def max_blocks(self) -> int:
        return self.block_experts.shape[0]


def sort_by_expert(experts: torch.Tensor, blocks: ExpertBlocks, *, pdl: bool = False) -> None:
    """Fills `blocks`. experts [rows, top_k], int32 or int64, contiguous, every id in [0, num_experts).

    Deterministic: no atomics, the order of pairs within an expert is their own.
    """
    chunks = blocks.chunk_counts.shape[0]
    chunk = SORT_CHUNK if chunks > 1 else max(32, triton.next_power_of_2(blocks.pairs))
    bins = max(32, triton.next_power_of_2(blocks.num_experts))
    shape = {"CHUNK": chunk, "BINS": bins, "num_warps": 8 if chunk > 1024 else 4, "PDL": pdl, "launch_pdl": pdl}
    if chunks > 1:
        _count_experts[(chunks,)](experts, blocks.chunk_counts, blocks.pairs, blocks.num_experts, **shape)
    _place_pairs[(blocks.num_experts, chunks)](
        experts, blocks.chunk_counts, blocks.sorted_pairs, blocks.block_experts, blocks.count,
        blocks.pairs, blocks.num_experts, chunks, BLOCK_M=blocks.block_m, ONE_CHUNK=chunks == 1, **shape,
    )  # fmt: skip


def grouped_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    blocks: ExpertBlocks,
    act: torch.Tensor,
    *,
    tile: GroupedTile,
    pdl: bool = False,
) -> None:
    """act[p] = silu(x[row] @ gate.T) * (x[row] @ up.T) for every pair p of its row and expert.

    x [rows, hidden]; gate_up [experts, 2 * intermediate, hidden], [gate | up], contiguous; act [pairs, intermediate].
    """
    intermediate, hidden = act.shape[1], x.shape[1]
    _grouped_up[(blocks.max_blocks * triton.cdiv(intermediate, tile.block_n),)](
        x, gate_up, act, blocks.sorted_pairs, blocks.block_experts, blocks.count,
        blocks.pairs, intermediate, x.stride(0), act.stride(0),
        TOP_K=blocks.pairs // x.shape[0], **_options(blocks.block_m, tile, intermediate, hidden, pdl),
    )  # fmt: skip


def grouped_down(
    act: torch.Tensor,
    down: torch.Tensor,
    blocks: ExpertBlocks,
    weights: torch.Tensor,
    pair_out: torch.Tensor,
    *,
    tile: GroupedTile,
    pdl: bool = False,
) -> None:
    """pair_out[p] = weights[p] * (act[p] @ down[expert].T), rounded once to the dtype of `pair_out`.

    act [pairs, intermediate]; down [experts, hidden, intermediate], contiguous; weights fp32 [rows, top_k], contiguous;
    pair_out [pairs, hidden], contiguous.
    """
    hidden, intermediate = pair_out.shape[1], act.shape[1]
    _grouped_down[(blocks.max_blocks * triton.cdiv(hidden, tile.block_n),)](
        act, down, pair_out, weights, blocks.sorted_pairs, blocks.block_experts, blocks.count,
        blocks.pairs, hidden, act.stride(0),
        **_options(blocks.block_m, tile, hidden, intermediate, pdl),
    )  # fmt: skip


def reduce_pairs(
    pair_out: torch.Tensor, residual: torch.Tensor, *, extra: torch.Tensor | None = None, pdl: bool = False
) -> None:
    """residual[row] += sum of the row's pairs (+ extra[row]), summed in fp32, in the order of the pairs.

    pair_out [rows * top_k, hidden], contiguous; residual, extra [rows, hidden] with unit column stride.
    """
    rows, hidden = residual.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _reduce_pairs[(rows, triton.cdiv(hidden, block))](
        pair_out, residual, extra, hidden, residual.stride(0), 0 if extra is None else extra.stride(0),
        TOP_K=pair_out.shape[0] // rows, BLOCK=block, EXTRA=extra is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _options(block_m: int, tile: GroupedTile, n: int, k: int, pdl: bool) -> dict[str, Any]:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "EVEN_N": n % tile.block_n == 0,
        "K": k,
        "PDL": pdl,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "launch_pdl": pdl,
    }


@triton.jit
def _count_experts(
    experts, chunk_counts, pairs, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """chunk_counts[chunk, expert]: pairs of the expert in the chunk."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    real = pair < pairs
    expert = tl.load(experts + pair, mask=real, other=0).to(tl.int32)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(expert, BINS, mask=real)
    tl.store(chunk_counts + chunk * num_experts + bins, counts, mask=bins < num_experts)


@triton.jit
def _place_pairs(
    experts, chunk_counts, sorted_pairs, block_experts, block_count, pairs, num_experts, chunks,
    BLOCK_M: tl.constexpr, ONE_CHUNK: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (expert, chunk) places the chunk's pairs of its expert; that of chunk 0 fills up the last block."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, chunk = tl.program_id(0), tl.program_id(1)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    real = pair < pairs
    taken = tl.load(experts + pair, mask=real, other=0).to(tl.int32)
    bins = tl.arange(0, BINS)
    before = 0  # pairs of this expert in earlier chunks
    if ONE_CHUNK:
        counts = tl.histogram(taken, BINS, mask=real)
    else:
        counts = tl.zeros([BINS], dtype=tl.int32)
        other = 0
        while other < chunks:
            found = tl.load(chunk_counts + other * num_experts + bins, mask=bins < num_experts, other=0)
            counts += found
            before += tl.sum(tl.where((bins == expert) & (other < chunk), found, 0))
            other += 1
    expert_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, expert_blocks, 0))
    mine = real & (taken == expert)
    rank = before + tl.cumsum(mine.to(tl.int32), 0) - 1  # among the expert's pairs
    tl.store(sorted_pairs + first * BLOCK_M + rank, pair, mask=mine)
    tl.store(block_experts + first + rank // BLOCK_M, expert, mask=mine & (rank % BLOCK_M == 0))
    if chunk == 0:
        count = tl.sum(tl.where(bins == expert, counts, 0))
        filler = count + tl.arange(0, BLOCK_M)
        end = tl.cdiv(count, BLOCK_M) * BLOCK_M
        tl.store(sorted_pairs + first * BLOCK_M + filler, pairs, mask=filler < end)
        if expert == 0:
            tl.store(block_count, tl.sum(expert_blocks))


@triton.jit
def _block_and_tile(program, blocks, tiles, GROUP_M: tl.constexpr):
    """Blocks of a group run through one column tile before the next: its weights are read once, its rows stay in L2."""
    group = program // (GROUP_M * tiles)
    size = min(blocks - group * GROUP_M, GROUP_M)
    local = program - group * GROUP_M * tiles
    return group * GROUP_M + local % size, local // size


@triton.jit
def _multiply(
    a, b, rows_real, columns_real, K: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, COLUMNS] from pointers to the starts of rows: a [BLOCK_M], b [COLUMNS], each K values long."""
    rk = tl.arange(0, BLOCK_K)
    a_tile = a[:, None] + rk[None, :]
    b_tile = b[None, :] + rk[:, None]
    acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            values = tl.load(a_tile, mask=rows_real[:, None], other=0.0)
            weights = tl.load(b_tile) if EVEN_N else tl.load(b_tile, mask=columns_real[None, :], other=0.0)
        else:
            inside = rk < K - start
            values = tl.load(a_tile, mask=rows_real[:, None] & inside[None, :], other=0.0)
            weights = tl.load(b_tile, mask=columns_real[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(values, weights, acc)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    return acc


@triton.jit
def _grouped_up(
    x, gate_up, act, sorted_pairs, block_experts, block_count, pairs, intermediate, x_stride, act_stride,
    TOP_K: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks, tiles = tl.load(block_count), tl.cdiv(intermediate, BLOCK_N)
    if tl.program_id(0) >= blocks * tiles:
        return
    block, tile = _block_and_tile(tl.program_id(0), blocks, tiles, GROUP_M)
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(block_experts + block).to(tl.int64)
    # Gate and up rows take turns, so that both values of an output column end in the same thread.
    column = tl.arange(0, 2 * BLOCK_N)
    unit = tile * BLOCK_N + column // 2
    weight_row = expert * 2 * intermediate + unit + (column % 2) * intermediate
    acc = _multiply(
        x + (pair // TOP_K).to(tl.int64) * x_stride, gate_up + weight_row * K, pair < pairs, unit < intermediate,
        K, BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN_N,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    value = gate * tl.sigmoid(gate) * up
    unit = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out = act + pair[:, None].to(tl.int64) * act_stride + unit[None, :]
    tl.store(out, value.to(act.dtype.element_ty), mask=(pair < pairs)[:, None] & (unit < intermediate)[None, :])


@triton.jit
def _grouped_down(
    act, down, pair_out, weights, sorted_pairs, block_experts, block_count, pairs, hidden, act_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks, tiles = tl.load(block_count), tl.cdiv(hidden, BLOCK_N)
    if tl.program_id(0) >= blocks * tiles:
        return
    block, tile = _block_and_tile(tl.program_id(0), blocks, tiles, GROUP_M)
    pair = tl.load(sorted_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < pairs
    expert = tl.load(block_experts + block).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _multiply(
        act + pair.to(tl.int64) * act_stride, down + (expert * hidden + column) * K, real, column < hidden,
        K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N,
    )  # fmt: skip
    weight = tl.load(weights + pair, mask=real, other=0.0)
    out = pair_out + pair[:, None].to(tl.int64) * hidden + column[None, :]
    value = (acc * weight[:, None]).to(pair_out.dtype.element_ty)
    tl.store(out, value, mask=real[:, None] & (column < hidden)[None, :])


@triton.jit
def _reduce_pairs(
    pair_out, residual, extra, hidden, residual_stride, extra_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, EXTRA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(pair_out + (row * TOP_K + k) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if EXTRA:
        total += tl.load(extra + row * extra_stride + column, mask=inside, other=0.0).to(tl.float32)
    target = residual + row * residual_stride + column
    total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(residual.dtype.element_ty), mask=inside)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code=assignment
# ruff: noqa: RUF005 (kernels cannot unpack tuples)
"""Dense projections of decode steps of up to 16 rows. Called by decode graphs; `head` shares the two main loops.

Such a step is bound by the bytes of the weights: each is read once, with 16-byte loads, the first before the input is
there. Up to 2 rows are summed in fp32 lanes (`gemv_tile`), more by the tensor cores, weights as the M side
(`dot_tile`). RMSNorm needs no second pass over x: sum(x * norm * w) is divided by rms(x), known when the loop ends.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import fetch_to_l2, wait_for_input

MAX_ROWS = 16
"""Most rows of `small_linear`."""

FMA_ROWS = 2
"""With more rows, fp32 multiplication takes longer than the bytes: a step of Llama-8B took 3.61 ms of 4 rows on fp32
lanes, and 2.86 ms of 8 rows on the tensor cores."""


class LinearTile(NamedTuple):
    """How the weights are cut. `block_n` counts weight rows, gate and up rows alike.

    `split` and `stages` are for the tensor cores alone: `block_k` falls into `split` parts that warps sum on their own,
    and `stages` is the depth of the pipeline behind the first tile. fp32 lanes have two tiles in flight. `ahead`
    columns behind the first tile are fetched to the L2 while the input is not there. `norms`: each program norms its
    input itself, where a step has a launch of its own for that otherwise (`layers.fused_step`).
    """

    block_n: int
    block_k: int
    warps: int
    dot: bool = False
    split: int = 1
    stages: int = 1
    ahead: int = 0
    norms: bool = False


def linear_tile(weight_rows: int, k: int, rows: int) -> LinearTile:
    """The default for weight [weight_rows, k] and x [rows, k], as measured within steps on an H200.

    Enough programs that every multiprocessor has several, and 16 to 64 KB of weights in flight on each.
    """
    # Back to the hidden size: few weight rows, for which the kernel ahead (attention, SwiGLU) leaves time to fetch.
    back = weight_rows <= k
    if rows > FMA_ROWS:
        # Long rows: a step of Llama-8B at 8 rows takes 3 % less with its down projection in steps of 512 columns, whose
        # buffers are all that small devices have.
        long = k > 8192 and rows <= 8
        most = 512 if long else 128 if 5632 < weight_rows <= 16384 else 256
        block_k = min(_block_k(k, most), triton.next_power_of_2(max(k, 64)))
        split = min(block_k // 64, 8 if long else 4) or 1
        # 16 rows of x are as much as 16 weight rows: with 32 a step of Llama-8B takes 3 % less.
        block_n = 32 if rows > 8 and back and weight_rows >= 4096 else 16
        return LinearTile(block_n, block_k, split, True, split, 4, ahead=0 if weight_rows > 16384 else 256)
    if k > 8192:
        return LinearTile(8, 2048, 8) if rows == 1 else LinearTile(8, 1024, 4)
    if back and weight_rows >= 4096:
        return LinearTile(8, 1024, 4, ahead=1024)
    if back and weight_rows >= 2048 and k <= (4096 if rows == 1 else 2048):
        # All columns are on their way before the input is there.
        return LinearTile(4, triton.next_power_of_2(k), 8)
    if k >= 4096 or (back and weight_rows < 2048):
        block_k = min(2048, triton.next_power_of_2(max(k, 128)))
        block_n = 4 if back or weight_rows > 16384 or rows > 1 else 2
        return LinearTile(block_n, block_k, max(1, block_k // 512), ahead=1024 if back else 0)
    most = 512 if weight_rows > 4096 and (k <= 1024 or rows > 1) else 1024
    block_k = min(_block_k(k, most), triton.next_power_of_2(max(k, 128)))
    return LinearTile(4, block_k, max(1, block_k // 256), ahead=1024 if back else 0)


def _block_k(k: int, most: int) -> int:
    """`most` or its half, whichever divides k, else `most`: then the last tile is masked."""
    return most // 2 if k % most and k % (most // 2) == 0 else most


@triton.jit
def _load_weights(pointers, rows_there, columns, K: tl.constexpr, WHOLE: tl.constexpr):
    mask = None if WHOLE else rows_there & (columns < K)
    return tl.load(pointers, mask=mask, other=None if WHOLE else 0.0, eviction_policy="evict_first")


@triton.jit
def _load_columns(vector, columns, K: tl.constexpr, WHOLE: tl.constexpr):
    return tl.load(vector + columns, mask=None if WHOLE else columns < K, other=None if WHOLE else 0.0)


@triton.jit
def _load_norm(norm, columns, K: tl.constexpr, WHOLE: tl.constexpr):
    """(its part,), or () without a norm: a loop can carry a tuple, but not None."""
    if norm is None:
        return ()
    else:  # noqa: RET505 (the compiler reads on behind a return)
        return (_load_columns(norm, columns, K, WHOLE),)


@triton.jit
def _outputs(n0, BLOCK_N: tl.constexpr, PAIR: tl.constexpr):
    """Output column of each weight row of a tile. With PAIR, weight is [gate | up]: gate and up rows take turns."""
    i = tl.arange(0, BLOCK_N)
    return n0 + i // 2 if PAIR else n0 + i


@triton.jit
def _row_offsets(n0, N, K: tl.constexpr, BLOCK_N: tl.constexpr, PAIR: tl.constexpr):
    """Where each weight row of a tile begins."""
    i = tl.arange(0, BLOCK_N)
    row = n0.to(tl.int64) + (i // 2 if PAIR else i)
    return (row + (i % 2) * N if PAIR else row) * K


@triton.jit
def _accumulate(w, xs, gs, sums, squares, ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """sums[r] += w * xs[r] * norm and squares[r] += xs[r]^2, each thread over what it loaded: no shuffles here."""
    BLOCK_N: tl.constexpr = w.shape[0]
    PARTS: tl.constexpr = w.shape[1] // (LANES * VEC)
    wide = w.to(tl.float32)
    new_sums = ()
    new_squares = ()
    for r in tl.static_range(ROWS):
        x = xs[r].to(tl.float32)
        if len(gs) == 1:
            new_squares = new_squares + (squares[r] + tl.sum(tl.sum(tl.reshape(x * x, [PARTS, LANES, VEC]), 2), 0),)
            x = x * gs[0].to(tl.float32)
        parts = tl.reshape(wide * x[None, :], [BLOCK_N, PARTS, LANES, VEC])
        new_sums = new_sums + (sums[r] + tl.sum(tl.sum(parts, 3), 1),)
    return new_sums, new_squares


@triton.jit
def gemv_first(
    weight, norm, n0, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAIR: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """What `gemv_tile` needs before its input is there: the first tile of weights and norm."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    rk = tl.arange(0, BLOCK_K)
    pointers = weight + _row_offsets(n0, N, K, BLOCK_N, PAIR)[:, None] + rk[None, :]
    rows_there = (_outputs(n0, BLOCK_N, PAIR) < N)[:, None]
    return _load_weights(pointers, rows_there, rk[None, :], K, EVEN_K and EVEN_N), _load_norm(norm, rk, K, EVEN_K)


@triton.jit
def gemv_tile(
    first, x, x_stride, weight, norm, eps, n0, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    PAIR: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """A tuple of ROWS fp32 [BLOCK_N]: each row of x, normalized if there is a norm, times the weight rows of n0 on.

    `first` comes from `gemv_first`. With PAIR, n0 and N count outputs and the sums are gate, up, gate, up...
    """
    VEC: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = min(32 * WARPS, BLOCK_K // VEC)
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    rk = tl.arange(0, BLOCK_K)
    pointers = weight + _row_offsets(n0, N, K, BLOCK_N, PAIR)[:, None] + rk[None, :]
    rows_there = (_outputs(n0, BLOCK_N, PAIR) < N)[:, None]
    w, gs = first
    xs = ()
    sums = ()
    squares = ()
    for r in tl.static_range(ROWS):
        xs = xs + (_load_columns(x + r * x_stride, rk, K, EVEN_K),)
        sums = sums + (tl.zeros([BLOCK_N, LANES], tl.float32),)
        if norm is not None:
            squares = squares + (tl.zeros([LANES], tl.float32),)
    for k in range(BLOCK_K, K, BLOCK_K):
        # The next tile is asked for before this one is used.
        next_w = _load_weights(pointers + k, rows_there, k + rk[None, :], K, EVEN_K and EVEN_N)
        next_gs = _load_norm(norm, k + rk, K, EVEN_K)
        next_xs = ()
        for r in tl.static_range(ROWS):
            next_xs = next_xs + (_load_columns(x + r * x_stride, k + rk, K, EVEN_K),)
        sums, squares = _accumulate(w, xs, gs, sums, squares, ROWS, LANES, VEC)
        w = next_w
        gs = next_gs
        xs = next_xs
    sums, squares = _accumulate(w, xs, gs, sums, squares, ROWS, LANES, VEC)

    totals = ()
    for r in tl.static_range(ROWS):
        total = tl.sum(sums[r], 1)
        if norm is not None:
            total = total * tl.rsqrt(tl.sum(squares[r], 0) / K + eps)
        totals = totals + (total,)
    return totals


@triton.jit
def _dot_columns(BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """Columns [SPLIT, 1, BLOCK_K / SPLIT] of a tile: each part of them is for some warps to sum."""
    KS: tl.constexpr = BLOCK_K // SPLIT
    return tl.arange(0, SPLIT)[:, None, None] * KS + tl.arange(0, KS)[None, None, :]


@triton.jit
def dot_first(
    weight, norm, n0, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PAIR: tl.constexpr,
    EVEN_N: tl.constexpr,
):  # fmt: skip
    """What `dot_tile` needs before its input is there: the first tile of weights and norm."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    rk = _dot_columns(BLOCK_K, SPLIT)
    pointers = weight + _row_offsets(n0, N, K, BLOCK_N, PAIR)[None, :, None] + rk
    rows_there = (_outputs(n0, BLOCK_N, PAIR) < N)[None, :, None]
    return _load_weights(pointers, rows_there, rk, K, EVEN_K and EVEN_N), _load_norm(norm, rk, K, EVEN_K)


@triton.jit
def _dot_accumulate(w, x, gs, acc, squares, FOLD: tl.constexpr):
    """acc [SPLIT, BLOCK_N, RP] += w @ (x * norm).T in each part; squares [SPLIT, RP, KS / 8] += x^2."""
    if len(gs) == 1:
        wide = x.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, [x.shape[0], x.shape[1], x.shape[2] // 8, 8]), 3)
        x = (wide * (gs[0].to(tl.float32) * FOLD)).to(x.dtype)
    return tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee"), squares


@triton.jit
def dot_tile(
    first, x, x_stride, rows, weight, norm, eps, n0, N,
    K: tl.constexpr, RP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, PAIR: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, RP]: as `gemv_tile`, of `rows` rows padded to RP. `first` comes from `dot_first`."""
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    # x * norm that is not yet divided by rms(x) must stay within fp16's range.
    FOLD: tl.constexpr = 0.0625 if x.dtype.element_ty == tl.float16 else 1.0
    rk = _dot_columns(BLOCK_K, SPLIT)
    r = tl.arange(0, RP)[None, :, None]
    pointers = weight + _row_offsets(n0, N, K, BLOCK_N, PAIR)[None, :, None] + rk
    rows_there = (_outputs(n0, BLOCK_N, PAIR) < N)[None, :, None]
    x_pointers = x + r * x_stride + rk
    first_x = tl.load(x_pointers, mask=(r < rows) & (rk < K), other=0.0)
    acc = tl.zeros([SPLIT, BLOCK_N, RP], tl.float32)
    squares = tl.zeros([SPLIT, RP, BLOCK_K // SPLIT // 8], tl.float32)
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        w = _load_weights(pointers + k, rows_there, k + rk, K, EVEN_K and EVEN_N)
        part = tl.load(x_pointers + k, mask=(r < rows) & (rk < K - k), other=0.0)
        acc, squares = _dot_accumulate(w, part, _load_norm(norm, k + rk, K, EVEN_K), acc, squares, FOLD)
    # The first tile last: it waits in registers, and the pipeline of the others starts at once.
    w, gs = first
    acc, squares = _dot_accumulate(w, first_x, gs, acc, squares, FOLD)

    total = tl.sum(acc, 0)
    if norm is not None:
        mean = tl.sum(tl.sum(squares, 2), 0) / K
        total = total * (tl.rsqrt(mean + eps) / FOLD)[None, :]
    return total


@triton.jit
def _fetch_ahead(
    weight, n0, N, K: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    row = _row_offsets(n0, N, K, BLOCK_N, PAIR) // K
    fetch_to_l2(weight, row, _outputs(n0, BLOCK_N, PAIR) < N, FIRST, K, COLUMNS)


@triton.jit
def _load_bias(bias, n0, N, BLOCK_N: tl.constexpr, PAIR: tl.constexpr):
    """fp32 [BLOCK_N], in the order of the tile's weight rows."""
    o = _outputs(n0, BLOCK_N, PAIR)
    row = o + (tl.arange(0, BLOCK_N) % 2) * N if PAIR else o
    return tl.load(bias + row, mask=o < N, other=0.0).to(tl.float32)


@triton.jit
def _gemv_kernel(
    x, x_stride, weight, norm, eps, bias, out, out_stride, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    PAIR: tl.constexpr, RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    n0 = tl.program_id(0) * OUTPUTS
    o = n0 + tl.arange(0, OUTPUTS)
    first = gemv_first(weight, norm, n0, N, K, BLOCK_N, BLOCK_K, PAIR, EVEN_N)
    if AHEAD > 0:
        _fetch_ahead(weight, n0, N, K, BLOCK_N, BLOCK_K, AHEAD, PAIR)
    wait_for_input(PDL)
    before = ()
    for r in tl.static_range(ROWS):
        if RESIDUAL:
            before = before + (tl.load(out + r * out_stride + o, mask=o < N, other=0.0),)
    totals = gemv_tile(
        first, x, x_stride, weight, norm, eps, n0, N, K, ROWS, BLOCK_N, BLOCK_K, WARPS, PAIR, EVEN_N
    )  # fmt: skip
    for r in tl.static_range(ROWS):
        total = totals[r]
        if bias is not None:
            total += _load_bias(bias, n0, N, BLOCK_N, PAIR)
        if PAIR:
            gate, up = tl.split(tl.reshape(total, [OUTPUTS, 2]))
            total = gate * tl.sigmoid(gate) * up
        if RESIDUAL:
            total += before[r].to(tl.float32)
        tl.store(out + r * out_stride + o, total.to(out.dtype.element_ty), mask=o < N)


@triton.jit
def _dot_kernel(
    x, x_stride, rows, weight, norm, eps, bias, out, out_stride, N,
    K: tl.constexpr, RP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, PAIR: tl.constexpr, RESIDUAL: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    n0 = tl.program_id(0) * OUTPUTS
    o = n0 + tl.arange(0, OUTPUTS)[:, None]
    r = tl.arange(0, RP)[None, :]
    there = (o < N) & (r < rows)
    target = out + r * out_stride + o
    first = dot_first(weight, norm, n0, N, K, BLOCK_N, BLOCK_K, SPLIT, PAIR, EVEN_N)
    if AHEAD > 0:
        _fetch_ahead(weight, n0, N, K, BLOCK_N, BLOCK_K, AHEAD, PAIR)
    wait_for_input(PDL)
    if RESIDUAL:
        before = tl.load(target, mask=there, other=0.0)
    total = dot_tile(
        first, x, x_stride, rows, weight, norm, eps, n0, N, K, RP, BLOCK_N, BLOCK_K, SPLIT, STAGES, PAIR, EVEN_N
    )
    if bias is not None:
        total += _load_bias(bias, n0, N, BLOCK_N, PAIR)[:, None]
    if PAIR:
        gate, up = tl.split(tl.permute(tl.reshape(total, [OUTPUTS, 2, RP]), (0, 2, 1)))
        total = gate * tl.sigmoid(gate) * up
    if RESIDUAL:
        total += before.to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=there)


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: Literal["silu_mul"] | None = None,
    residual: bool = False,
    pdl: bool = False,
    tile: LinearTile | None = None,
) -> None:
    """out [rows, N] = activation(rms_norm(x; norm, eps) @ weight.T + bias), plus out itself with `residual`.

    x [rows <= 16, K], weight [N, K] contiguous; with "silu_mul" weight is [gate | up], [2N, K], and bias [2N].
    x and out have a unit column stride and any row stride. Sums are fp32, the result is rounded once.

    Raises:
        ValueError: more rows than `MAX_ROWS`.
    """
    rows, k = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"small_linear takes up to {MAX_ROWS} rows, got {rows}")
    weight_rows = weight.shape[0]
    pair = activation == "silu_mul"
    n = weight_rows // 2 if pair else weight_rows
    if tile is None:
        tile = linear_tile(weight_rows, k, rows)
    grid = (triton.cdiv(weight_rows, tile.block_n),)
    common = {
        "K": k, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "PAIR": pair, "RESIDUAL": residual,
        "EVEN_N": weight_rows % tile.block_n == 0, "PDL": pdl,
        "AHEAD": min(tile.ahead, k - tile.block_k) if pdl else 0,
        "num_warps": tile.warps, "launch_pdl": pdl,
    }  # fmt: skip
    if tile.dot:
        _dot_kernel[grid](
            x, x.stride(0), rows, weight, norm, eps, bias, out, out.stride(0), n,
            RP=max(8, triton.next_power_of_2(rows)), SPLIT=tile.split, STAGES=tile.stages, **common,
        )  # fmt: skip
    else:
        _gemv_kernel[grid](
            x, x.stride(0), weight, norm, eps, bias, out, out.stride(0), n,
            ROWS=rows, WARPS=tile.warps, **common,
        )  # fmt: skip

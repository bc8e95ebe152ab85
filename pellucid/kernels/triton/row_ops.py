# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""RMSNorm, MLA's cache rows and SwiGLU on rows, any number of them. Called by layers (`TritonOps`) and graphs.

Everything is computed in fp32 and rounded once. Rows may be slices of wider ones, as layers cut them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input


@triton.jit
def _rms_norm_kernel(
    x, weight, eps, out, rows, heads, x_row, x_head, out_row, out_head,
    WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    g = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    wait_for_input(PDL)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row, head = (r // heads).to(tl.int64), r % heads
    there = (r < rows)[:, None] & (columns < WIDTH)[None, :]
    wide = tl.load(x + (row * x_row + head * x_head)[:, None] + columns[None, :], mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    normed = (wide * scale[:, None] * g[None, :]).to(out.dtype.element_ty)
    tl.store(out + (row * out_row + head * out_head)[:, None] + columns[None, :], normed, mask=there)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, pdl: bool = False) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last dim of x [rows, n] or [rows, heads, n]; out may be x.

    The last dim has a unit stride, the others any.
    """
    rows, heads, n = (x.shape[0], 1, x.shape[1]) if x.dim() == 2 else x.shape
    block = triton.next_power_of_2(n)
    block_r = max(1, 1024 // block)
    _rms_norm_kernel[(triton.cdiv(rows * heads, block_r),)](
        x, weight, eps, out, rows * heads, heads, x.stride(0), x.stride(-2), out.stride(0), out.stride(-2),
        WIDTH=n, BLOCK_R=block_r, BLOCK=block, PDL=pdl,
        num_warps=min(16, max(4, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(gate_up, out, gate_up_stride, out_stride, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_input(PDL)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    start = gate_up + row * gate_up_stride + columns
    gate = tl.load(start, mask=columns < n, other=0.0).to(tl.float32)
    up = tl.load(start + n, mask=columns < n, other=0.0).to(tl.float32)
    result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, result, mask=columns < n)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
    """out [rows, n] = silu(gate_up[:, :n]) * gate_up[:, n:]; unit column strides, any row strides."""
    rows, n = out.shape
    block = 1024
    _silu_mul_kernel[(rows, triton.cdiv(n, block))](
        gate_up, out, gate_up.stride(0), out.stride(0), n, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


@triton.jit
def _latent_write_kernel(
    q, q_row, q_head, row, row_stride, norm, eps, table, positions, slots, cache, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Program (token, part): part 0 makes the token's cache row, the others rotate BLOCK_H heads each."""
    HALF: tl.constexpr = ROPE // 2
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_P)[None, :]
    angles = table + tl.load(positions + token).to(tl.int64) * ROPE
    cos = tl.load(angles + i, mask=i < HALF, other=0.0)
    sin = tl.load(angles + HALF + i, mask=i < HALF, other=0.0)
    offset = 2 * i if INTERLEAVED else i
    step: tl.constexpr = 1 if INTERLEAVED else HALF
    if tl.program_id(1) > 0:
        h = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        there = (h < heads) & (i < HALF)
        first = q + token * q_row + h * q_head + offset
        a = tl.load(first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(first + step, mask=there, other=0.0).to(tl.float32)
        tl.store(first, (a * cos - b * sin).to(q.dtype.element_ty), mask=there)
        tl.store(first + step, (b * cos + a * sin).to(q.dtype.element_ty), mask=there)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        c = tl.arange(0, BLOCK_C)
        latent = tl.load(row + token * row_stride + c, mask=c < RANK, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        weight = tl.load(norm + c, mask=c < RANK, other=0.0).to(tl.float32)
        target = cache + slot * (RANK + ROPE)
        tl.store(target + c, (latent * scale * weight).to(cache.dtype.element_ty), mask=(c < RANK) & (slot >= 0))
        written = (i < HALF) & (slot >= 0)
        source = row + token * row_stride + RANK + offset
        rope_a = tl.load(source, mask=written, other=0.0).to(tl.float32)
        rope_b = tl.load(source + step, mask=written, other=0.0).to(tl.float32)
        tl.store(target + RANK + offset, (rope_a * cos - rope_b * sin).to(cache.dtype.element_ty), mask=written)
        tl.store(target + RANK + offset + step, (rope_b * cos + rope_a * sin).to(cache.dtype.element_ty), mask=written)


class TritonOps:
    """`RowOps` of `kernels.torch_ops` on a CUDA device."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [rows, n] or [rows, heads, n] normalized over n; `out` may be `x`."""
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        rms_norm(x, weight, eps, result)
        return result

    def latent_write(
        self,
        q_rope: torch.Tensor,
        row: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        table: torch.Tensor,
        positions: torch.Tensor,
        interleaved: bool,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """`torch_ops.latent_write` in one launch; `row` is left as it was."""
        tokens, heads, rope = q_rope.shape
        block_p = triton.next_power_of_2(rope // 2)
        block_h = min(triton.next_power_of_2(heads), max(1, 1024 // block_p))
        _latent_write_kernel[(tokens, 1 + triton.cdiv(heads, block_h))](
            q_rope, q_rope.stride(0), q_rope.stride(1), row, row.stride(0), norm, eps, table, positions, slots, cache,
            heads, RANK=norm.shape[0], ROPE=rope, BLOCK_C=triton.next_power_of_2(norm.shape[0]), BLOCK_H=block_h,
            BLOCK_P=block_p, INTERLEAVED=interleaved, num_warps=4,
        )  # fmt: skip

    def gqa_write(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        table: torch.Tensor,
        positions: torch.Tensor,
        interleaved: bool,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """`torch_ops.gqa_write` in one launch; k and v of `qkv` are left as they were."""
        from pellucid.kernels.triton.gqa_write import BySlot, norm_rope_write

        dim = table.shape[1]
        heads = (qkv.shape[1] - 2 * keys.shape[-1]) // dim
        q = qkv.view(qkv.shape[0], -1, dim)[:, :heads]
        q_norm, k_norm = (None, None) if norms is None else norms
        where = BySlot(positions, slots)
        norm_rope_write(qkv, q_norm, k_norm, eps, table, interleaved, keys, values, where, q)
        return q

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate_up[:, :n]) * gate_up[:, n:], [rows, n]."""
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        silu_mul(gate_up, out)
        return out

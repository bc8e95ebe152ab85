"""The row operations of a decoder in plain torch: any device, any dtype. The reference for `cpu_library`.

`CpuLibrary` has the same methods; layers take either as `ops`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class RowOps(Protocol):
    """What layers need besides matrix products and attention."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

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
    ) -> None: ...

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
    ) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class PlainOps(RowOps, Protocol):
    """Those that fuse nothing, and make the larger operations of these."""

    def rope_(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> None: ...

    def cache_write(self, x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None: ...


def gqa_write(
    ops: PlainOps,
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
    """What a GQA layer does before attention, by the other operations of `ops`: the queries [tokens, heads, d].

    qkv [tokens, (heads + 2 kv_heads) * d]; norms of q and k, [d] each, or None; table fp32 [positions, d]. q is normed
    and rotated where it lies; k, likewise, and v are written to keys and values [pages, page, kv_heads * d].
    """
    dim, width = table.shape[1], keys.shape[-1]
    by_head = qkv.view(qkv.shape[0], -1, dim)
    kv_heads = width // dim
    heads = by_head.shape[1] - 2 * kv_heads
    q, k = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
    if norms is not None:
        ops.rms_norm(q, norms[0], eps, out=q)
        ops.rms_norm(k, norms[1], eps, out=k)
    ops.rope_(by_head[:, : heads + kv_heads], table, positions, interleaved)
    ops.cache_write(qkv[:, heads * dim : heads * dim + width], slots, keys)
    ops.cache_write(qkv[:, heads * dim + width :], slots, values)
    return q


def latent_write(
    ops: PlainOps,
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
    """What an MLA layer does before attention, by the other operations of `ops`.

    q_rope [tokens, heads, rope] is rotated in place. row [tokens, kv_lora_rank + rope] is normed (norm [kv_lora_rank]),
    rotated and written to the cache; what is left in `row` itself is nobody's business.
    """
    rank = norm.shape[0]
    ops.rms_norm(row[:, :rank], norm, eps, out=row[:, :rank])
    ops.rope_(q_rope, table, positions, interleaved)
    ops.rope_(row[:, None, rank:], table, positions, interleaved)
    ops.cache_write(row, slots, cache)


class TorchOps:
    """`PlainOps` in plain torch. Norms and rotations are computed in fp32 whatever the dtype, as HF does."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., n] normalized over n; `out` may be `x`."""
        wide = x.float()
        normed = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        result = weight * normed.to(x.dtype)
        return result if out is None else out.copy_(result)

    def rope_(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> None:
        """Rotates x [tokens, heads, dim] in place. table [positions, dim], fp32: cos of dim/2 angles, then sin."""
        import torch

        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, dim/2]
        wide = x.float()
        first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        x.copy_(torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1))

    def cache_write(self, x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
        """cache.view(-1, width)[slots[t]] = x[t]; rows with slot -1 (padding) are written nowhere."""
        real = slots >= 0
        cache.view(-1, x.shape[-1])[slots[real]] = x[real].to(cache.dtype)

    latent_write = latent_write
    gqa_write = gqa_write

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate_up[:, :n]) * gate_up[:, n:], [rows, n]."""
        import torch

        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

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

    def rope_(self, x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> None: ...

    def cache_write(self, x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None: ...

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

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


def latent_write(
    ops: RowOps,
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
    """`RowOps` in plain torch. Norms and rotations are computed in fp32 whatever the dtype, as HF does."""

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

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate_up[:, :n]) * gate_up[:, n:], [rows, n]."""
        import torch

        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

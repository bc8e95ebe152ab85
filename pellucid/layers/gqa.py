"""Grouped-query attention over the paged cache. Built by `models.decoder` for models with `GQATraits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.layers.batch import AttentionSegment, ForwardBatch
from pellucid.layers.linear import Linear
from pellucid.layers.norm import RMSNorm
from pellucid.layers.rotary import Rotary
from pellucid.traits.model import GQATraits

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.torch_ops import RowOps


@dataclass(frozen=True, slots=True)
class GQAAttention:
    """qkv -> (q/k norm) -> rope -> cache -> attention -> o_proj added to the residual."""

    traits: GQATraits
    layer: int
    ops: RowOps
    rotary: Rotary
    qkv_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o_proj: Linear

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, batch: ForwardBatch) -> None:
        """residual [tokens, hidden] += attention(x)."""
        traits = self.traits
        width, kv_width = traits.num_heads * traits.head_dim, traits.num_kv_heads * traits.head_dim
        q, k, v = self.qkv_proj(x).split([width, kv_width, kv_width], dim=-1)
        q = q.unflatten(-1, (traits.num_heads, traits.head_dim))  # [tokens, heads, head_dim]
        heads_of_k = k.unflatten(-1, (traits.num_kv_heads, traits.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.inplace(q)
            self.k_norm.inplace(heads_of_k)
        self.rotary.rotate(q, batch.positions)
        self.rotary.rotate(heads_of_k, batch.positions)
        keys, values = batch.pool.keys(self.layer), batch.pool.values(self.layer)
        self.ops.cache_write(k, batch.slots, keys)
        self.ops.cache_write(v, batch.slots, values)

        def attend(part: AttentionSegment) -> torch.Tensor:
            rows = q[part.start : part.stop].contiguous()
            return part.backend.gqa(
                rows, keys, values, part.metadata, num_kv_heads=traits.num_kv_heads, scale=traits.softmax_scale
            )

        self.o_proj.add_to(residual, batch.attend(attend).flatten(1))

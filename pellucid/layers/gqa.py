"""Grouped-query attention over the paged cache. Built by `models.loading` for models with `GQATraits`."""

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
        traits, pool = self.traits, batch.pool
        heads, kv_heads, dim = traits.num_heads, traits.num_kv_heads, traits.head_dim
        keys, values, rotary = pool.keys(self.layer), pool.values(self.layer), self.rotary
        norms, eps = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        q = self.ops.gqa_write(
            self.qkv_proj(x), norms, eps, rotary.table, batch.positions, rotary.interleaved, batch.slots, keys, values
        )  # [tokens, heads, head_dim]

        def attend(part: AttentionSegment) -> torch.Tensor:
            rows = q[part.start : part.stop]
            return part.backend.gqa(
                rows, keys, values, part.metadata, num_kv_heads=kv_heads, scale=traits.softmax_scale
            )

        self.o_proj.add_to(residual, batch.attend(attend).view(-1, heads * dim))

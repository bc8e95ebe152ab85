"""Multi-head Latent Attention (https://arxiv.org/abs/2405.04434 section 2.1) over the paged cache.

Built by `models.loading` for models with `MLATraits`. One row [latent | rope] per token is cached. A backend
either attends in latent space (absorbed: W_UK moves to the query, W_UV to the output) or asks for the keys
and values of each head to be rebuilt (`expands_latent`); both give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import AttentionMetadata
from pellucid.layers.batch import AttentionSegment, ForwardBatch
from pellucid.layers.linear import Linear
from pellucid.layers.norm import RMSNorm
from pellucid.layers.rotary import Rotary
from pellucid.quantization.base import HeadwiseKernel
from pellucid.traits.model import MLATraits

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.torch_ops import RowOps


@dataclass(frozen=True, slots=True)
class MLAAttention:
    """q and the latent row -> rope -> cache -> attention -> o_proj added to the residual.

    `qkv_a_proj` is [q_a | kv_a] with `q_b_proj` behind it when the model has a q_lora_rank, else [q | kv_a].
    `key_up` [heads, nope, kv_lora_rank] and `value_up` [heads, v, kv_lora_rank] are there for backends that expand.
    """

    traits: MLATraits
    layer: int
    ops: RowOps
    rotary: Rotary
    qkv_a_proj: Linear
    q_a_norm: RMSNorm | None
    q_b_proj: Linear | None
    kv_a_norm: RMSNorm
    absorb_key: HeadwiseKernel
    project_value: HeadwiseKernel
    key_up: torch.Tensor | None
    value_up: torch.Tensor | None
    o_proj: Linear

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, batch: ForwardBatch) -> None:
        """residual [tokens, hidden] += attention(x)."""
        traits = self.traits
        first, row = self.qkv_a_proj(x).split(
            [self.qkv_a_proj.rows - traits.latent_head_size, traits.latent_head_size], dim=-1
        )
        q = self._queries(first).unflatten(-1, (traits.num_heads, traits.qk_head_dim))  # [tokens, heads, nope + rope]
        latent, norm, rotary = batch.pool.keys(self.layer), self.kv_a_norm, self.rotary
        self.ops.latent_write(
            q[..., traits.qk_nope_head_dim :], row, norm.weight, norm.eps, rotary.table, batch.positions,
            rotary.interleaved, batch.slots, latent,
        )  # fmt: skip
        out = batch.attend(lambda part: self._attend(q[part.start : part.stop], latent, part))
        self.o_proj.add_to(residual, out.flatten(1))

    def _queries(self, first: torch.Tensor) -> torch.Tensor:
        """[tokens, heads * (nope + rope)] from the first part of `qkv_a_proj`'s output."""
        if self.q_a_norm is None or self.q_b_proj is None:
            return first
        self.q_a_norm.inplace(first)
        return self.q_b_proj(first)

    def _attend(self, q: torch.Tensor, latent: torch.Tensor, part: AttentionSegment) -> torch.Tensor:
        """[tokens, heads, v_head_dim] for one segment."""
        import torch

        traits, metadata = self.traits, part.metadata
        if part.backend.expands_latent:
            return self._attend_expanded(q, latent, part)
        q_nope, q_rope = q.split([traits.qk_nope_head_dim, traits.qk_rope_head_dim], dim=-1)
        q_latent = torch.cat([self.absorb_key(q_nope), q_rope], dim=-1)  # [tokens, heads, kv_lora_rank + rope]
        out = part.backend.mla(q_latent, latent, metadata, kv_lora_rank=traits.kv_lora_rank, scale=traits.softmax_scale)
        return self.project_value(out)

    def _attend_expanded(self, q: torch.Tensor, latent: torch.Tensor, part: AttentionSegment) -> torch.Tensor:

        traits = self.traits
        metadata: AttentionMetadata = part.metadata

        def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """[keys, kv_lora_rank] -> K_nope [keys, heads, nope], V [keys, heads, v]."""
            assert self.key_up is not None and self.value_up is not None
            return _per_head(rows, self.key_up), _per_head(rows, self.value_up)

        return part.backend.mla_expanded(
            q, latent, metadata, kv_lora_rank=traits.kv_lora_rank, scale=traits.softmax_scale, expand=expand
        )


def _per_head(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [n, kv_lora_rank] times weight [heads, width, kv_lora_rank] -> [n, heads, width], as one product."""
    import torch

    out: torch.Tensor = torch.nn.functional.linear(rows, weight.flatten(0, 1)).unflatten(-1, weight.shape[:2])
    return out

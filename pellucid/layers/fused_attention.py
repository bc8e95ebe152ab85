"""Attention of a decode step in fused kernels: the sums of `layers.mla` and `layers.gqa`, in three to six launches.

Made by `models.fused_decoder` from the loaded layers, whose weights they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.layers.fused_step import FusedStep, dense, per_head
from pellucid.layers.gqa import GQAAttention
from pellucid.layers.linear import Linear
from pellucid.layers.mla import MLAAttention
from pellucid.layers.norm import RMSNorm
from pellucid.layers.step_tiles import GQA_DECODE, MLA_DECODE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FusedMLA:
    """norm + [q | kv_a] -> (q norm + q_b) -> absorb, rope, cache -> split-K attention -> merge, W_UV -> o_proj.

    Attention may be another backend's (`FusedStep.called`).
    """

    norm: RMSNorm
    layer: MLAAttention

    def add_to(self, step: FusedStep) -> None:
        """step.x += attention(norm(step.x))."""
        import torch

        from pellucid.kernels.triton import mla_decode, mla_tiles

        layer, traits, rows = self.layer, self.layer.traits, step.rows
        heads, rank, width = traits.num_heads, traits.kv_lora_rank, traits.latent_head_size
        weight, bias = dense(layer.qkv_a_proj)
        first = step.scratch("qkv", rows, weight.shape[0])
        step.project(step.x, weight, first, norm=self.norm.weight, eps=self.norm.eps, bias=bias)
        q, kv = first[:, :-width], first[:, -width:]
        if layer.q_a_norm is not None and layer.q_b_proj is not None:
            up, up_bias = dense(layer.q_b_proj)
            wide = step.scratch("q", rows, up.shape[0])
            step.project(q, up, wide, norm=layer.q_a_norm.weight, eps=layer.q_a_norm.eps, bias=up_bias)
            q = wide
        latent, table = step.pool.keys(layer.layer), step.page_table
        q_latent = step.scratch("q_latent", rows, heads, width)
        mla_decode.absorb_rope_write(
            q, kv, layer.kv_a_norm.weight, layer.kv_a_norm.eps, per_head(layer.absorb_key), layer.rotary.table,
            layer.rotary.interleaved, latent, table, step.sequence, step.context, q_latent, pdl=step.pdl,
        )  # fmt: skip
        if step.called is not None:
            attended = step.called.backend.mla(
                q_latent, latent, step.called.metadata, kv_lora_rank=rank, scale=traits.softmax_scale
            )
            # One part, whose share is 1 whatever its sum.
            partial, lse = attended.unsqueeze(1), step.scratch("no_lse", rows, 1, heads, dtype=torch.float32)
        else:
            page = latent.shape[1]
            tile = step.tile(MLA_DECODE, lambda: mla_tiles.decode_tile(rows, heads, page, width, step.limits))
            splits = mla_tiles.splits_for(rows, heads, tile, width, step.limits, step.max_context)
            partial = step.scratch("partial", rows, splits, heads, rank, dtype=torch.float32)
            lse = step.scratch("lse", rows, splits, heads, dtype=torch.float32)
            mla_decode.split_decode(
                q_latent, latent, table, step.sequence, step.context, traits.softmax_scale, rank, partial, lse,
                pdl=step.pdl, tile=tile,
            )  # fmt: skip
        out = step.scratch("attended", rows, heads * traits.v_head_dim)
        mla_decode.combine_project(partial, lse, per_head(layer.project_value), out, pdl=step.pdl)
        _add_output(step, layer.o_proj, out)


@dataclass(frozen=True, slots=True)
class FusedGQA:
    """norm + qkv -> (q and k norm) rope, cache write, split-K attention and merge -> o_proj.

    Where attention is another backend's (`FusedStep.called`), norm, rope and cache write are a launch of their own.
    """

    norm: RMSNorm
    layer: GQAAttention

    def add_to(self, step: FusedStep) -> None:
        """step.x += attention(norm(step.x))."""
        import torch

        from pellucid.kernels.triton.gqa_attend import attend
        from pellucid.kernels.triton.gqa_decode import decode_tile, splits_for
        from pellucid.kernels.triton.gqa_write import ByContext, norm_rope_write

        layer, traits, rows = self.layer, self.layer.traits, step.rows
        heads, kv_heads, dim = traits.num_heads, traits.num_kv_heads, traits.head_dim
        weight, bias = dense(layer.qkv_proj)
        qkv = step.scratch("qkv", rows, weight.shape[0])
        step.project(step.x, weight, qkv, norm=self.norm.weight, eps=self.norm.eps, bias=bias)
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm))
        eps = 0.0 if layer.q_norm is None else layer.q_norm.eps
        keys, values = step.pool.keys(layer.layer), step.pool.values(layer.layer)
        if step.called is not None:
            query = step.scratch("query", rows, heads, dim)
            norm_rope_write(
                qkv, q_norm, k_norm, eps, layer.rotary.table, layer.rotary.interleaved, keys, values,
                ByContext(step.page_table, step.sequence, step.context), query, pdl=step.pdl,
            )  # fmt: skip
            out = step.called.backend.gqa(
                query, keys, values, step.called.metadata, num_kv_heads=kv_heads, scale=traits.softmax_scale
            )
            _add_output(step, layer.o_proj, out.view(rows, heads * dim))
            return
        # One program of a row merges all its parts: fewer than where a launch does.
        splits = splits_for(rows, kv_heads, step.limits.sm_count, step.max_context, per_sm=2)
        out = step.scratch("attended", rows, heads * dim)
        partial = (
            out.view(rows, 1, heads, dim)
            if splits == 1
            else step.scratch("partial", rows, splits, heads, dim, dtype=torch.float32)
        )
        attend(
            qkv, q_norm, k_norm, eps, layer.rotary.table, layer.rotary.interleaved, keys, values, step.page_table,
            step.sequence, step.context, traits.softmax_scale, partial,
            step.scratch("lse", rows, splits, heads, dtype=torch.float32),
            step.scratch("arrived", rows, kv_heads, dtype=torch.int32), out, pdl=step.pdl,
            tile=step.tile(GQA_DECODE, lambda: decode_tile(dim, rows * splits * kv_heads)),
        )  # fmt: skip
        _add_output(step, layer.o_proj, out)


def _add_output(step: FusedStep, o_proj: Linear, out: torch.Tensor) -> None:
    weight, bias = dense(o_proj)
    step.project(out, weight, step.x, bias=bias, residual=True)

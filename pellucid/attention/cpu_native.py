"""Attention by our own C++ kernels for the CPU, compiled on the user's machine for its instruction set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext
    from pellucid.kernels.cpu_library import CpuLibrary

TRAITS = BackendTraits(
    name="cpu_native",
    op="attention",
    summary="own C++ kernels over pages, one order of addition whatever the batch",
    priority=Priority.OWN_NATIVE,
    source="this file",
    built_in=True,
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cpu"}),
    attention=frozenset({"mla", "gqa"}),
    mla_dims=ANY,
    head_dims=ANY,
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"fp32"}),
    kv_layouts=frozenset({"latent_row", "nhd"}),
    compute_dtypes=frozenset({"fp32"}),
    needs_compiler="c++",
    batch_invariant=True,
)


def create(context: KernelContext, phase: Phase) -> CpuNativeAttention:
    return CpuNativeAttention(context.cpu_library)


@dataclass(frozen=True, slots=True)
class CpuNativeAttention(PartialAttention):
    """One (token, head) at a time over its pages, in a fixed order of sums. Implements `AttentionBackend`."""

    library: CpuLibrary
    expands_latent: bool = False

    def gqa(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        return self.library.paged_attention(
            q,
            keys,
            values,
            value_dim=q.shape[2],
            value_head_stride=q.shape[2],
            num_kv_heads=num_kv_heads,
            page_table=metadata.page_table,
            sequence=metadata.sequence,
            context=metadata.context,
            scale=scale,
        )

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        return self.library.paged_attention(
            q,
            latent,
            latent,
            value_dim=kv_lora_rank,
            value_head_stride=0,
            num_kv_heads=1,
            page_table=metadata.page_table,
            sequence=metadata.sequence,
            context=metadata.context,
            scale=scale,
        )

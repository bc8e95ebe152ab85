"""FlashAttention 3 with a paged cache for grouped-query attention, on Hopper, from the wheel `tokenspeed-fa3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.kernels.device import to_device
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="fa3_gqa",
    op="attention",
    summary="FlashAttention 3 over pages",
    priority=Priority.THIRD_PARTY + 40,
    source="tokenspeed-fa3 3.0.0.post20260810: sm_90a code only, head widths by its flash_attn_config.py",
    built_in=True,
    fused_decode="called",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({90}),
    attention=frozenset({"gqa"}),
    head_dims=frozenset({64, 128, 192, 256}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"nhd"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("tokenspeed-fa3"),),
    notes="It is built without head width 96.",
    unverified=frozenset({"page_sizes"}),
)


def create(context: KernelContext, phase: Phase) -> FA3GQA:
    return FA3GQA(phase)


@dataclass(frozen=True, slots=True)
class FA3GQA(PartialAttention):
    """Implements `AttentionBackend`. Decode reads tensors of the metadata alone, so that a graph can hold it."""

    phase: Phase
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
        from flash_attn_interface import flash_attn_with_kvcache

        shape = (*keys.shape[:2], num_kv_heads, q.shape[-1])
        caches = {"k_cache": keys.view(shape), "v_cache": values.view(shape), "softmax_scale": scale}
        if self.phase == "decode":
            table = metadata.derive("table", lambda: metadata.page_table.index_select(0, metadata.sequence))
            out = flash_attn_with_kvcache(
                q.unsqueeze(1), cache_seqlens=metadata.context, page_table=table, **caches
            )  # fmt: skip
            attended: torch.Tensor = out.squeeze(1)
            return attended
        starts, contexts, longest = metadata.derive("spans", lambda: query_starts(metadata))
        found: torch.Tensor = flash_attn_with_kvcache(
            q, cache_seqlens=contexts, page_table=metadata.page_table, cu_seqlens_q=starts, max_seqlen_q=longest,
            causal=True, **caches,
        )  # fmt: skip
        return found


def query_starts(metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Where each sequence's rows begin, int32 [sequences + 1]; what its last row sees, int32 [sequences]; and the most
    rows of a sequence."""
    import torch

    spans, device = metadata.spans, metadata.page_table.device
    starts = to_device([*(span.start for span in spans), spans[-1].stop], torch.int32, device)
    contexts = to_device([span.context for span in spans], torch.int32, device)
    return starts, contexts, max(span.stop - span.start for span in spans)

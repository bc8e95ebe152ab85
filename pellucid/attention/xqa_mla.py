"""XQA MLA decode for workstation Blackwell, from `flashinfer-python`, which compiles it for 128 query heads alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.attention.flashinfer_steps import WORKSPACE_BYTES, decode_rows
from pellucid.traits.backend import ANY, BackendTraits, HeadRule, MLADims, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="xqa_mla",
    op="attention",
    summary="XQA decode, one new token per sequence, 128 heads",
    priority=Priority.THIRD_PARTY + 10,
    source="flashinfer-python 0.6.14: mla/_core.py, xqa.py, jit/xqa.py, csrc/xqa/mla_sm120.cu; flashinfer#2745, #3161",
    built_in=True,
    fused_decode="called",
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({120, 121}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=HeadRule(frozenset({128})),
    query_lens=frozenset({1}),
    page_sizes=frozenset({16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16"}),
    packages=(Package("flashinfer-python"),),
    min_cuda=(12, 8),
    needs_compiler="nvcc",
    notes="Not run on hardware; the numeric gate decides on yours. Compiled for 128 query heads: with fewer it read "
    "the memory of the next sequence before it was refused. SM 12.1 wants CUDA 12.9.",
    unverified=frozenset({"fused_decode", "min_cuda"}),
)


def create(context: KernelContext, phase: Phase) -> XQAMLA:
    import torch

    # Zeros: it begins with semaphores, which the kernel leaves at zero.
    return XQAMLA(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=context.device))


@dataclass(frozen=True, slots=True, eq=False)
class XQAMLA(PartialAttention):
    """Implements `AttentionBackend`. Reads tensors of the metadata alone, so that a graph can hold it."""

    workspace: torch.Tensor
    expands_latent: bool = False

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        from flashinfer.mla import xqa_batch_decode_with_kv_cache_mla

        page = latent.shape[1]
        rows = metadata.derive("rows", lambda: decode_rows(metadata, page))
        # Its kernel multiplies by this scale and by no other. Queries lie one after another, as it reads them.
        out: torch.Tensor = xqa_batch_decode_with_kv_cache_mla(
            query=q.contiguous().unsqueeze(1), kv_cache=latent, workspace_buffer=self.workspace,
            qk_nope_head_dim=kv_lora_rank, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=q.shape[-1] - kv_lora_rank,
            block_tables=rows.table, seq_lens=rows.lengths, max_seq_len=rows.table.shape[1] * page, bmm1_scale=scale,
        )  # fmt: skip
        return out.squeeze(1).masked_fill_(rows.padded, 0)

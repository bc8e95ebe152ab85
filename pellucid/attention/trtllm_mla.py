"""TensorRT-LLM's generated MLA decode kernels for datacentre Blackwell, from `flashinfer-python`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.attention.flashinfer_steps import WORKSPACE_BYTES, decode_rows
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="trtllm_mla",
    op="attention",
    summary="TensorRT-LLM generated decode kernels",
    priority=Priority.THIRD_PARTY + 60,
    source="flashinfer-python 0.6.14: mla/_core.py, csrc/trtllm_fmha_kernel_launcher.cu",
    built_in=True,
    fused_decode="called",
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({100, 103}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY), MLADims(256, 64, ANY)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=frozenset({32, 64}),
    kv_dtypes=frozenset({"bf16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Not run on hardware; the numeric gate decides on yours. Its kernels are downloaded at first use, or come "
    "with the package flashinfer-cubin.",
    unverified=frozenset({"head_rule", "fused_decode"}),
)

NOPE = 128
"""Its call asks for the width before absorption, which no kernel sees."""


def create(context: KernelContext, phase: Phase) -> TrtllmMLA:
    import torch

    # Zeros: it begins with counters, which the kernels leave at zero.
    return TrtllmMLA(torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=context.device))


@dataclass(frozen=True, slots=True, eq=False)
class TrtllmMLA(PartialAttention):
    """Implements `AttentionBackend`. Reads tensors of the metadata alone, so that a graph can hold it."""

    workspace: torch.Tensor
    expands_latent: bool = False

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        page = latent.shape[1]
        rows = metadata.derive("rows", lambda: decode_rows(metadata, page))
        out: torch.Tensor = trtllm_batch_decode_with_kv_cache_mla(
            query=q.unsqueeze(1), kv_cache=latent, workspace_buffer=self.workspace, qk_nope_head_dim=NOPE,
            kv_lora_rank=kv_lora_rank, qk_rope_head_dim=q.shape[-1] - kv_lora_rank, block_tables=rows.table,
            seq_lens=rows.lengths, max_seq_len=rows.table.shape[1] * page, bmm1_scale=scale, backend="trtllm-gen",
        )  # fmt: skip
        return out.squeeze(1).masked_fill_(rows.padded, 0)

"""FlashMLA's dense decode for Hopper, from the wheel `sgl-flash-mla`, whose "legacy" half still has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="flashmla",
    op="attention",
    summary="FlashMLA dense decode; tiles 64 query heads",
    priority=Priority.THIRD_PARTY + 50,
    source="deepseek-ai/FlashMLA csrc/api/dense_decode.h at 9241ae3 (2026-04-29), sgl-flash-mla 1.0.0",
    built_in=True,
    fused_decode="called",
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({90}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=frozenset({64}),
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("sgl-flash-mla"),),
    notes="With 16 heads three quarters of each tile are empty: 18 % behind FA3 at 128 sequences (vllm#27363).",
)


def create(context: KernelContext, phase: Phase) -> FlashMLA:
    return FlashMLA(phase)


@dataclass(frozen=True, slots=True)
class FlashMLA(PartialAttention):
    """Implements `AttentionBackend`. Which part of which sequence a multiprocessor takes, the first layer of a step
    finds out on the device, for all of them."""

    phase: Phase
    expands_latent: bool = False

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        import flash_mla

        table = metadata.derive("table", lambda: metadata.page_table.index_select(0, metadata.sequence))
        lengths = metadata.derive("lengths", lambda: _lengths(metadata.context))
        schedule = metadata.derive("schedule", lambda: flash_mla.get_mla_metadata()[0])
        out, _ = flash_mla.flash_mla_with_kvcache(
            q.unsqueeze(1), latent.unsqueeze(2), table, lengths, kv_lora_rank, schedule, softmax_scale=scale,
            use_legacy=True,
        )  # fmt: skip
        attended: torch.Tensor = out.squeeze(1)
        return attended


def _lengths(context: torch.Tensor) -> torch.Tensor:
    """`context`, but with a key for the first row: where no row has any, as in a step that only compiles, its
    schedule is of nothing, and it reads where no memory is."""
    lengths = context.clone()
    lengths[:1].clamp_(min=1)
    return lengths

"""CUTLASS MLA decode for datacentre Blackwell, from `flashinfer-python`, compiled for 128 query heads alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pellucid.attention.base import PartialAttention
from pellucid.attention.flashinfer_steps import TABLE_TOKENS, WORKSPACE_BYTES, HostPlan, PagedRows, paged_rows
from pellucid.traits.backend import ANY, BackendTraits, HeadRule, MLADims, Package, Phase, Priority

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext

TRAITS = BackendTraits(
    name="cutlass_mla",
    op="attention",
    summary="CUTLASS MLA decode for 128 heads",
    priority=Priority.THIRD_PARTY + 20,
    source="flashinfer-python 0.6.14: mla/_core.py, csrc/cutlass_mla.cu, include/flashinfer/attention/cutlass_mla.cuh",
    built_in=True,
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({100, 110}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=HeadRule(frozenset({128})),
    query_lens=frozenset({1}),
    page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Not run on hardware; the numeric gate decides on yours. Pages must divide 128, and a page table holds whole "
    "groups of 128 tokens. Its softmax scale is fixed, so queries bear what is between it and the model's. FlashInfer "
    "0.6.14 copies the cache that it is given in every layer: it is given the step's own pages, copied once more.",
    unverified=frozenset({"sm"}),
)

FIXED_SCALE = (128 + 64) ** -0.5
"""Compiled into the kernel."""


class Gathered(NamedTuple):
    """The step's pages one after another, as the kernel reads them."""

    rows: PagedRows
    table: torch.Tensor
    """int32 [rows, pages], in whole groups of `TABLE_TOKENS`: numbers into `rows.pages`."""
    lengths: torch.Tensor


def create(context: KernelContext, phase: Phase) -> CutlassMLA:
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=context.device)
    return CutlassMLA(BatchMLAPagedAttentionWrapper(workspace, backend="cutlass"), HostPlan())


@dataclass(frozen=True, slots=True, eq=False)
class CutlassMLA(PartialAttention):
    """Implements `AttentionBackend`."""

    wrapper: Any
    plan: HostPlan
    expands_latent: bool = False

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        step = self.plan.get(metadata, lambda: _gathered(metadata, latent))
        share = scale / FIXED_SCALE

        def run(kept: torch.Tensor) -> torch.Tensor:
            cache = latent[step.rows.pages]
            scaled = kept if abs(share - 1) < 1e-6 else kept * share
            found: torch.Tensor = self.wrapper.run(
                q_nope=scaled[..., :kv_lora_rank], q_pe=scaled[..., kv_lora_rank:],
                ckv_cache=cache[..., :kv_lora_rank], kpe_cache=cache[..., kv_lora_rank:],
                kv_len=step.lengths, page_table=step.table,
            )  # fmt: skip
            return found

        return step.rows.attend(q, kv_lora_rank, run)


def _gathered(metadata: AttentionMetadata, latent: torch.Tensor) -> Gathered:
    import torch

    page, device = latent.shape[1], latent.device
    rows = paged_rows(metadata, page, each_row=True)
    group = max(1, TABLE_TOKENS // page)
    width = -(-int(rows.page_starts.diff().max()) // group) * group if len(rows.lengths) else group
    # What lies past a sequence's pages is another's, or the last page again; the kernel masks it.
    table = rows.page_starts[:-1, None] + torch.arange(width, dtype=torch.int32)
    table = table.clamp(max=max(0, len(rows.pages) - 1))
    return Gathered(rows, *(part.to(device, non_blocking=True) for part in (table, rows.lengths)))

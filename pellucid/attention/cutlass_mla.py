"""Declaration of CUTLASS MLA decode, reached through FlashInfer, which is compiled for 128 query heads alone."""

from __future__ import annotations

from pellucid.traits.backend import ANY, BackendTraits, HeadRule, MLADims, Package, Priority

TRAITS = BackendTraits(
    name="cutlass_mla",
    op="attention",
    summary="CUTLASS MLA decode for 128 heads",
    priority=Priority.THIRD_PARTY + 20,
    source="flashinfer/mla/_core.py at fb28d72 (2026-08-22)",
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({100, 110}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=HeadRule(frozenset({128})),
    query_lens=frozenset({1}),
    page_sizes=frozenset({1, 2, 4, 8, 16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Pages must divide 128, and a page table holds whole groups of 128 tokens.",
    unverified=frozenset({"query_lens"}),
)

"""Declaration of XQA MLA decode, reached through FlashInfer, for workstation Blackwell."""

from __future__ import annotations

from pellucid.traits.backend import ANY, BackendTraits, HeadRule, MLADims, Package, Priority

TRAITS = BackendTraits(
    name="xqa_mla",
    op="attention",
    summary="XQA decode, one new token per sequence, 128 heads",
    priority=Priority.THIRD_PARTY + 10,
    source="flashinfer/mla/_batch_mla/_backends/xqa_backend.py at 00c6ba8; flashinfer#2745, #2750, #3161",
    phases=frozenset({"decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({120, 121}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY), MLADims(256, 64, ANY)}),
    head_rule=HeadRule(frozenset({128})),
    query_lens=frozenset({1}),
    page_sizes=frozenset({16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16", "fp8"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16"}),
    packages=(Package("flashinfer-python"),),
    min_cuda=(12, 8),
    needs_compiler="nvcc",
    notes="Compiled for 128 query heads: with fewer it read the memory of the next sequence before it was refused.",
)

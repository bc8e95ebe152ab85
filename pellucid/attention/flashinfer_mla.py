"""Declaration of FlashInfer's paged MLA wrapper (its fa2 and fa3 forms), which compiles itself with nvcc."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Priority

TRAITS = BackendTraits(
    name="flashinfer_mla",
    op="attention",
    summary="FlashInfer BatchMLAPagedAttentionWrapper, latent and rope parts as slices of our row",
    priority=Priority.THIRD_PARTY + 30,
    source="flashinfer/mla/_core.py at fb28d72 (2026-08-22)",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="Its automatic form is fa3 on SM 9.0 and fa2 elsewhere. The fp8 form (SM 9.0) is not declared.",
    unverified=frozenset({"sm", "mla_dims"}),
)

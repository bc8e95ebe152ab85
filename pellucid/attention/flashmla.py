"""Declaration of FlashMLA's dense decode kernel for Hopper."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Priority

TRAITS = BackendTraits(
    name="flashmla",
    op="attention",
    summary="FlashMLA dense decode; tiles 64 query heads",
    priority=Priority.THIRD_PARTY + 50,
    source="deepseek-ai/FlashMLA csrc/api/dense_decode.h at 9241ae3 (2026-04-29)",
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

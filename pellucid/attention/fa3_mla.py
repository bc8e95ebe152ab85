"""Declaration of FlashAttention 3 for MLA: the absorbed form with its extra `qv` operand, on Hopper."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, MLADims, Package, Priority

TRAITS = BackendTraits(
    name="fa3_mla",
    op="attention",
    summary="FlashAttention 3: ragged prefill, absorbed decode with qv",
    priority=Priority.THIRD_PARTY + 40,
    source="tokenspeed-fa3 3.0.0.post20260810 (sm_90a code only)",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({90}),
    attention=frozenset({"mla"}),
    mla_dims=frozenset({MLADims(512, 64, ANY)}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("tokenspeed-fa3"),),
    unverified=frozenset({"page_sizes", "query_lens"}),
)

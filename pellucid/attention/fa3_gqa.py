"""Declaration of FlashAttention 3 with a paged cache for grouped-query attention, on Hopper."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="fa3_gqa",
    op="attention",
    summary="FlashAttention 3 over pages",
    priority=Priority.THIRD_PARTY + 40,
    source="tokenspeed-fa3 3.0.0.post20260810 (sm_90a code only)",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({90}),
    attention=frozenset({"gqa"}),
    head_dims=frozenset({64, 96, 128, 192, 256}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"nhd"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("tokenspeed-fa3"),),
    unverified=frozenset({"head_dims", "page_sizes"}),
)

"""Declaration of FlashInfer's paged prefill and decode wrappers for grouped-query attention."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="flashinfer_gqa",
    op="attention",
    summary="FlashInfer paged wrappers, compiled with nvcc on first use",
    priority=Priority.THIRD_PARTY + 30,
    source="FlashInfer documentation of BatchPrefill/BatchDecodeWithPagedKVCacheWrapper",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121}),
    attention=frozenset({"gqa"}),
    head_dims=frozenset({64, 128, 256}),
    head_rule=ANY_HEADS,
    query_lens=ANY,
    page_sizes=ANY,
    kv_dtypes=frozenset({"bf16", "fp16", "fp8"}),
    kv_layouts=frozenset({"nhd", "hnd"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    unverified=frozenset({"sm", "head_dims", "kv_dtypes"}),
)

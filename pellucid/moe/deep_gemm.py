"""Declaration of DeepGEMM's grouped products for block-scaled fp8 experts."""

from __future__ import annotations

from pellucid.traits.backend import BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="deep_gemm",
    op="moe",
    summary="DeepGEMM grouped fp8 and bf16 products, compiled with nvcc on first use",
    priority=Priority.THIRD_PARTY + 20,
    source="sgl-deep-gemm 0.2.5",
    devices=frozenset({"cuda"}),
    sm=frozenset({90, 100, 103}),
    compute_dtypes=frozenset({"bf16"}),
    weight_schemes=frozenset({"bf16", "fp8"}),
    weight_groups=frozenset({128}),
    shard_multiple_of=128,
    packages=(Package("sgl-deep-gemm"),),
    needs_compiler="nvcc",
    notes="On SM 12.0, where vLLM 0.33 takes it, it crashed instead of refusing (sglang#18870): not declared.",
    unverified=frozenset({"sm"}),
)

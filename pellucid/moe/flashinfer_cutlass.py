"""Declaration of FlashInfer's fused CUTLASS MoE."""

from __future__ import annotations

from pellucid.traits.backend import BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="flashinfer_cutlass",
    op="moe",
    summary="FlashInfer cutlass_fused_moe",
    priority=Priority.THIRD_PARTY + 30,
    source="FlashInfer 0.6.14 cutlass_fused_moe",
    devices=frozenset({"cuda"}),
    sm=frozenset({90, 100, 103, 120, 121}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    weight_schemes=frozenset({"bf16", "fp16", "fp8", "int4", "nvfp4"}),
    scheme_sms=(
        ("fp8", frozenset({90})),
        ("int4", frozenset({90})),
        ("nvfp4", frozenset({100, 103, 120, 121})),
    ),
    weight_groups=frozenset({16, 32, 64, 128}),
    shard_multiple_of=64,
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="int4 weights must be interleaved for SM 9.0 at load; nvfp4 on SM 12.0 gave wrong results in some versions "
    "(NVIDIA/cutlass#3096).",
    unverified=frozenset({"sm", "scheme_sms", "weight_groups", "shard_multiple_of"}),
)

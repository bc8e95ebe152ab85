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
    weight_schemes=frozenset({"bf16", "fp16"}),
    shard_multiple_of=64,
    packages=(Package("flashinfer-python"),),
    needs_compiler="nvcc",
    notes="fp8, nvfp4 and int4 forms exist on some of these devices only and are not declared; "
    "nvfp4 on SM 12.0 gave wrong results (NVIDIA/cutlass#3096).",
    unverified=frozenset({"sm", "shard_multiple_of"}),
)

"""Declaration of the Marlin MoE kernels: 4-bit and 8-bit weights, 16-bit activations."""

from __future__ import annotations

from pellucid.traits.backend import BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="marlin",
    op="moe",
    summary="Marlin W4A16 and W8A16, weights repacked at load",
    priority=Priority.THIRD_PARTY + 40,
    source="sglang-kernel 0.4.5 moe_wna16_marlin_gemm",
    devices=frozenset({"cuda"}),
    sm=frozenset({80, 86, 87, 89, 90, 100, 103, 120, 121}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    weight_schemes=frozenset({"int4", "fp8", "nvfp4", "mxfp4"}),
    weight_groups=frozenset({16, 32, 64, 128}),
    weight_scales=frozenset({"tensor", "channel"}),
    shard_multiple_of=128,
    packages=(Package("sglang-kernel"),),
    notes="Published figures reach 32 to 43 % of the bandwidth at small batches (FlagGems#3375, H20).",
    unverified=frozenset({"sm", "weight_schemes", "weight_scales", "shard_multiple_of"}),
)

"""Declaration of Humming's MoE kernels: weights of up to 8 bits, 16-bit activations, compiled on first use."""

from __future__ import annotations

from pellucid.traits.backend import BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="humming",
    op="moe",
    summary="Humming W4A16 and W8A16 experts, compiled with NVRTC on first use",
    priority=Priority.THIRD_PARTY + 45,
    source="humming-kernels 0.1.20, its schemas and supported GPUs",
    devices=frozenset({"cuda"}),
    sm=frozenset({80, 86, 87, 89, 90, 100, 103, 110, 120, 121}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    weight_schemes=frozenset({"int4", "fp8", "nvfp4", "mxfp4"}),
    weight_groups=frozenset({16, 32, 64, 128}),
    weight_scales=frozenset({"tensor", "channel"}),
    zero_points=True,
    packages=(Package("humming-kernels"),),
    notes="What vLLM 0.33 takes for int4 experts on SM 9.0 before Marlin.",
    unverified=frozenset({"sm", "weight_schemes", "weight_groups", "weight_scales", "zero_points"}),
)

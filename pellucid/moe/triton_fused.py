"""Declaration of our fused Triton MoE kernels: tokens sorted by expert, gate and up in one product."""

from __future__ import annotations

from pellucid.traits.backend import ANY, BackendTraits, Package, Priority

TRAITS = BackendTraits(
    name="triton_fused",
    op="moe",
    summary="own Triton kernels, tokens sorted by expert",
    priority=Priority.OWN_PORTABLE,
    source="design",
    devices=frozenset({"cuda"}),
    sm=ANY,
    compute_dtypes=frozenset({"bf16", "fp16"}),
    weight_schemes=frozenset({"bf16", "fp16", "fp8", "int4"}),
    scheme_sms=(("fp8", frozenset({89, 90, 100, 103, 120, 121})),),
    weight_groups=frozenset({32, 64, 128}),
    shard_multiple_of=32,
    packages=(Package("triton"),),
    notes="int4 is unpacked in the kernel: 6 to 7 instructions a weight, so it is far from the bandwidth limit.",
)

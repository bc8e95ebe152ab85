"""Declaration of our Triton kernels for grouped-query attention: ragged prefill and split-K decode."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Priority, SharedMemoryModel

PREFILL_TILES = SharedMemoryModel(
    kernel="ragged GQA prefill",
    phase="prefill",
    itemsize=2,
    terms=("M*qk", "N*qk", "N*v", "M*N"),
    tiles=((128, 64), (64, 64), (32, 64)),
)

TRAITS = BackendTraits(
    name="triton_gqa",
    op="attention",
    summary="own Triton kernels",
    priority=Priority.OWN_PORTABLE,
    source="design; the shared-memory form of triton_mla with qk = v = head_dim",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=ANY,
    attention=frozenset({"gqa"}),
    head_dims=frozenset({64, 80, 96, 128, 192, 256}),
    head_rule=ANY_HEADS,
    query_lens=frozenset(range(1, 17)),
    page_sizes=frozenset({16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"nhd"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("triton"),),
    shared_memory=(PREFILL_TILES,),
    notes="Triton compiles for the device it finds: the limits, not a list of devices, decide.",
    unverified=frozenset({"shared_memory"}),
)

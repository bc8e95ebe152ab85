"""Declaration of our Triton MLA kernels: ragged prefill, and split-K decode in tiles of 16 query heads."""

from __future__ import annotations

from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Priority, SharedMemoryModel

PREFILL_TILES = SharedMemoryModel(
    kernel="ragged MLA prefill",
    phase="prefill",
    itemsize=2,
    terms=("M*qk", "N*qk", "N*v", "M*N"),
    tiles=((128, 64), (64, 64), (32, 64)),
)
"""One stage: Q, K and V tiles and the probabilities, all 16-bit; reported as 106496 bytes for 128x64 at 192/128."""

TRAITS = BackendTraits(
    name="triton_mla",
    op="attention",
    summary="own Triton kernels; decode tiles 16 heads, so few heads per rank waste nothing",
    priority=Priority.OWN_PORTABLE,
    source="design; shared memory from triton-lang/triton#8182 and sgl-project/sglang#14311",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=ANY,
    attention=frozenset({"mla"}),
    mla_dims=ANY,
    head_rule=ANY_HEADS,
    query_lens=frozenset(range(1, 17)),
    page_sizes=frozenset({16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"latent_row"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("triton"),),
    shared_memory=(PREFILL_TILES,),
    notes="Triton compiles for the device it finds: the limits, not a list of devices, decide.",
    unverified=frozenset({"shared_memory"}),
)

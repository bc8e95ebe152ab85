"""Grouped-query attention by our Triton kernels: flash attention over pages in prefill, split-K in decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Phase, Priority, SharedMemoryModel

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionMetadata
    from pellucid.kernels.context import KernelContext
    from pellucid.kernels.device import DeviceLimits

PREFILL_TILES = SharedMemoryModel(
    kernel="ragged GQA prefill",
    phase="prefill",
    itemsize=2,
    terms=("M*qk", "N*qk", "N*v", "M*N"),
    tiles=((128, 64), (64, 64), (32, 64)),
)
"""The least that a tile takes; more buffers of K and V are taken where the device has room for them."""

TRAITS = BackendTraits(
    name="triton_gqa",
    op="attention",
    summary="own Triton kernels",
    priority=Priority.OWN_PORTABLE,
    source="kernels/triton/gqa_decode.py, kernels/triton/prefill.py",
    built_in=True,
    fused_decode="inside",
    phases=frozenset({"prefill", "decode"}),
    devices=frozenset({"cuda"}),
    sm=ANY,
    attention=frozenset({"gqa"}),
    head_dims=frozenset(range(16, 257, 8)),
    head_rule=ANY_HEADS,
    query_lens=frozenset(range(1, 17)),
    page_sizes=frozenset({16, 32, 64, 128}),
    kv_dtypes=frozenset({"bf16", "fp16"}),
    kv_layouts=frozenset({"nhd"}),
    compute_dtypes=frozenset({"bf16", "fp16"}),
    packages=(Package("triton"),),
    shared_memory=(PREFILL_TILES,),
    notes="Triton compiles for the device it finds: the limits, not a list of devices, decide.",
)


def create(context: KernelContext, phase: Phase) -> TritonGQA:
    from pellucid.kernels.device import device_limits

    return TritonGQA(phase, device_limits(context.device))


@dataclass(frozen=True, slots=True)
class TritonGQA(PartialAttention):
    """Implements `AttentionBackend`. Decode reads tensors of the metadata alone, so that a graph can hold it."""

    phase: Phase
    limits: DeviceLimits
    expands_latent: bool = False

    def gqa(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        attend = self._prefill if self.phase == "prefill" else self._decode
        return attend(q, keys, values, metadata, num_kv_heads, scale)

    def _prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        from pellucid.kernels.triton.prefill import paged_prefill
        from pellucid.kernels.triton.prefill_tiles import prefill_tile, query_tiles

        spans = metadata.spans
        tile = prefill_tile(q.shape[-1], q.shape[-1], self.limits, max(span.stop - span.start for span in spans))
        if metadata.tables is not None:
            tiles = metadata.tables.tiles
        else:
            tiles = metadata.derive(tile.block_m, lambda: query_tiles(spans, tile.block_m, q.device))
        out = q.new_empty(q.shape)
        paged_prefill(q, keys, values, metadata.page_table, tiles, scale, num_kv_heads, out, tile=tile)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: AttentionMetadata,
        num_kv_heads: int,
        scale: float,
    ) -> torch.Tensor:
        import torch

        from pellucid.kernels.triton.gqa_decode import combine, split_decode, splits_for

        rows, heads, dim = q.shape
        table = metadata.page_table
        splits = splits_for(rows, num_kv_heads, self.limits.sm_count, table.shape[1] * keys.shape[1])
        out = q.new_empty(rows, heads, dim)
        # One split is the result already.
        partial = q.new_empty((rows, splits, heads, dim), dtype=torch.float32) if splits > 1 else out.unsqueeze(1)
        lse = q.new_empty((rows, splits, heads), dtype=torch.float32)
        where = (table, metadata.sequence, metadata.context)
        split_decode(q, keys, values, *where, scale, num_kv_heads, partial, lse)
        if splits > 1:
            combine(partial, lse, out.view(rows, heads * dim))
        return out

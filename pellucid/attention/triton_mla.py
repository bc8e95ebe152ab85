"""MLA by our Triton kernels: ragged prefill on expanded keys, split-K decode in latent space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pellucid.attention.base import PartialAttention
from pellucid.attention.gathered_keys import MAX_EXPANDED, groups_of, key_slots, key_starts
from pellucid.traits.backend import ANY, ANY_HEADS, BackendTraits, Package, Phase, Priority, SharedMemoryModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pellucid.attention.base import AttentionMetadata, Expand, Span
    from pellucid.kernels.context import KernelContext
    from pellucid.kernels.device import DeviceLimits

PREFILL_TILES = SharedMemoryModel(
    kernel="ragged MLA prefill",
    phase="prefill",
    itemsize=2,
    terms=("M*qk", "N*qk", "N*v", "M*N"),
    tiles=((128, 64), (64, 64), (32, 64)),
)
"""The least that a tile takes; more buffers of K and V are taken where the device has room for them."""

DECODE_TILES = SharedMemoryModel(
    kernel="split MLA decode",
    phase="decode",
    itemsize=2,
    terms=("N*kv_lora_rank", "N*rope", "M*kv_lora_rank", "M*rope", "M*N"),
    tiles=((16, 16),),
)
"""16 heads and one tile of 16 keys, the least; `mla_tiles.decode_tile` takes more where there is room."""

TRAITS = BackendTraits(
    name="triton_mla",
    op="attention",
    summary="own Triton kernels; decode tiles 16 heads, so few heads per rank waste nothing",
    priority=Priority.OWN_PORTABLE,
    source="kernels/triton/mla_decode.py, kernels/triton/prefill.py",
    built_in=True,
    fused_decode="inside",
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
    shared_memory=(PREFILL_TILES, DECODE_TILES),
    notes="Triton compiles for the device it finds: the limits, not a list of devices, decide.",
)


def create(context: KernelContext, phase: Phase) -> TritonMLA:
    from pellucid.kernels.device import device_limits

    return TritonMLA(phase, device_limits(context.device))


@dataclass(frozen=True, slots=True)
class TritonMLA(PartialAttention):
    """Implements `AttentionBackend`. Decode reads tensors of the metadata alone, so that a graph can hold it."""

    phase: Phase
    limits: DeviceLimits

    @property
    def expands_latent(self) -> bool:
        return self.phase == "prefill"

    def mla(
        self, q: torch.Tensor, latent: torch.Tensor, metadata: AttentionMetadata, *, kv_lora_rank: int, scale: float
    ) -> torch.Tensor:
        import torch

        from pellucid.kernels.triton.gqa_decode import combine
        from pellucid.kernels.triton.mla_decode import split_decode
        from pellucid.kernels.triton.mla_tiles import decode_tile, splits_for

        (rows, heads, width), page = q.shape, latent.shape[1]
        table = metadata.page_table
        tile = decode_tile(rows, heads, page, width, self.limits)
        splits = splits_for(rows, heads, tile, width, self.limits, table.shape[1] * page)
        parts = q.new_empty((rows, splits, heads, kv_lora_rank), dtype=torch.float32)
        lse = q.new_empty((rows, splits, heads), dtype=torch.float32)
        where = (table, metadata.sequence, metadata.context)
        split_decode(q.contiguous(), latent, *where, scale, kv_lora_rank, parts, lse, tile=tile)
        out = q.new_empty(rows, heads, kv_lora_rank)
        combine(parts, lse, out.view(rows, heads * kv_lora_rank))
        return out

    def mla_expanded(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        kv_lora_rank: int,
        scale: float,
        expand: Expand,
    ) -> torch.Tensor:
        from pellucid.kernels.triton.prefill import ragged_prefill
        from pellucid.kernels.triton.prefill_tiles import prefill_tile

        heads, qk_dim = q.shape[1:]
        pool = latent.flatten(0, 1)
        longest = max(span.stop - span.start for span in metadata.spans)
        out = q.new_empty(0)
        for first, spans in groups_of(metadata.spans, MAX_EXPANDED // (2 * heads * qk_dim)):
            rows = pool[self._key_slots(metadata, latent, first, spans)]  # [keys, kv_lora_rank + rope]
            k_nope, v = expand(rows[:, :kv_lora_rank])
            if out.dim() == 1:
                out = q.new_empty(*q.shape[:2], v.shape[-1])
            tile = prefill_tile(qk_dim, v.shape[-1], self.limits, longest)
            tiles = self._tiles(metadata, first, spans, tile.block_m)
            ragged_prefill(q, k_nope, v, tiles, scale, out, tile=tile, k_shared=rows[:, kv_lora_rank:])
        return out

    def _key_slots(
        self, metadata: AttentionMetadata, latent: torch.Tensor, first: int, spans: Sequence[Span]
    ) -> torch.Tensor:
        if metadata.tables is not None:
            return metadata.tables.key_slots
        return metadata.derive(first, partial(key_slots, metadata, latent, first, spans))

    def _tiles(self, metadata: AttentionMetadata, first: int, spans: Sequence[Span], block_m: int) -> torch.Tensor:
        from pellucid.kernels.triton.prefill_tiles import query_tiles

        if metadata.tables is not None:
            return metadata.tables.tiles
        make = partial(query_tiles, spans, block_m, metadata.page_table.device, key_starts(spans))
        return metadata.derive((first, block_m), make)

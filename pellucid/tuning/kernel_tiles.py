"""Candidates for the launches of a fused step that are no projections: attention, experts, and the head.

Called by `tuning.projections`. They are never timed alone: the step's time decides between the default and its
neighbours, half and twice its outputs, its columns or its warps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pellucid.kernels.device import DeviceLimits
from pellucid.layers.step_tiles import (
    EXPERTS_DOWN,
    EXPERTS_GROUPED,
    EXPERTS_UP,
    GQA_DECODE,
    LM_HEAD,
    MLA_DECODE,
    tile_name,
)
from pellucid.traits.model import ModelTraits
from pellucid.tuning.projections import pipeline_bytes

if TYPE_CHECKING:
    from pellucid.kernels.triton import gqa_decode, mla_tiles
    from pellucid.kernels.triton.few_rows import SmallTile
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.layers.step_tiles import Tile

TILE_OPS = (MLA_DECODE, GQA_DECODE, EXPERTS_UP, EXPERTS_DOWN, EXPERTS_GROUPED, LM_HEAD)


def other_candidates(
    traits: ModelTraits, rows: int, limits: DeviceLimits, page_size: int, max_context: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Ops of a step of `rows` rows with the names of their tiles, the default first. `max_context`: tokens."""
    from pellucid.kernels.triton import gqa_decode, head, mla_tiles, moe_grouped, moe_small
    from pellucid.layers.fused_step import FEW_ROWS

    hidden, moe, attention = traits.hidden_size, traits.moe, traits.attention
    if attention.kind == "mla":
        shape = rows, attention.num_heads, page_size, attention.latent_head_size
        yield MLA_DECODE, _names(mla_tiles.decode_tile(*shape, limits), *_mla_tiles(*shape, limits))
    else:
        splits = gqa_decode.splits_for(rows, attention.num_kv_heads, limits.sm_count, max_context, per_sm=2)
        base = gqa_decode.decode_tile(attention.head_dim, rows * splits * attention.num_kv_heads)
        yield GQA_DECODE, _names(base, *_gqa_neighbours(base, attention.head_dim, limits))
    if moe is not None and rows <= FEW_ROWS:
        up, down = moe_small.up_tile(hidden, rows), moe_small.down_tile(moe.intermediate_size, rows)
        yield EXPERTS_UP, _names(up, *_small_neighbours(up, rows, hidden, 2, limits))
        yield EXPERTS_DOWN, _names(down, *_small_neighbours(down, rows, moe.intermediate_size, 1, limits))
    elif moe is not None:
        pairs = rows * moe.top_k, moe.num_experts, hidden, moe.intermediate_size, limits.shared_memory
        default = moe_grouped.grouped_tiles(*pairs)
        others = (moe_grouped.grouped_tiles(*pairs, block_m) for block_m in (default.block_m // 2, default.block_m * 2)
                  if 16 <= block_m <= 128)  # fmt: skip
        yield EXPERTS_GROUPED, _names(default, *others)
    if rows <= FEW_ROWS:
        tile = head.head_tile(traits.vocab_size, hidden, rows)
        yield LM_HEAD, _names(tile, *_head_neighbours(tile, rows, limits))


def _names(*tiles: Tile) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(tile_name, tiles)))


def _mla_tiles(rows: int, heads: int, page: int, width: int, limits: DeviceLimits) -> Iterator[mla_tiles.DecodeTile]:
    """The tiles that `mla_tiles.decode_tile` chooses among on one device or another."""
    from pellucid.kernels.triton.mla_tiles import SPLIT_KEYS, DecodeTile, tile_bytes

    whole = SPLIT_KEYS if rows > 1 else SPLIT_KEYS // 2
    found = [DecodeTile(16, 32, whole, 4, 3), DecodeTile(16, 64, SPLIT_KEYS, 8, 3), DecodeTile(16, 32, whole, 8, 3),
             DecodeTile(16, 16, whole, 4, 2)]  # fmt: skip
    if heads > 16:
        found.append(DecodeTile(32, 32, whole, 8, 3))
    for tile in found:
        if page % tile.block_n == 0 and tile_bytes(tile, width) <= limits.shared_memory:
            yield tile


def _gqa_neighbours(
    base: gqa_decode.DecodeTile, head_dim: int, limits: DeviceLimits
) -> Iterator[gqa_decode.DecodeTile]:
    for tile in (
        base._replace(block_n=base.block_n // 2),
        base._replace(num_stages=2 if base.num_stages == 3 else 3),
        base._replace(num_warps=8),
        base._replace(block_n=base.block_n // 2, num_stages=base.num_stages + 1),
    ):
        # Keys and values of a block, once a stage.
        if tile.block_n >= 16 and tile.num_stages * 2 * tile.block_n * head_dim * 2 <= limits.shared_memory:
            yield tile


def _small_neighbours(
    base: SmallTile, rows: int, columns: int, matrices: int, limits: DeviceLimits
) -> Iterator[SmallTile]:
    """`matrices`: rows of weights for each output, 2 for gate and up."""
    from dataclasses import replace

    from pellucid.kernels.triton.few_rows import fit_block_k

    least_n, least_k = (1, 128) if rows == 1 else (16, 32)
    most_k = fit_block_k(columns, 1 << 14)
    found = [replace(base, block_n=n) for n in (base.block_n // 2, base.block_n * 2) if least_n <= n <= 128]
    for k, warps in ((base.block_k // 2, max(1, base.warps // 2)), (base.block_k * 2, min(16, base.warps * 2))):
        if least_k <= k <= most_k:
            # Of one row each warp keeps its columns; of several, K is walked in steps by all of them.
            found.append(replace(base, block_k=k, warps=warps if rows == 1 else base.warps))
    if rows > 1:
        found += [replace(base, warps=base.warps * 2), replace(base, stages=base.stages + 1)]
        for tile in found:
            if tile.stages * (matrices * tile.block_n + 16) * tile.block_k * 2 <= limits.shared_memory:
                yield tile
    else:
        yield from found


def _head_neighbours(base: LinearTile, rows: int, limits: DeviceLimits) -> Iterator[LinearTile]:
    for block_n in (base.block_n // 2, base.block_n * 2):
        tile = base._replace(block_n=block_n)
        if (16 if base.dot else 1) <= block_n <= 128 and pipeline_bytes(tile, rows) <= limits.shared_memory:
            yield tile

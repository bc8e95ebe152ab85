"""Candidates for experts and the head: names, and what fits a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.kernels.device import DeviceLimits
from pellucid.kernels.triton import gqa_decode, mla_tiles
from pellucid.kernels.triton.few_rows import SmallTile
from pellucid.kernels.triton.linear import LinearTile
from pellucid.kernels.triton.moe_grouped import ALL_BLOCKS, GroupedTile, GroupedTiles
from pellucid.layers.step_tiles import (
    EXPERTS_DOWN,
    EXPERTS_GROUPED,
    EXPERTS_UP,
    GQA_DECODE,
    LM_HEAD,
    MLA_DECODE,
    parse_tile,
    tile_name,
)
from pellucid.tuning.kernel_tiles import TILE_OPS, other_candidates
from tests.selection.models import KIMI_K25, SMALL_DENSE, V2_LITE

H200, SMALL_CARD = DeviceLimits(90, 132, 232448), DeviceLimits(86, 82, 101376)
SIZES = st.sampled_from([16, 32, 64, 128, 256])
PRODUCTS = st.builds(GroupedTile, SIZES, SIZES, st.sampled_from([1, 8, ALL_BLOCKS]), st.sampled_from([4, 8]),
                     st.integers(1, 5))  # fmt: skip


@given(
    st.builds(SmallTile, SIZES, SIZES, st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
    | st.builds(GroupedTiles, SIZES, PRODUCTS, PRODUCTS)
    | st.builds(mla_tiles.DecodeTile, SIZES, SIZES, SIZES, SIZES, st.integers(1, 5))
    | st.builds(gqa_decode.DecodeTile, SIZES, SIZES, st.integers(1, 5))
)
def test_a_name_is_its_tile(tile: object) -> None:
    assert parse_tile(tile_name(tile)) == tile


@pytest.mark.parametrize("limits", [H200, SMALL_CARD], ids=["h200", "rtx-3090"])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 128])
@pytest.mark.parametrize("traits", [V2_LITE, KIMI_K25, SMALL_DENSE], ids=["v2-lite", "kimi", "dense"])
def test_candidates_begin_with_the_default_and_fit_the_device(traits, rows, limits) -> None:
    from pellucid.kernels.triton import head, moe_grouped, moe_small

    found = dict(other_candidates(traits, rows, limits, 64, 4096))
    assert found.keys() <= set(TILE_OPS)
    assert (LM_HEAD in found) == (rows <= 16)
    attention = traits.attention
    expected = {MLA_DECODE if attention.kind == "mla" else GQA_DECODE}
    if traits.moe is not None:
        experts = {EXPERTS_UP, EXPERTS_DOWN} if rows <= 16 else {EXPERTS_GROUPED}
        expected |= experts
        width = traits.moe.intermediate_size
        shape = rows * traits.moe.top_k, traits.moe.num_experts, traits.hidden_size, width, limits.shared_memory
        defaults = {
            EXPERTS_UP: moe_small.up_tile(traits.hidden_size, rows),
            EXPERTS_DOWN: moe_small.down_tile(width, rows),
            EXPERTS_GROUPED: moe_grouped.grouped_tiles(*shape),
        }
        for op in experts:
            assert parse_tile(found[op][0]) == defaults[op]
    assert found.keys() - {LM_HEAD} == expected
    if rows <= 16:
        assert parse_tile(found[LM_HEAD][0]) == head.head_tile(traits.vocab_size, traits.hidden_size, rows)
    if attention.kind == "mla":
        shape = rows, attention.num_heads, 64, attention.latent_head_size
        assert parse_tile(found[MLA_DECODE][0]) == mla_tiles.decode_tile(*shape, limits)
    for names in found.values():
        assert len(set(names)) == len(names) >= 2
        for tile in map(parse_tile, names):
            if isinstance(tile, SmallTile) and rows > 1:
                assert tile.stages * (tile.block_n + 16) * tile.block_k * 2 <= limits.shared_memory
            if isinstance(tile, mla_tiles.DecodeTile) and tile != parse_tile(names[0]):
                assert 64 % tile.block_n == 0 and tile.split_keys % tile.block_n == 0
                assert mla_tiles.tile_bytes(tile, attention.latent_head_size) <= limits.shared_memory
            if isinstance(tile, LinearTile) and tile.dot:
                assert tile.stages * (tile.block_n + 8) * tile.block_k * 2 <= limits.shared_memory

"""Ragged causal flash attention, over pages and over rows, against fp64; the cutting of chunks into tiles."""

from __future__ import annotations

import pytest
import torch

from pellucid.core import PlanError
from pellucid.kernels.device import DeviceLimits
from pellucid.kernels.triton.prefill_tiles import PrefillTile, prefill_tile, query_tiles
from tests.kernels.triton.attention_cases import ScatteredCache, attend, check_close, normal, ragged_metadata


@pytest.fixture
def ops():
    from pellucid.kernels.triton import prefill

    return prefill


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "queries", "contexts"),
    [
        (2, 1, 32, 16, (40, 3), (40, 30)),  # a whole prompt, and a chunk behind a cached prefix
        (2, 2, 24, 64, (1, 17, 2), (33, 17, 0)),  # one row, an odd width, padded rows
        (3, 1, 48, 5, (20,), (71,)),  # blocks that cross pages
    ],
)
def test_chunks_over_pages(ops, device, dtype, heads, kv_heads, dim, page, queries, contexts):
    """Rows outside a context are NaN and count for nothing; rows of q and out may be apart."""
    cache = ScatteredCache(contexts, page, kv_heads * dim, device, dtype)
    spans = ragged_metadata(queries, contexts, cache.page_table).spans
    tokens = sum(queries)
    q = normal(tokens, heads + 1, dim, seed=1, device=device, dtype=dtype)[:, :heads]
    out = torch.full((tokens, heads + 2, dim), float("nan"), device=device, dtype=dtype)
    tile = PrefillTile(16, 16, 4, 2)
    tiles = query_tiles(spans, tile.block_m, device)

    ops.paged_prefill(q, cache.keys, cache.values, cache.page_table, tiles, 0.2, kv_heads, out[:, :heads], tile=tile)

    for index, (start, stop, _) in enumerate(spans):
        k, v = (rows[index].view(-1, kv_heads, dim) for rows in (cache.key_rows, cache.value_rows))
        check_close(out[start:stop, :heads], attend(q[start:stop], k, v, 0.2)[0])
    assert out[:, heads:].isnan().all()


@pytest.mark.parametrize("shared", [0, 8, 16])
@pytest.mark.parametrize(("qk", "v_dim"), [(48, 32), (32, 20)])
def test_chunks_over_rows(ops, device, dtype, qk, v_dim, shared):
    """Keys of a sequence lie together; with a part that all heads share, or without."""
    queries, contexts, heads = (5, 1, 18, 2), (5, 0, 40, 9), 2
    starts, keys = (3, 0, 9, 60), 80
    spans = ragged_metadata(queries, contexts, torch.zeros(4, 1, dtype=torch.int32, device=device)).spans
    q = normal(sum(queries), heads, qk, seed=1, device=device, dtype=dtype)
    k, v = (normal(keys, heads, n, seed=n, device=device, dtype=dtype) for n in (qk, v_dim))
    for start, context in zip((8, 49, 69), (1, 11, 11), strict=True):
        k[start : start + context], v[start : start + context] = float("nan"), float("nan")
    if shared:
        k[..., qk - shared :] = k[:, :1, qk - shared :]
    out = torch.full((sum(queries), heads, v_dim), float("nan"), device=device, dtype=dtype)
    tile = PrefillTile(16, 16, 4, 2)
    tiles = query_tiles(spans, tile.block_m, device, starts)

    parts = {"k_shared": k[:, 0, qk - shared :]} if shared else {}
    ops.ragged_prefill(q, k[..., : qk - shared], v, tiles, 0.3, out, tile=tile, **parts)

    for start, (first, stop, context) in zip(starts, spans, strict=True):
        mine = slice(start, start + context)
        check_close(out[first:stop], attend(q[first:stop], k[mine], v[mine], 0.3)[0])


def test_tiles_cover_every_row_once_and_the_longest_come_first():
    spans = [(0, 1, 9), (1, 100, 120), (100, 103, 0), (103, 167, 64)]
    tiles = query_tiles(spans, 32, torch.device("cpu")).tolist()
    rows = sorted(row for start, stop, *_ in tiles for row in range(start, stop))
    assert rows == list(range(167))
    assert [tile[2] for tile in tiles] == sorted((tile[2] for tile in tiles), reverse=True)
    for start, stop, seen, sequence, _ in tiles:
        first, last, context = spans[sequence]
        assert first <= start < stop <= min(last, start + 32)
        assert seen == (context - (last - 1 - start) if context else 0)


@pytest.mark.parametrize("limits", [(80, 166912), (86, 101376), (90, 232448), (100, 232448), (120, 101376)])
@pytest.mark.parametrize(("qk", "v_dim"), [(192, 128), (128, 128), (64, 64), (256, 256)])
def test_the_tile_is_the_one_that_the_traits_announce(limits, qk, v_dim):
    from pellucid.attention.triton_mla import PREFILL_TILES
    from pellucid.selection.tiles import largest_tile

    sm, shared_memory = limits
    tile = prefill_tile(qk, v_dim, DeviceLimits(sm, 132, shared_memory), longest=8192)
    assert tile[:2] == largest_tile(PREFILL_TILES, {"qk": qk, "v": v_dim}, shared_memory).tile
    assert tile.num_stages in (2, 3)


def test_short_chunks_take_small_tiles_and_a_device_too_small_is_refused():
    limits = DeviceLimits(90, 132, 232448)
    assert [prefill_tile(128, 128, limits, n).block_m for n in (1, 32, 33, 64, 65)] == [32, 32, 64, 64, 128]
    with pytest.raises(PlanError, match="49152"):
        prefill_tile(256, 256, DeviceLimits(75, 72, 49152), 100)

"""Attention over 65,536 keys at real widths, against fp64: splits, pages and sums that short contexts never reach."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.device import DeviceLimits
from tests.kernels.triton.attention_cases import ScatteredCache, attend, check_close, normal, ragged_metadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: minutes in the interpreter"),
]

CONTEXT = 65_536
SCALE = 0.15
H200 = DeviceLimits(90, 132, 232448)


def _rows(device: torch.device) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Contexts of two sequences, and the metadata of one row each."""
    contexts = [CONTEXT, CONTEXT - 77]
    return contexts, *(torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1], contexts))


def test_grouped_query_decode(device: torch.device, dtype: torch.dtype) -> None:
    from pellucid.kernels.triton import gqa_decode

    heads, kv_heads, dim = 32, 8, 128
    contexts, sequence, context = _rows(device)
    cache = ScatteredCache(contexts, 64, kv_heads * dim, device, dtype)
    q = normal(2, heads, dim, seed=1, device=device, dtype=dtype)
    splits = gqa_decode.splits_for(2, kv_heads, 132, 131_072)
    partial = torch.full((2, splits, heads, dim), float("nan"), device=device)
    lse = torch.full((2, splits, heads), float("nan"), device=device)
    out = torch.full((2, heads * dim), float("nan"), device=device, dtype=dtype)
    gqa_decode.split_decode(
        q, cache.keys, cache.values, cache.page_table, sequence, context, SCALE, kv_heads, partial, lse
    )
    gqa_decode.combine(partial, lse, out)
    for row in range(2):
        k, v = (rows[row].view(-1, kv_heads, dim) for rows in (cache.key_rows, cache.value_rows))
        check_close(out[row].view(heads, dim), attend(q[row : row + 1], k, v, SCALE)[0][0])


def test_latent_decode(device: torch.device, dtype: torch.dtype) -> None:
    from pellucid.kernels.triton import mla_decode, mla_tiles

    heads, rank, rope, v_dim = 16, 512, 64, 128
    contexts, sequence, context = _rows(device)
    cache = ScatteredCache(contexts, 64, rank + rope, device, dtype)
    q = normal(2, heads, rank + rope, seed=2, device=device, dtype=dtype)
    value_up = normal(heads, v_dim, rank, seed=3, device=device, dtype=dtype)
    tile = mla_tiles.decode_tile(2, heads, 64, rank + rope, H200)
    splits = mla_tiles.splits_for(2, heads, tile, rank + rope, H200, 131_072)
    partial = torch.full((2, splits, heads, rank), float("nan"), device=device)
    lse = torch.full((2, splits, heads), float("nan"), device=device)
    out = torch.full((2, heads * v_dim), float("nan"), device=device, dtype=dtype)
    mla_decode.split_decode(q, cache.keys, cache.page_table, sequence, context, SCALE, rank, partial, lse)
    mla_decode.combine_project(partial, lse, value_up, out)
    for row in range(2):
        keys = cache.key_rows[row][:, None]
        latent = attend(q[row : row + 1], keys, keys[..., :rank], SCALE)[0][0]
        check_close(out[row].view(heads, v_dim), torch.einsum("hr,hvr->hv", latent, value_up.double().cpu()))


def test_a_chunk_behind_a_cached_prefix(device: torch.device, dtype: torch.dtype) -> None:
    """The last 100 tokens of a prompt whose other pages are cached."""
    from pellucid.kernels.device import device_limits
    from pellucid.kernels.triton import prefill
    from pellucid.kernels.triton.prefill_tiles import prefill_tile, query_tiles

    heads, kv_heads, dim, chunk = 8, 2, 128, 100
    cache = ScatteredCache([CONTEXT], 64, kv_heads * dim, device, dtype)
    spans = ragged_metadata([chunk], [CONTEXT], cache.page_table).spans
    q = normal(chunk, heads, dim, seed=4, device=device, dtype=dtype)
    out = torch.full((chunk, heads, dim), float("nan"), device=device, dtype=dtype)
    tile = prefill_tile(dim, dim, device_limits(device), chunk)
    tiles = query_tiles(spans, tile.block_m, device)
    prefill.paged_prefill(q, cache.keys, cache.values, cache.page_table, tiles, SCALE, kv_heads, out, tile=tile)
    k, v = (rows[0].view(-1, kv_heads, dim) for rows in (cache.key_rows, cache.value_rows))
    check_close(out, attend(q, k, v, SCALE)[0])

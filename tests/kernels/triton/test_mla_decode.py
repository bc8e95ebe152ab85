"""The launches of MLA decode against fp64: absorb, rope and cache write; split attention; merge and projection."""

from __future__ import annotations

import pytest
import torch

from pellucid.kernels.device import DeviceLimits
from pellucid.kernels.triton import mla_tiles
from tests.kernels.triton.attention_cases import ScatteredCache, attend, check_close, normal, poisoned, rope_table


@pytest.fixture
def ops():
    from pellucid.kernels.triton import mla_decode

    return mla_decode


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [.., dim], fp64."""
    cos, sin = cos_sin.double().cpu().chunk(2)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("rows", "heads", "nope", "rope", "rank", "interleaved", "block"),
    [
        (1, 2, 32, 16, 64, True, None),
        (1, 3, 24, 8, 48, False, 32),
        (3, 2, 24, 12, 40, True, 16),
        (5, 1, 32, 16, 32, False, None),
        (18, 2, 16, 16, 32, True, 16),
    ],
)
def test_queries_are_absorbed_and_rotated_and_the_latent_row_is_normed_rotated_and_cached(
    ops, device, dtype, rows, heads, nope, rope, rank, interleaved, block
):
    """Rows of two tensors that lie in wider ones; a row with context 0 writes nothing, and all other slots stay."""
    page = 16
    contexts = [0 if row == 2 else (11 * row + 5) % 40 for row in range(rows)]
    cache = ScatteredCache([max(context, 1) for context in contexts], page, rank + rope, device, dtype)
    latent = poisoned(cache.keys)
    wide = normal(rows, heads * (nope + rope) + rank + rope + 8, seed=1, device=device, dtype=dtype)
    q, kv = wide[:, : heads * (nope + rope)], wide[:, heads * (nope + rope) : -8]
    absorb = normal(heads, rank, nope, seed=2, device=device, dtype=dtype)
    kv_norm = normal(rank, seed=3, device=device, dtype=dtype)
    table = rope_table(64, rope, device)
    out = normal(rows + 1, heads, rank + rope, seed=4, device=device, dtype=dtype)
    q_latent, after = poisoned(out)[:rows], out[rows:].clone()
    tile = block and mla_tiles.absorb_tile(rows, heads)._replace(block_c=block)

    ops.absorb_rope_write(
        q, kv, kv_norm, 1e-5, absorb, table, interleaved, latent, cache.page_table,
        _int32(list(range(rows)), device), _int32(contexts, device), q_latent, tile=tile,
    )  # fmt: skip

    heads_of = q.double().cpu().view(rows, heads, nope + rope)
    positions = [max(context - 1, 0) for context in contexts]
    wanted = torch.empty(rows, heads, rank + rope, dtype=torch.float64)
    wanted[..., :rank] = torch.einsum("rhn,hcn->rhc", heads_of[..., :nope], absorb.double().cpu())
    wanted_rows, found_rows = [], []
    for row, position in enumerate(positions):
        wanted[row, :, rank:] = _rotated(heads_of[row, :, nope:], table[position], interleaved)
        if contexts[row]:
            x = kv[row].double().cpu()
            normed = x[:rank] / (x[:rank].pow(2).mean() + 1e-5).sqrt() * kv_norm.double().cpu()
            wanted_rows.append(torch.cat([normed, _rotated(x[rank:], table[position], interleaved)]))
            slot = latent[cache.page_table[row, position // page], position % page]
            found_rows.append(slot.clone())
            slot.fill_(float("nan"))
    check_close(q_latent[..., :rank], wanted[..., :rank])
    check_close(q_latent[..., rank:], wanted[..., rank:])
    check_close(torch.stack(found_rows), torch.stack(wanted_rows))
    assert latent.isnan().all()
    assert torch.equal(out[rows:], after)


def _decode(ops, q, cache, contexts, splits, scale, rank, tile):
    """Merged in fp64 from what one call of `split_decode` wrote: output, log of the sums, and the launch's tensors."""
    rows, heads, _ = q.shape
    partial = torch.full((rows, splits, heads, rank), float("nan"), device=q.device)
    lse = torch.full((rows, splits, heads), float("nan"), device=q.device)
    sequence, context = (_int32([pair[i] for pair in contexts], q.device) for i in range(2))
    ops.split_decode(q, cache.keys, cache.page_table, sequence, context, scale, rank, partial, lse, tile=tile)
    return partial, lse


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "page", "splits", "tile"),
    [
        (16, 32, 16, 64, 3, None),
        (5, 40, 8, 16, 2, None),
        (18, 32, 16, 32, 1, (16, 16, 32, 4, 2)),
        (33, 16, 16, 64, 4, (64, 32, 32, 4, 2)),
    ],
)
def test_merged_splits_are_attention_over_the_pages(ops, device, dtype, heads, rank, rope, page, splits, tile):
    """Contexts shorter than a split, at its edges and beyond; rows of one sequence that see one key more each."""
    lengths = [1, 2 * page + 7, 130, 64]
    cache = ScatteredCache(lengths, page, rank + rope, device, dtype)
    rows = [(0, 1), (1, lengths[1]), (2, 129), (2, 130), (0, 0), (3, 64)]
    q = normal(len(rows), heads, rank + rope, seed=5, device=device, dtype=dtype)

    partial, lse = _decode(ops, q, cache, rows, splits, 0.2, rank, tile and mla_tiles.DecodeTile(*tile))

    assert (lse[4] == float("-inf")).all()
    for row, (sequence, context) in enumerate(rows):
        keys = cache.key_rows[sequence][:context, None]
        wanted, wanted_lse = attend(q[row : row + 1], keys, keys[..., :rank], 0.2)
        used = (lse[row, :, 0] > float("-inf")).sum()
        assert (lse[row, :used] > float("-inf")).all()
        assert (lse[row, used:] == float("-inf")).all()
        assert partial[row, used:].isnan().all()
        if context:
            shares = lse[row, :used].double().cpu()
            merged = (shares.softmax(0)[..., None] * partial[row, :used].double().cpu()).sum(0)
            assert (merged - wanted[0]).norm() <= 3e-3 * wanted.norm() * (1 if dtype == torch.float16 else 3)
            torch.testing.assert_close(shares.logsumexp(0), wanted_lse[0], rtol=0, atol=1e-3)


def test_a_page_that_no_tile_fills_is_refused(ops, device, dtype):
    from pellucid.core import PlanError

    cache = ScatteredCache([9], 8, 48, device, dtype)
    q = normal(1, 2, 48, seed=6, device=device, dtype=dtype)
    with pytest.raises(PlanError, match="page"):
        _decode(ops, q, cache, [(0, 9)], 1, 1.0, 32, None)


@pytest.mark.parametrize(
    ("rows", "heads", "v", "rank", "splits", "tile"),
    [
        (1, 2, 32, 64, 5, None),
        (1, 3, 20, 40, 18, (1, 4, 16)),
        (3, 2, 24, 48, 6, (2, 4, 16)),
        (5, 2, 32, 32, 3, (16, 1, 32)),
        (19, 1, 48, 32, 1, (8, 2, 64)),
        (6, 2, 16, 16, 2, (4, 4, 16)),
    ],
)
def test_splits_are_merged_and_projected_by_head(ops, device, dtype, rows, heads, v, rank, splits, tile):
    """Splits without keys hold NaN and count for nothing; a row without keys gives zeros; columns beside stay."""
    generator = torch.Generator().manual_seed(rows)
    used = torch.randint(1, splits + 1, (rows,), generator=generator)
    used[rows // 2] = 0 if rows > 1 else splits
    absent = (torch.arange(splits) >= used[:, None])[..., None].expand(rows, splits, heads).to(device)
    lse = (4 * normal(rows, splits, heads, seed=7, device=device, dtype=torch.float32)).masked_fill(
        absent, float("-inf")
    )
    partial = normal(rows, splits, heads, rank, seed=8, device=device, dtype=torch.float32)
    partial = partial.masked_fill(absent[..., None], float("nan"))
    value_up = normal(heads, v, rank, seed=9, device=device, dtype=dtype) / rank**0.5
    wide = torch.full((rows, heads * v + 4), float("nan"), dtype=dtype, device=device)

    ops.combine_project(partial, lse, value_up, wide[:, :-4], tile=tile and mla_tiles.ProjectTile(*tile))

    shares = lse.double().cpu().softmax(1).nan_to_num(0.0)  # all -inf: 0/0
    merged = (shares[..., None] * partial.double().cpu().nan_to_num(0.0)).sum(1)
    wanted = torch.einsum("rhc,hvc->rhv", merged, value_up.double().cpu()).flatten(1)
    check_close(wide[:, :-4], wanted)
    assert wide[:, -4:].isnan().all()
    if rows > 1:
        assert (wide[rows // 2, :-4] == 0).all()


def test_the_three_launches_are_one_attention(ops, device, dtype):
    """Default tiles, the row just written among the keys: what plain fp64 makes of keys and values per head."""
    heads, nope, rope, rank, v, page, rows = 3, 16, 16, 32, 16, 16, 2
    lengths = [21, 100]
    cache = ScatteredCache(lengths, page, rank + rope, device, dtype)
    table, scale = rope_table(128, rope, device), 0.25
    q = normal(rows, heads * (nope + rope), seed=1, device=device, dtype=dtype)
    kv = normal(rows, rank + rope, seed=2, device=device, dtype=dtype)
    key_up = normal(heads, nope, rank, seed=3, device=device, dtype=dtype) / rank**0.5
    value_up = normal(heads, v, rank, seed=4, device=device, dtype=dtype) / rank**0.5
    where = (cache.page_table, _int32([0, 1], device), _int32(lengths, device))
    limits = DeviceLimits(90, 132, 232448)
    tile = mla_tiles.decode_tile(rows, heads, page, rank + rope, limits)
    splits = mla_tiles.splits_for(rows, heads, tile, rank + rope, limits, 256)
    q_latent = torch.full((rows, heads, rank + rope), float("nan"), dtype=dtype, device=device)
    partial = torch.full((rows, splits, heads, rank), float("nan"), device=device)
    lse = torch.full((rows, splits, heads), float("nan"), device=device)
    out = torch.full((rows, heads * v), float("nan"), dtype=dtype, device=device)
    ones = torch.ones(rank, dtype=dtype, device=device)

    absorb = key_up.transpose(1, 2).contiguous()
    ops.absorb_rope_write(q, kv, ones, 1e-6, absorb, table, True, cache.keys, *where, q_latent)
    ops.split_decode(q_latent, cache.keys, *where, scale, rank, partial, lse)
    ops.combine_project(partial, lse, value_up, out)

    for row, length in enumerate(lengths):
        x = kv[row].double().cpu()
        normed = x[:rank] / (x[:rank].pow(2).mean() + 1e-6).sqrt()
        new = torch.cat([normed, _rotated(x[rank:], table[length - 1], True)])
        latent = torch.cat([cache.key_rows[row][:-1].double().cpu(), new[None]])
        k_nope = torch.einsum("kc,hnc->khn", latent[:, :rank], key_up.double().cpu())
        keys = torch.cat([k_nope, latent[:, None, rank:].expand(-1, heads, -1)], -1)
        values = torch.einsum("kc,hvc->khv", latent[:, :rank], value_up.double().cpu())
        x = q[row].double().cpu().view(heads, nope + rope)
        query = torch.cat([x[:, :nope], _rotated(x[:, nope:], table[length - 1], True)], -1)
        check_close(out[row], attend(query[None], keys, values, scale)[0].flatten())


KILOBYTES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""Shared memory that a block may ask for (CUDA C++ Programming Guide, table of technical specifications)."""

DEVICES = [DeviceLimits(sm, 132, 1024 * size) for sm, size in KILOBYTES.items()]


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 128])
@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: str(limits.sm))
def test_splits_fill_the_multiprocessors_once_and_never_hold_too_few_keys(ops, heads, limits):
    """A program of 16 heads and few rows has tiles of keys that leave no room for a second one."""
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512):
        tile = mla_tiles.decode_tile(rows, heads, 64, 576, limits)
        a_multiprocessor = (
            1 if tile.block_h == 64 else min(2, max(1, limits.shared_memory // mla_tiles.tile_bytes(tile, 576)))
        )
        for max_context in (1, 64, 65, 4096, 131072):
            splits = mla_tiles.splits_for(rows, heads, tile, 576, limits, max_context)
            assert 1 <= splits <= max(1, -(-max_context // mla_tiles.SPLIT_KEYS))
            programs = rows * splits * -(-heads // tile.block_h)
            assert splits == 1 or programs <= a_multiprocessor * limits.sm_count
            # And no fewer than half of them, where there are keys enough.
            if max_context == 131072 and rows * -(-heads // tile.block_h) <= limits.sm_count // 2:
                assert 2 * programs > a_multiprocessor * limits.sm_count


@pytest.mark.parametrize("page", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: str(limits.sm))
def test_tiles_of_keys_divide_pages_and_splits_and_fit_the_device(ops, page, limits):
    for heads in (1, 16, 24, 64, 128):
        for rows in (1, 2, 128):
            tile = mla_tiles.decode_tile(rows, heads, page, 576, limits)
            assert tile.block_h == 64 or mla_tiles.tile_bytes(tile, 576) <= limits.shared_memory
            assert page % tile.block_n == 0
            assert tile.split_keys % tile.block_n == 0
            assert tile.block_h >= 16

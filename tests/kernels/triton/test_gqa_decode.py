"""Split decode of grouped-query rows and its merging, against fp64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.attention_cases import (
    ScatteredCache,
    attend,
    check_close,
    normal,
)


@pytest.fixture
def ops():
    from pellucid.kernels.triton import gqa_decode

    return gqa_decode


CASES = [
    # heads, kv_heads, dim, page, splits, contexts
    (8, 2, 32, 16, 3, (37, 0, 5, 70)),
    (4, 4, 16, 64, 1, (65, 1, 0)),
    (6, 1, 24, 16, 2, (20, 100)),
    (32, 1, 16, 5, 4, (33,)),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "splits", "contexts"), CASES)
def test_split_decode_and_combine_give_attention(ops, device, dtype, heads, kv_heads, dim, page, splits, contexts):
    """Nothing outside a context counts (it is NaN), nor what `partial` held; rows of q and out may be apart."""
    rows = len(contexts)
    cache = ScatteredCache(contexts, page, kv_heads * dim, device, dtype)
    q = normal(rows, heads + 3, dim, seed=1, device=device, dtype=dtype)[:, :heads]
    order = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
    context = torch.tensor(contexts[::-1], dtype=torch.int32, device=device)
    partial = torch.full((rows, splits, heads, dim), float("nan"), device=device)
    lse = torch.full((rows, splits, heads), float("nan"), device=device)
    out = torch.full((rows, heads * dim + 8), float("nan"), device=device, dtype=dtype)

    tile = ops.DecodeTile(block_n=32, num_warps=4, num_stages=2)
    arguments = (q, cache.keys, cache.values, cache.page_table, order, context, 0.3, kv_heads)
    ops.split_decode(*arguments, partial, lse, tile=tile)
    ops.combine(partial, lse, out[:, : heads * dim])

    for row, sequence in enumerate(order.tolist()):
        k, v = (rows[sequence].view(-1, kv_heads, dim) for rows in (cache.key_rows, cache.value_rows))
        wanted, logs = attend(q[row : row + 1], k, v, 0.3)
        check_close(out[row, : heads * dim].view(heads, dim), wanted[0])
        torch.testing.assert_close(lse[row].logsumexp(0).double().cpu(), logs[0], rtol=0, atol=5e-3)
    assert out[:, heads * dim :].isnan().all()

    if splits == 1:
        direct = torch.full((rows, 1, heads, dim), float("nan"), device=device, dtype=dtype)
        ops.split_decode(*arguments, direct, lse, tile=tile)
        assert torch.equal(direct.flatten(1), out[:, : heads * dim])


def test_scores_far_apart_do_not_overflow(ops, device, dtype):
    """Scores of thousands: the softmax is one-hot, in the split that holds the best key and after merging."""
    cache = ScatteredCache((70,), 16, 16, device, dtype)
    q = 100 * normal(1, 2, 16, seed=1, device=device, dtype=dtype)
    partial, lse = torch.empty(1, 3, 2, 16, device=device), torch.empty(1, 3, 2, device=device)
    zero, context = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 70))
    out = torch.empty(1, 32, device=device, dtype=dtype)
    ops.split_decode(q, cache.keys, cache.values, cache.page_table, zero, context, 10.0, 1, partial, lse)
    ops.combine(partial, lse, out)
    best = (q[0].double().cpu() @ cache.key_rows[0].double().cpu().T).argmax(-1)
    check_close(out.view(2, 16), cache.value_rows[0].double().cpu()[best])


def test_splits_fill_the_device_and_are_not_smaller_than_a_block(ops):
    assert ops.splits_for(rows=128, kv_heads=8, sm_count=132, max_context=4096) == 1
    assert ops.splits_for(rows=1, kv_heads=8, sm_count=132, max_context=100) == 2
    assert ops.splits_for(rows=1, kv_heads=8, sm_count=132, max_context=4096) == 16
    for rows in (1, 4, 32):
        splits = ops.splits_for(rows, 4, 132, 1 << 17)
        assert rows * 4 * splits >= 2 * 132 or splits == 64
        assert rows * 4 * ops.splits_for(rows, 4, 132, 1 << 17, per_sm=2) <= 2 * 132

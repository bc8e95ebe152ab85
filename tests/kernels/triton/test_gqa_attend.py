"""A decode step's grouped-query attention in one launch, against fp64: outputs, cache rows, what is left alone."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.attention_cases import check_close
from tests.kernels.triton.gqa_rows import CASES, Step, rotated


@pytest.fixture
def ops():
    from pellucid.kernels.triton import gqa_attend

    return gqa_attend


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "contexts", "norm", "interleaved", "splits", "block_n"), CASES
)
def test_a_step_is_norm_rope_cache_and_attention(
    ops, device, dtype, heads, kv_heads, dim, page, contexts, norm, interleaved, splits, block_n
):
    """Nothing outside a context counts (it is NaN), the newest slot included; only that slot is written."""
    step = Step(heads, kv_heads, dim, page, contexts, norm, interleaved, device, dtype)
    wide, before = step.wide.clone(), [cache.clone() for cache in (step.cache.keys, step.cache.values)]
    out = step.run(ops, splits, block_n)

    for row, context in enumerate(contexts):
        if context == 0:
            assert torch.equal(out[row], torch.zeros_like(out[row]))
            continue
        wanted, new_k, new_v = step.wanted(row)
        check_close(out[row].view(heads, dim), wanted)
        page_id, at = step.slot(row)
        check_close(step.cache.keys[page_id, at].view(kv_heads, dim), new_k)
        assert torch.equal(step.cache.values[page_id, at].double().cpu().view(kv_heads, dim), new_v)
        for cache, old in zip((step.cache.keys, step.cache.values), before, strict=True):
            old[page_id, at] = cache[page_id, at]
    for cache, old in zip((step.cache.keys, step.cache.values), before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))
    assert torch.equal(step.wide, wide)
    assert not step.counter.any()


def test_a_second_step_gives_the_same_bits(ops, device, dtype):
    """Whatever program comes last, parts are merged in their order; and the counters are ready again."""
    step = Step(4, 1, 64, 16, (90, 47), True, False, device, dtype)
    first = step.run(ops, 4, 16)
    assert torch.equal(step.run(ops, 4, 16), first)
    assert not step.counter.any()


def test_splits_do_not_change_the_result(ops, device, dtype):
    step = Step(4, 2, 32, 16, (100,), False, False, device, dtype)
    whole = step.run(ops, 1, 16)
    for splits in (2, 7):
        check_close(step.run(ops, splits, 16), whole.double().cpu())


def test_scores_far_apart_do_not_overflow(ops, device, dtype):
    """Scores of thousands: the softmax is one-hot, whichever part the best key is in."""
    step = Step(2, 1, 16, 16, (70,), False, False, device, dtype)
    out = step.run(ops, 3, 16, scale=1000.0).view(2, 16)
    q, k = step.qkv[0].double().cpu().view(-1, 16)[:2], step.cache.key_rows[0].double().cpu().clone()
    k[-1] = step.wanted(0)[1]
    values = torch.cat([step.cache.value_rows[0].double().cpu()[:-1], step.wanted(0)[2]])
    check_close(out, values[(rotated(q, step.table[69].cpu(), False) @ k.T).argmax(-1)])

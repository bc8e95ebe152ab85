"""What stands before another backend's attention in a decode step, against fp64: queries, cache rows, what is left."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.attention_cases import check_close
from tests.kernels.triton.gqa_rows import CASES, EPS, Step, rotated


@pytest.fixture
def ops():
    from pellucid.kernels.triton import gqa_write

    return gqa_write


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "contexts", "norm", "interleaved"),
                         [case[:7] for case in CASES])  # fmt: skip
def test_queries_are_normed_and_turned_and_new_keys_join_the_cache(
    ops, device, dtype, heads, kv_heads, dim, page, contexts, norm, interleaved
):
    step = Step(heads, kv_heads, dim, page, contexts, norm, interleaved, device, dtype)
    wide, before = step.wide.clone(), [cache.clone() for cache in (step.cache.keys, step.cache.values)]
    query = torch.full((len(contexts), heads, dim), float("nan"), device=device, dtype=dtype)
    ops.norm_rope_write(
        step.qkv, *step.norms, EPS, step.table, interleaved, step.cache.keys, step.cache.values,
        ops.ByContext(step.cache.page_table, step.sequence, step.context), query,
    )  # fmt: skip

    for row, context in enumerate(contexts):
        if context:
            q = step.qkv[row, : heads * dim].double().cpu().view(heads, dim)
            if norm:
                weight = step.norms[0].double().cpu()
                q = q * (q.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight
            check_close(query[row], rotated(q, step.table[context - 1].cpu(), interleaved))
            _, new_k, new_v = step.wanted(row)
            at = step.slot(row)
            check_close(step.cache.keys[at].view(kv_heads, dim), new_k)
            check_close(step.cache.values[at].view(kv_heads, dim), new_v)
            for cache, old in zip((step.cache.keys, step.cache.values), before, strict=True):
                old[at] = cache[at]
    for cache, old in zip((step.cache.keys, step.cache.values), before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))
    assert torch.equal(step.wide, wide)

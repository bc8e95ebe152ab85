"""Attention over scattered pages, in C++ and in torch, against fp64; and what a padded row must not do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pellucid.attention.base import AttentionBackend, AttentionMetadata, Span
from pellucid.attention.cpu_native import CpuNativeAttention
from pellucid.attention.reference import ReferenceAttention
from pellucid.kernels.cpu_library import CpuLibrary

Array = npt.NDArray[np.float64]

POISON = 1000.0
NAMES = ("reference", "cpu_native", "cpu_native, three threads")


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, library: CpuLibrary, threaded: CpuLibrary) -> AttentionBackend:
    if request.param == "reference":
        return ReferenceAttention()
    return CpuNativeAttention(library if request.param == "cpu_native" else threaded)


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


class _Pages:
    """Contexts of several sequences in one poisoned cache, their pages shuffled; page 0 belongs to nobody."""

    def __init__(self, contexts: Sequence[int], page: int, width: int, seed: int = 0) -> None:
        counts = [-(-context // page) for context in contexts]
        order = np.random.default_rng(seed).permutation(sum(counts)) + 1
        self.table = torch.zeros(len(contexts), max(counts, default=0) + 1, dtype=torch.int32)
        self.cache = torch.full((sum(counts) + 1, page, width), POISON)
        self.rows = []
        for index, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            own, order = order[:count], order[count:]
            self.table[index, :count] = torch.from_numpy(own).int()
            rows = _normal(context, width, seed=100 + index)
            for position in range(context):
                self.cache[own[position // page], position % page] = rows[position]
            self.rows.append(rows.double().numpy())


def _metadata(table: torch.Tensor, queries: Sequence[int], contexts: Sequence[int]) -> AttentionMetadata:
    """`queries[i]` rows of sequence i, the last of which sees `contexts[i]` keys (0: padded rows)."""
    stops = np.cumsum(queries)
    spans = [
        Span(int(stop) - count, int(stop), context)
        for stop, count, context in zip(stops, queries, contexts, strict=True)
    ]
    context = [
        span.context and span.context - span.stop + 1 + row for span in spans for row in range(span.start, span.stop)
    ]
    return AttentionMetadata(
        page_table=table,
        sequence=torch.tensor(np.repeat(np.arange(len(queries)), queries), dtype=torch.int32),
        context=torch.tensor(context, dtype=torch.int32),
        spans=tuple(spans),
    )


def _softmax_sum(scores: Array, values: Array) -> Array:
    powers = np.exp(scores - scores.max())
    mean: Array = powers @ values / powers.sum()
    return mean


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 18), (5, 1, 33)])
def test_gqa_over_pages(heads: int, kv_heads: int, dim: int, page: int, backend: AttentionBackend) -> None:
    queries, contexts = (1, 7, 1, 2), (70, 7, 1, 40)
    keys, values = (_Pages(contexts, page, kv_heads * dim, seed) for seed in (0, 0))
    values.cache = torch.where(values.cache == POISON, POISON, values.cache * 0.5 + 1)
    q = _normal(sum(queries), heads, dim, seed=1)
    metadata = _metadata(keys.table, queries, contexts)

    found = backend.gqa(q, keys.cache, values.cache, metadata, num_kv_heads=kv_heads, scale=0.3)

    wanted = np.zeros(found.shape)
    for row, (sequence, context) in enumerate(zip(metadata.sequence.tolist(), metadata.context.tolist(), strict=True)):
        k = keys.rows[sequence][:context].reshape(context, kv_heads, dim)
        for head in range(heads):
            mine = k[:, head // (heads // kv_heads)]
            wanted[row, head] = _softmax_sum(mine @ q[row, head].double().numpy() * 0.3, mine * 0.5 + 1)
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(8, 64, 16), (3, 50, 6), (1, 256, 32)])
def test_absorbed_mla_over_pages(heads: int, rank: int, rope: int, page: int, backend: AttentionBackend) -> None:
    queries, contexts = (3, 1, 1), (66, 17, 1)
    latent = _Pages(contexts, page, rank + rope)
    q = _normal(sum(queries), heads, rank + rope, seed=1)
    metadata = _metadata(latent.table, queries, contexts)

    found = backend.mla(q, latent.cache, metadata, kv_lora_rank=rank, scale=0.2)

    wanted = np.zeros(found.shape)
    for row, (sequence, context) in enumerate(zip(metadata.sequence.tolist(), metadata.context.tolist(), strict=True)):
        rows = latent.rows[sequence][:context]
        for head in range(heads):
            wanted[row, head] = _softmax_sum(rows @ q[row, head].double().numpy() * 0.2, rows[:, :rank])
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=0, atol=3e-6)


def test_scores_far_apart_do_not_overflow(backend: AttentionBackend) -> None:
    """Scores of plus and minus thousands: the weights are one-hot, not NaN."""
    latent = _Pages((40,), 16, 24)
    q = 1000 * _normal(1, 2, 24, seed=1)
    found = backend.mla(q, latent.cache, _metadata(latent.table, (1,), (40,)), kv_lora_rank=20, scale=1.0)
    best = (q[0].double().numpy() @ latent.rows[0].T).argmax(-1)
    np.testing.assert_allclose(found[0].double().numpy(), latent.rows[0][best, :20], atol=1e-5)


@pytest.mark.parametrize("bucket", [4, 8])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_padded_row_is_zeros_and_leaves_the_others_alone(kind: str, bucket: int, backend: AttentionBackend) -> None:
    """Also what a dynamic per-tensor scale reads, the largest magnitude of the batch, stays as it was."""
    contexts = (5, 1, 9)
    heads, rank, rope = 8, 512, 64
    width = rank + rope if kind == "mla" else heads * 16
    dtype = torch.bfloat16 if isinstance(backend, ReferenceAttention) else torch.float32
    pages = _Pages((*contexts, *(0,) * (bucket - 3)), 64, width)
    pages.cache = pages.cache.to(dtype)
    before = pages.cache.clone()
    q = _normal(bucket, heads, rank + rope if kind == "mla" else 16, seed=1).to(dtype)

    def run(rows: int) -> torch.Tensor:
        table = pages.table[:rows]
        metadata = _metadata(table, (1,) * rows, (*contexts, *(0,) * (rows - 3)))
        if kind == "mla":
            return backend.mla(q[:rows], pages.cache, metadata, kv_lora_rank=rank, scale=0.1)
        return backend.gqa(q[:rows], pages.cache, pages.cache, metadata, num_kv_heads=heads, scale=0.1)

    alone, padded = run(3), run(bucket)

    assert (padded[3:] == 0).all()
    assert padded.isfinite().all()
    assert torch.equal(padded[:3], alone)
    assert padded.abs().max() == alone.abs().max()
    assert torch.equal(pages.cache, before)


def test_a_padded_row_of_expanded_mla_is_zeros_and_leaves_the_others_alone() -> None:
    contexts, heads, rank, rope, nope, v = (5, 9), 4, 64, 16, 24, 20
    pages = _Pages((*contexts, 0), 64, rank + rope)
    pages.cache[0] = float("nan")
    key_up, value_up = _normal(heads, nope, rank, seed=2), _normal(heads, v, rank, seed=3)
    q = _normal(3, heads, nope + rope, seed=1)

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.einsum("kc,hnc->khn", rows, key_up), torch.einsum("kc,hvc->khv", rows, value_up)

    def run(rows: int) -> torch.Tensor:
        metadata = _metadata(pages.table[:rows], (1,) * rows, (*contexts, 0)[:rows])
        backend = ReferenceAttention(expands_latent=True)
        return backend.mla_expanded(q[:rows], pages.cache, metadata, kv_lora_rank=rank, scale=0.1, expand=expand)

    alone, padded = run(2), run(3)
    assert (padded[2] == 0).all()
    assert torch.equal(padded[:2], alone)


def test_a_query_has_the_same_bits_in_every_batch(library: CpuLibrary, threaded: CpuLibrary) -> None:
    """Alone or among others, and however its pages lie."""
    contexts = (150, 33, 64, 1)
    here, there = _Pages(contexts, 16, 40, seed=0), _Pages(contexts, 3, 40, seed=5)
    q = _normal(4, 3, 40, seed=1)
    together = CpuNativeAttention(library).mla(
        q, here.cache, _metadata(here.table, (1,) * 4, contexts), kv_lora_rank=32, scale=0.3
    )
    for row, context in enumerate(contexts):
        alone = CpuNativeAttention(threaded).mla(
            q[row : row + 1],
            there.cache,
            _metadata(there.table[row : row + 1], (1,), (context,)),
            kv_lora_rank=32,
            scale=0.3,
        )
        assert torch.equal(alone[0], together[row])

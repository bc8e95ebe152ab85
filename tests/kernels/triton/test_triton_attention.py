"""The Triton attention backends against the reference, on ragged metadata such as the engine makes."""

from __future__ import annotations

import random

import pytest
import torch

from pellucid.attention.base import AttentionMetadata
from pellucid.attention.reference import ReferenceAttention
from pellucid.attention.triton_gqa import TritonGQA
from pellucid.attention.triton_mla import TritonMLA, groups_of, key_starts
from tests.kernels.triton.attention_cases import ScatteredCache, check_close, normal, ragged_metadata

PAGE = 16


def _backend(kind: type, phase: str):
    from pellucid.kernels.device import DeviceLimits

    return kind(phase, DeviceLimits(sm=90, sm_count=16, shared_memory=232448))


def _case(seed: int) -> tuple[list[int], list[int]]:
    """Queries and contexts: prompts, chunks behind a cached prefix, single rows, drafts of 2 to 5, padded rows."""
    draw = random.Random(seed)
    queries = [draw.choice((1, 1, 2, 3, 4, 5, 20)) for _ in range(draw.randint(1, 3))]
    contexts = [count + draw.choice((0, 0, 1, 15, 16, 40)) for count in queries]
    return [*queries, 2], [*contexts, 0]


def _reference(x: torch.Tensor) -> torch.Tensor:
    """As the reference wants it: in fp32, NaN where nobody may look left out."""
    return x.float().nan_to_num(0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_gqa_is_what_the_reference_gives(phase, seed, device, dtype):
    queries, contexts = _case(seed)
    heads, kv_heads, dim = 4, 2, 16
    cache = ScatteredCache(contexts, PAGE, kv_heads * dim, device, dtype)
    metadata = ragged_metadata(queries, contexts, cache.page_table)
    q = normal(sum(queries), heads + 2 * kv_heads, dim, seed=seed, device=device, dtype=dtype)[:, :heads]
    how = {"num_kv_heads": kv_heads, "scale": 0.25}

    found = _backend(TritonGQA, phase).gqa(q, cache.keys, cache.values, metadata, **how)

    wanted = ReferenceAttention().gqa(q.float(), _reference(cache.keys), _reference(cache.values), metadata, **how)
    check_close(found, wanted.double().cpu())
    assert found.is_contiguous()
    assert (found[-2:] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_absorbed_mla_is_what_the_reference_gives(seed, device, dtype):
    queries, contexts = _case(seed)
    heads, rank, rope = 3, 32, 16
    cache = ScatteredCache(contexts, PAGE, rank + rope, device, dtype)
    metadata = ragged_metadata(queries, contexts, cache.page_table)
    q = normal(sum(queries), heads, rank + rope, seed=seed, device=device, dtype=dtype)
    how = {"kv_lora_rank": rank, "scale": 0.2}

    backend = _backend(TritonMLA, "decode")
    found = backend.mla(q, cache.keys, metadata, **how)

    assert not backend.expands_latent
    check_close(found, ReferenceAttention().mla(q.float(), _reference(cache.keys), metadata, **how).double().cpu())
    assert (found[-2:] == 0).all()


class _Expand:
    """K_nope and V from the latent; counts its calls."""

    def __init__(self, heads: int, rank: int, nope: int, v: int, device: torch.device, dtype: torch.dtype) -> None:
        self.key_up = normal(heads, nope, rank, seed=2, device=device, dtype=dtype) / rank**0.5
        self.value_up = normal(heads, v, rank, seed=3, device=device, dtype=dtype) / rank**0.5
        self.calls = 0

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        k, v = (torch.einsum("kc,hnc->khn", rows, up.to(rows.dtype)) for up in (self.key_up, self.value_up))
        return k, v


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_expanded", [1 << 29, 1])
def test_expanded_mla_is_what_the_reference_gives(max_expanded, seed, device, dtype, monkeypatch):
    """All sequences in one call of `expand`, or one after another where they are too long together."""
    monkeypatch.setattr("pellucid.attention.triton_mla.MAX_EXPANDED", max_expanded)
    queries, contexts = _case(seed)
    heads, rank, rope, nope = 2, 32, 16, 32
    cache = ScatteredCache(contexts, PAGE, rank + rope, device, dtype)
    metadata = ragged_metadata(queries, contexts, cache.page_table)
    q = normal(sum(queries), heads, nope + rope, seed=seed, device=device, dtype=dtype)
    expand, slow = (_Expand(heads, rank, nope, 24, device, dtype) for _ in range(2))
    how = {"kv_lora_rank": rank, "scale": 0.2}

    backend = _backend(TritonMLA, "prefill")
    found = backend.mla_expanded(q, cache.keys, metadata, **how, expand=expand)

    assert backend.expands_latent
    assert expand.calls == (1 if max_expanded > 1 else len(queries))
    wanted = ReferenceAttention().mla_expanded(q.float(), _reference(cache.keys), metadata, **how, expand=slow)
    check_close(found, wanted.double().cpu())
    assert (found[-2:] == 0).all()


def test_padded_rows_alone_are_zeros(device, dtype):
    """As when a graph is captured: no key at all."""
    cache = ScatteredCache((0, 0), PAGE, 48, device, dtype)
    metadata = ragged_metadata((1, 2), (0, 0), cache.page_table)
    q = normal(3, 2, 48, seed=1, device=device, dtype=dtype)
    expand = _Expand(2, 32, 32, 24, device, dtype)
    for phase in ("prefill", "decode"):
        found = _backend(TritonGQA, phase).gqa(q, cache.keys, cache.values, metadata, num_kv_heads=1, scale=1.0)
        assert found.shape == q.shape
        assert (found == 0).all()
    found = _backend(TritonMLA, "prefill").mla_expanded(
        q, cache.keys, metadata, kv_lora_rank=32, scale=1.0, expand=expand
    )
    assert found.shape == (3, 2, 24)
    assert (found == 0).all()


def test_a_layer_does_not_see_what_was_derived_for_another_step(device, dtype):
    """The same backend over two steps whose metadata differ only in values."""
    backend, cache = _backend(TritonGQA, "prefill"), ScatteredCache((20, 20), PAGE, 16, device, dtype)
    q = normal(6, 1, 16, seed=1, device=device, dtype=dtype)
    steps: list[AttentionMetadata] = [
        ragged_metadata(queries, (20, 20), cache.page_table) for queries in ((5, 1), (2, 4), (5, 1))
    ]
    for metadata in steps:
        found = backend.gqa(q, cache.keys, cache.values, metadata, num_kv_heads=1, scale=1.0)
        keys, values = _reference(cache.keys), _reference(cache.values)
        wanted = ReferenceAttention().gqa(q.float(), keys, values, metadata, num_kv_heads=1, scale=1.0)
        check_close(found, wanted.double().cpu())


def test_groups_hold_every_span_and_no_more_keys_than_allowed():
    draw = random.Random(0)
    for _ in range(50):
        contexts = [draw.randint(0, 30) for _ in range(draw.randint(1, 12))]
        spans = ragged_metadata([1] * len(contexts), contexts, torch.zeros(1, 1, dtype=torch.int32)).spans
        groups = list(groups_of(spans, 40))
        assert [span for _, group in groups for span in group] == list(spans)
        assert all(spans[first] == group[0] for first, group in groups)
        assert all(sum(span.context for span in group) <= 40 for _, group in groups)
        for _, group in groups:
            starts = key_starts(group)
            assert all(b - a == span.context for a, b, span in zip(starts, starts[1:], group, strict=False))

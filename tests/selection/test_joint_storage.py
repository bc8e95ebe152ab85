"""Dtype, KV layout and page size are one choice for prefill and decode together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.core import PlanError
from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Measurement
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from tests.selection.models import V2_LITE, machine


def built(**pages):
    """The declared backends with some attention backends built in, needing no package, at these page sizes."""
    return [
        replace(b, built_in=True, packages=(), needs_compiler=None, page_sizes=frozenset(pages[b.name]))
        if b.op == "attention" and b.name in pages
        else b
        for b in discover()
    ]


def solved(backends, evidence=None, **flags):
    return resolve(EngineArgs("model", **flags), V2_LITE, machine("h200"), evidence, backends=backends)


def test_the_page_size_is_the_one_both_phases_take():
    backends = built(triton_mla={16, 128}, flashmla={64, 128})
    decode = ("flashmla", {"attention_backend": "flashmla"})
    found = solved(backends, **decode[1])
    assert found.backend("attention.decode", 1) == "flashmla"
    assert found.backend("attention.prefill", 1) == "triton_mla"
    assert found.page_size == 128
    assert found.decision("kv.page_size").how == "forced by traits"


def test_the_default_page_is_kept_where_everyone_takes_it():
    found = solved(built(triton_mla={32, 64, 128}))
    assert (found.page_size, found.decision("kv.page_size").how) == (64, "default")


def test_an_asked_page_size_moves_the_backends_not_the_page():
    backends = built(triton_mla={64}, flashinfer_mla={16, 64})
    assert solved(backends).backend("attention.decode", 1) == "triton_mla"
    found = solved(backends, block_size=16)
    assert found.page_size == 16
    assert found.backend("attention.decode", 1) == "flashinfer_mla"


def test_an_asked_backend_and_an_asked_page_that_exclude_each_other_are_refused():
    with pytest.raises(PlanError, match="--block-size 64"):
        solved(built(flashmla={64}), attention_backend="flashmla", block_size=16)


def test_a_backend_asked_for_decode_alone_leaves_prefill_to_choose_and_says_so():
    found = solved(built(triton_mla={64}, flashmla={64}), attention_backend="flashmla")
    prefill = found.decision("attention.prefill", 1)
    assert (prefill.value, prefill.how) == ("triton_mla", "default")
    assert any("flashmla, asked for, does not serve prefill" in line for line in prefill.because)


def test_the_storage_follows_what_was_measured_to_be_fastest():
    backends = built(triton_mla={64}, flashinfer_mla={16})
    flags = {"max_num_seqs": 8, "max_num_batched_tokens": 8}
    assert solved(backends, **flags).page_size == 64
    evidence = {
        (op, bucket, name): Measurement(seconds, 1e-7)
        for op in ("attention.prefill", "attention.decode")
        for bucket in (1, 2, 4, 8)
        for name, seconds in (("triton_mla", 9e-5), ("flashinfer_mla", 1e-5))
    }
    found = solved(backends, evidence, **flags)
    assert found.page_size == 16
    assert found.backends("attention.decode") == {"flashinfer_mla"}

"""Discovery, the fixed order, and the one bucket function."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.selection.bucket import bucket, buckets_up_to
from pellucid.selection.registry import candidates, discover, fixed_order


def test_reading_every_declaration_imports_no_tensor_library():
    code = (
        "import sys, json; from pellucid.selection.registry import discover; discover();"
        "print(json.dumps([m for m in ('torch', 'numpy', 'triton') if m in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_every_op_has_a_reference_that_is_built_in_and_last():
    for op in ("attention", "moe", "linear"):
        order = candidates(discover(), op)
        assert (order[-1].name, order[-1].built_in, order[-1].devices) == ("reference", True, {"cpu", "cuda"})


def test_the_fixed_order_is_total_and_does_not_depend_on_how_it_was_found():
    found = discover()
    assert fixed_order(reversed(found)) == found
    assert len({(b.op, b.priority, b.name) for b in found}) == len(found)


def test_own_kernels_come_before_those_of_other_projects():
    order = [b.name for b in candidates(discover(), "attention")]
    assert order.index("triton_mla") < min(order.index(n) for n in ("flashmla", "trtllm_mla", "flashinfer_mla"))


def test_a_name_declared_twice_is_refused():
    with pytest.raises(ValueError, match="a second attention backend is called"):
        discover(("pellucid.attention", "pellucid.attention"))


def test_the_first_buckets():
    assert buckets_up_to(33) == (1, 2, 4, 8, 16, 32, 64)
    assert buckets_up_to(1) == (1,)


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_a_bucket_holds_its_tokens_and_every_step_has_one(tokens, fewer):
    assert tokens <= bucket(tokens) < 2 * tokens
    assert bucket(bucket(tokens)) == bucket(tokens)
    assert bucket(max(1, tokens - fewer)) in buckets_up_to(tokens)


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_empty_step_has_no_bucket(tokens):
    with pytest.raises(ValueError, match="at least one token"):
        bucket(tokens)

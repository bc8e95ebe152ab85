"""`--why NAME`: what a user calls a decision finds it, and a name that is none leads to the nearest."""

from __future__ import annotations

import pytest

from pellucid.core import PellucidError
from pellucid.selection.args import EngineArgs
from pellucid.selection.lookup import FLAG_DECISIONS, find_decision
from tests.selection.models import V2_LITE, plan

PLAN = plan(V2_LITE, "h200")


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("attention.decode@5", "attention.decode@8"),
        ("attention.decode", "attention.decode@1"),
        ("moe.decode@1", "moe@1"),
        ("moe.prefill@300", "moe@512"),
        ("--max-model-len", "max_model_len"),
        ("max-num-seqs", "max_num_seqs"),
        ("--no-enable-prefix-caching", "enable_prefix_caching"),
        ("--kv-cache-dtype", "kv.dtype"),
        ("--moe-backend", "moe@1"),
        ("kv.page_size", "kv.page_size"),
    ],
)
def test_a_decision_is_found_by_what_users_call_it(typed, key):
    assert find_decision(PLAN, typed).key == key


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("attention", ("nearest: attention.prefill, attention.decode",)),
        ("attention.decod@1", ("nearest: ", "attention.decode")),
        ("linear", ("nearest: linear.bf16",)),
        ("page", ("nearest: kv.page_size",)),
        ("tensor_paralel_size", ("nearest: tensor_parallel_size",)),
        ("flashmla", ("flashmla is a candidate of attention.prefill, attention.decode",)),
        ("xyzzy", ("no such decision; known: device",)),
        ("", ("no such decision; known: device",)),
        ("moe@100000", ("decided for 1 to 8192 tokens",)),
        ("moe@0", ("decided for 1 to 8192 tokens",)),
        ("moe@many", ("decided for 1 to 8192 tokens",)),
        ("kv.page_size@8", ("holds for every step; leave out @8",)),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(typed, words):
    with pytest.raises(PellucidError) as refused:
        find_decision(PLAN, typed)
    for word in words:
        assert word in str(refused.value)


def test_every_decision_is_found_by_its_own_name():
    for decision in PLAN.decisions:
        assert find_decision(PLAN, decision.key) == decision


def test_every_flag_that_decides_something_finds_it():
    about_no_decision = {"model", "served_model_name", "chat_template"}
    for name in EngineArgs.__dataclass_fields__:
        if name in about_no_decision or name.startswith("measure"):
            continue
        op = {"linear_backend": "linear.bf16"}.get(name) or FLAG_DECISIONS.get(name, name)
        assert op in {d.op for d in PLAN.decisions}, name

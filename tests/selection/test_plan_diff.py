"""Why does this model get another plan than its sibling: the fact that caused it, tried and not guessed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pellucid.hardware import load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.facts import Subject, differing_facts
from pellucid.selection.plan_diff import diff_plans, diff_subjects, render_diff
from pellucid.selection.plan_html import diff_html
from tests.selection.models import INT4, KIMI_K25, SMALL_DENSE, V2_LITE, machine, plan
from tests.selection.test_explain import words_of

H200, PRO, B200, CPU = (machine(name) for name in ("h200", "rtx-pro-6000x8-pcie", "b200x8-nvlink", "cpu"))
HEADS_128 = replace(KIMI_K25, attention=replace(KIMI_K25.attention, num_heads=128))


def subject(model, hardware, **flags):
    return Subject(EngineArgs("model", **flags), model, hardware)


def diff(a, b):
    return diff_subjects(("left", "right"), a, b)


def fact(found, name):
    return next(f for f in found.facts if f.name == name)


def test_equal_plans_say_so_in_one_line():
    found = diff(subject(KIMI_K25, PRO), subject(KIMI_K25, PRO))
    assert found.equal
    assert render_diff(found).count("\n") == 0
    assert render_diff(found).startswith("equal plans: ")


def test_facts_that_change_nothing_leave_the_plans_equal_and_are_named_on_that_line():
    other = replace(V2_LITE, bos_token_id=7, norm_eps=1e-6)
    found = diff(subject(V2_LITE, H200), subject(other, H200))
    assert found.equal
    text = render_diff(found)
    assert text.count("\n") == 0
    assert "norm_eps 1e-05 | 1e-06" in text and "bos_token_id 163584 | 7" in text


def test_the_trait_that_keeps_a_kernel_from_one_sibling_is_the_cause():
    found = diff(subject(HEADS_128, B200, tensor_parallel_size=1), subject(KIMI_K25, B200, tensor_parallel_size=1))
    (fit,) = [fit for fit in found.fits if fit.candidate == "cutlass_mla"]
    assert (fit.ops, fit.cause) == (("attention.prefill", "attention.decode"), "by attention.num_heads")
    assert "takes 128 query heads per rank, here 64" in fit.b
    assert "the fit of cutlass_mla" in fact(found, "attention.num_heads").alone


def test_the_format_of_the_weights_is_the_cause_of_another_moe_kernel():
    int4 = replace(V2_LITE, weights=replace(V2_LITE.weights, routed_experts=INT4))
    found = diff(subject(V2_LITE, H200), subject(int4, H200))
    (moe,) = [d for d in found.decisions if d.title.startswith("moe@")]
    assert moe.title == "moe@1..8192"
    assert (moe.a.value, moe.b.value) == ("triton_fused", "nothing")
    assert moe.cause == "by weights.routed_experts"
    lines = render_diff(found).splitlines()
    assert lines[:3] == ["A  left", "B  right", "what differs, and what it changes"]
    assert "weights.routed_experts" in lines[3] and "moe@1..8192" in lines[3]
    (blocker,) = found.blockers[1]
    assert blocker.startswith("moe") and found.blockers[0] == ()


def test_of_two_machines_the_capability_and_the_memory_are_told_apart():
    found = diff(subject(KIMI_K25, B200), subject(KIMI_K25, PRO))
    assert "tensor_parallel_size" in fact(found, "memory of a GPU").alone
    assert fact(found, "compute capability").a == "10.0"
    assert set(fact(found, "compute capability").alone) >= {"the fit of trtllm_mla", "the fit of xqa_mla"}
    assert fact(found, "host's cores").alone == ("threads",)
    assert fact(found, "link").effect == ""


def test_buckets_that_are_no_neighbours_are_not_told_as_one_range():
    from pellucid.selection.evidence import Measurement

    def measured(*fast):
        times = {(b, name): 1e-5 for b in (1, 2, 4, 8) for name in ("triton_mla", "reference")}
        times |= {(b, "triton_mla"): 9e-5 for b in fast}
        evidence = {("attention.decode", b, name): Measurement(t, 1e-8) for (b, name), t in times.items()}
        return replace(subject(V2_LITE, H200, max_num_seqs=8, decode_path="layered"), evidence=evidence)

    found = diff_plans(("a", "b"), measured().plan(), measured(1, 4).plan())
    titles = [d.title for d in found.decisions if d.title.startswith("attention.decode")]
    assert titles == ["attention.decode@1", "attention.decode@4"]


def test_each_side_says_why_it_does_not_take_what_the_other_takes():
    found = diff(subject(V2_LITE, CPU), subject(V2_LITE, H200))
    (decode,) = [d for d in found.decisions if d.title == "attention.decode@1..16"]
    assert (decode.a.value, decode.b.value) == ("cpu_native", "triton_mla")
    assert decode.a.against_other.startswith("triton_mla: runs on cuda, the device is cpu")
    assert decode.b.against_other.startswith("cpu_native: runs on cpu, the device is cuda")


def test_buckets_that_one_side_alone_has_are_said_to_be_missing():
    found = diff(subject(V2_LITE, CPU), subject(V2_LITE, H200))
    (rest,) = [d for d in found.decisions if d.title == "attention.decode@32..256"]
    assert rest.a is None and rest.b is not None
    assert "A has no such decision" in render_diff(found)


def test_several_facts_together_are_named_where_none_does_it_alone():
    found = diff(subject(V2_LITE, H200), subject(KIMI_K25, B200))
    (pages,) = [d for d in found.decisions if d.title == "kv.pages"]
    assert pages.cause.startswith("by several together: ")
    assert "memory of a GPU" in pages.cause


@pytest.mark.parametrize(
    ("a", "b"),
    [((V2_LITE, H200), (KIMI_K25, H200)), ((SMALL_DENSE, H200), (V2_LITE, PRO)), ((V2_LITE, CPU), (V2_LITE, B200))],
)
def test_giving_a_side_every_fact_of_the_other_gives_it_the_others_plan(a, b):
    left, right = subject(*a), subject(*b)
    moved = left
    for one in differing_facts(left, right):
        moved = one.moves(moved, right)
    assert {(d.op, d.bucket): d.value for d in moved.plan().decisions} == {
        (d.op, d.bucket): d.value for d in right.plan().decisions
    }


def test_a_difference_seen_from_the_other_side_is_the_same_difference():
    there, back = (
        diff(x, y) for x, y in [(subject(V2_LITE, H200), subject(KIMI_K25, PRO))] for x, y in ((x, y), (y, x))
    )
    assert {(f.name, f.a, f.b) for f in there.facts} == {(f.name, f.b, f.a) for f in back.facts}
    assert {(d.title, d.a, d.b) for d in there.decisions} == {(d.title, d.b, d.a) for d in back.decisions}
    assert {f.name: set(f.alone) for f in there.facts} == {f.name: set(f.alone) for f in back.facts}


def test_stored_plans_are_compared_by_what_they_say_of_themselves():
    found = diff_plans(("a.json", "b.json"), plan(KIMI_K25, PRO), plan(V2_LITE, PRO))
    assert not found.traced and not found.equal
    described = " ".join(f"{f.a} {f.b}" for f in found.facts)
    assert "384 experts of width 2048" in described and "64 experts of width 1408" in described
    assert not any(d.cause.startswith("by ") for d in found.decisions)
    assert "what they were made for" in render_diff(found)
    assert diff_plans(("a", "b"), plan(V2_LITE, PRO), plan(V2_LITE, PRO)).equal


def stored_diff(before, after):
    found = diff_plans(("before", "after"), before, after)
    return found, {d.title: d.cause for d in found.decisions}


def test_labels_of_a_stored_plan_that_follow_from_its_choices_say_so_and_come_last():
    found, cause = stored_diff(plan(V2_LITE, CPU), plan(V2_LITE, H200, device="cpu", attention_backend="reference"))
    assert cause["batch_invariant"].startswith("follows from attention.prefill@1..2048, attention.decode@1..16")
    found, cause = stored_diff(plan(V2_LITE, H200), plan(V2_LITE, H200, attention_backend="reference"))
    assert cause == {
        "attention.prefill@1..8192": "",
        "attention.decode@1..256": "",
        "decode_path": "follows from attention.decode@1..256",
        "cuda_graphs": "follows from decode_path",
        "prompt_graphs": "follows from decode_path, attention.prefill@1..8192",
    }
    assert "decode_path  (follows from attention.decode@1..256)" in render_diff(found)


def test_buckets_and_pages_of_a_stored_plan_follow_from_the_size_that_was_asked_for():
    _, cause = stored_diff(plan(V2_LITE, H200), plan(V2_LITE, H200, max_num_seqs=512))
    assert cause == {
        "max_num_seqs": "",
        "kv.pages": "follows from max_num_seqs",
        "attention.decode@512": "follows from max_num_seqs",
    }


def test_what_was_asked_for_follows_from_nothing_and_what_a_model_may_have_changed_is_not_put_down_to_a_choice():
    _, cause = stored_diff(
        plan(V2_LITE, H200), plan(V2_LITE, H200, attention_backend="reference", decode_path="layered")
    )
    assert cause["decode_path"] == "" and cause["cuda_graphs"] == "follows from decode_path"
    # Packed weights alone keep this one from the fused path, whatever computes attention.
    packed = replace(V2_LITE, weights=replace(V2_LITE.weights, dense_mlp=INT4))
    _, cause = stored_diff(plan(V2_LITE, H200), plan(packed, H200, attention_backend="reference"))
    assert cause["decode_path"] == ""
    assert cause["cuda_graphs"] == "follows from decode_path"


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 16},
        {"max_num_batched_tokens": 512},
        {"device": "cpu"},
        {"attention_backend": "reference"},
        {"moe_backend": "reference"},
        {"enforce_eager": True},
        {"decode_path": "layered"},
        {"dtype": "fp16"},
        {"block_size": 16},
        {"num_kv_pages": 100},
        {"max_model_len": 512},
    ],
    ids=str,
)
def test_with_one_flag_something_stands_for_itself_and_nothing_follows_from_what_is_equal(flags):
    found, cause = stored_diff(plan(V2_LITE, H200), plan(V2_LITE, H200, **flags))
    assert not found.equal
    assert "" in cause.values()
    named = {name for text in cause.values() for name in text.removeprefix("follows from ").split(", ") if name}
    assert named <= cause.keys()
    own = [not text for text in cause.values()]
    assert own == sorted(own, reverse=True)


def test_a_package_that_one_machine_lacks_is_a_fact_of_its_own():
    bare = replace(H200, packages={k: v for k, v in H200.packages.items() if k != "triton"})
    found = diff(subject(V2_LITE, H200), subject(V2_LITE, bare))
    triton = fact(found, "package triton")
    assert triton.b == "absent"
    assert {"attention.decode@1..256", "moe@1..8192", "decode_path"} <= set(triton.alone)


def test_machines_whose_gpus_are_not_alike_differ_as_a_whole():
    mixed = replace(B200, gpus=(*B200.gpus[:7], replace(B200.gpus[0], sm=90)))
    found = diff(subject(V2_LITE, B200), subject(V2_LITE, mixed))
    assert [f.name for f in found.facts] == ["GPUs"]


def test_the_difference_is_json_and_a_page_with_the_same_words():
    found = diff(subject(V2_LITE, H200), subject(KIMI_K25, load_hardware("b200x8-nvlink")))
    values = json.loads(json.dumps(found.to_json()))
    assert values["equal"] is False and values["decisions"][0]["title"] == found.decisions[0].title
    page = words_of(diff_html(found))
    for one in (*found.facts, *found.fits):
        assert " ".join(one.a.split()) in page and " ".join(one.b.split()) in page
    for decision in found.decisions:
        assert decision.title in page and decision.cause in page

"""Flags, defaults and refusals: an explicit flag wins or the start fails; everything else says how it came."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pellucid.core import PlanError
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import Decision, ExecutionPlan
from pellucid.selection.resolve import resolve
from pellucid.traits.model import WeightFormat, WeightTraits
from tests.selection.models import KIMI_K25, SMALL_DENSE, V2_LITE, kinds, machine, plan, rejection

MACHINES = ("cpu", "h200", "h200x2", "rtx-pro-6000x8-pcie", "b200x8-nvlink", "a100", "rtx-4090", "rtx-3090")


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("model", [KIMI_K25, V2_LITE, SMALL_DENSE], ids=["kimi-k2.5", "v2-lite", "dense"])
def test_a_plan_survives_json_and_is_the_same_twice(model, where):
    found = plan(model, where)
    assert ExecutionPlan.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert json.dumps(plan(model, where).to_json()) == json.dumps(found.to_json())


def test_on_a_cpu_our_own_kernels_run_in_fp32_and_do_not_depend_on_the_batch():
    found = plan(V2_LITE, "cpu")
    found.check_startable()
    assert (found.device, found.dtype, found.kv_dtype, found.page_size) == ("cpu", "fp32", "fp32", 64)
    for op in ("attention.prefill", "attention.decode", "moe", "linear.bf16"):
        assert found.backend(op, 1) == "cpu_native"
    assert found.batch_invariant
    assert found.decision("dtype").how == "forced by traits"


def test_without_a_compiler_the_reference_runs_and_the_remedy_is_shown():
    bare = replace(machine("cpu"), cpu=replace(machine("cpu").cpu, compiler=None, compiler_version=None))
    found = plan(V2_LITE, bare)
    assert found.backend("attention.decode", 1) == "reference"
    assert not found.batch_invariant
    misfit = rejection(found.decision("moe", 1), "cpu_native").misfits[0]
    assert (misfit.kind, misfit.remedy) == ("compiler", "apt install g++")


def test_an_asked_backend_is_taken_even_where_another_comes_first():
    found = plan(V2_LITE, "cpu", attention_backend="reference")
    decision = found.decision("attention.decode", 4)
    assert (decision.value, decision.how) == ("reference", "asked")
    assert kinds(decision, "cpu_native") == {"not_asked"}
    assert found.backend("moe", 4) == "cpu_native"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"attention_backend": "flashmla"},
            ("--attention-backend flashmla", "SM 9.0", "SM 12.0", "fits: triton_mla, reference"),
        ),
        ({"attention_backend": "flash"}, ("no such attention backend", "flashmla", "reference")),
        ({"attention_backend": "flashinfer_mla"}, ("pip install flashinfer-python", "fits: triton_mla, reference")),
        ({"attention_backend": "cpu_native"}, ("runs on cpu", "--device cpu")),
        ({"kv_cache_dtype": "fp8"}, ("--kv-cache-dtype fp8", "triton_mla", "--kv-cache-dtype bf16")),
        ({"batch_invariant": True}, ("--batch-invariant", "depend on the batch", "leave out --batch-invariant")),
        ({"tensor_parallel_size": 16}, ("--tensor-parallel-size 16", "8 cuda device")),
        ({"tensor_parallel_size": 3}, ("--tensor-parallel-size 3", "attention heads 16", "possible: 1, 2, 4, 8")),
        ({"max_model_len": 200000}, ("--max-model-len 200000", "163840")),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, ("--max-num-batched-tokens 8", "--max-num-seqs 16")),
        ({"num_kv_pages": 10**9}, ("--num-kv-pages", "fit")),
    ],
)
def test_a_flag_that_does_not_fit_refuses_with_reason_and_remedy(flags, words):
    with pytest.raises(PlanError) as refused:
        plan(V2_LITE, "rtx-pro-6000x8-pcie", **flags)
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "flags",
    [{"block_size": 0}, {"gpu_memory_utilization": 1.5}, {"max_num_seqs": -1}, {"dtype": "int3"}, {"threads": 0}],
)
def test_a_value_no_model_could_accept_is_refused_at_once(flags):
    with pytest.raises(PlanError):
        EngineArgs("model", **flags)


def test_a_gpu_is_not_invented():
    with pytest.raises(PlanError, match="--device cuda"):
        plan(V2_LITE, "cpu", device="cuda")
    with pytest.raises(PlanError, match="1 cpu device"):
        plan(V2_LITE, "cpu", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("flag", "value", "op"),
    [
        ("dtype", "float32", "dtype"),
        ("kv_cache_dtype", "float32", "kv.dtype"),
        ("block_size", 32, "kv.page_size"),
        ("max_num_seqs", 3, "max_num_seqs"),
        ("max_num_batched_tokens", 100, "max_num_batched_tokens"),
        ("max_model_len", 1000, "max_model_len"),
        ("num_kv_pages", 77, "kv.pages"),
        ("enable_prefix_caching", False, "enable_prefix_caching"),
        ("batch_invariant", True, "batch_invariant"),
        ("threads", 3, "threads"),
        ("gpu_memory_utilization", 0.6, "gpu_memory_utilization"),
        ("seed", 5, "seed"),
        ("device", "cpu", "device"),
        ("tensor_parallel_size", 1, "tensor_parallel_size"),
    ],
)
def test_every_flag_ends_in_the_decision_it_is_about_and_is_called_asked(flag, value, op):
    decision = plan(V2_LITE, "cpu", **{flag: value}).decision(op)
    assert decision.how == "asked"
    assert decision.value == ("fp32" if value == "float32" else value)
    assert plan(V2_LITE, "cpu").decision(op).how != "asked"


def test_what_was_not_asked_is_not_called_asked():
    for where in MACHINES:
        assert {d.how for d in plan(V2_LITE, where).decisions} <= {"default", "forced by traits"}


def test_a_prompt_is_computed_in_one_step_when_chunking_is_off():
    found = plan(V2_LITE, "cpu", enable_chunked_prefill=False, max_model_len=5000)
    assert found.max_num_batched_tokens == 5000
    assert not found.enable_chunked_prefill
    with pytest.raises(PlanError, match="--max-num-batched-tokens 5000"):
        plan(V2_LITE, "cpu", enable_chunked_prefill=False, max_model_len=5000, max_num_batched_tokens=1000)


@pytest.mark.parametrize("where", MACHINES)
def test_a_step_always_has_room_for_every_sequence(where):
    for flags in ({}, {"max_num_seqs": 5000}, {"max_num_batched_tokens": 3}):
        found = plan(V2_LITE, where, **flags)
        assert found.max_num_batched_tokens >= found.max_num_seqs


def test_a_model_too_large_is_explained_and_not_started():
    found = plan(KIMI_K25, "h200")
    memory = next(b for b in found.blockers if b.kind == "memory")
    assert "routed experts" in memory.reason
    with pytest.raises(PlanError):
        found.check_startable()


def test_a_format_nothing_reads_blocks_the_start_and_names_the_nearest():
    found = plan(KIMI_K25, "rtx-pro-6000x8-pcie")
    blocker = next(b for b in found.blockers if b.reason.startswith("moe "))
    assert blocker.kind == "weights"
    assert "int4" in blocker.reason
    with pytest.raises(PlanError, match="int4"):
        found.backend("moe", 1)


def test_ranks_are_as_few_as_hold_the_model():
    assert plan(KIMI_K25, "rtx-pro-6000x8-pcie").tensor_parallel_size == 8
    assert plan(V2_LITE, "rtx-pro-6000x8-pcie").tensor_parallel_size == 1
    assert plan(V2_LITE, "h200x2").decision("tensor_parallel_size").how == "default"


def test_ranks_need_not_be_a_power_of_two():
    attention = replace(SMALL_DENSE.attention, num_heads=66, num_kv_heads=6)
    sizes = {"hidden_size": 8192, "intermediate_size": 27648, "num_layers": 80, "moe_layers": (False,) * 80}
    model = replace(SMALL_DENSE, attention=attention, **sizes)
    gpu = replace(machine("a100").gpus[0], memory_bytes=64 << 30)
    decision = plan(model, replace(machine("a100"), gpus=(gpu,) * 4, link="nvlink")).decision("tensor_parallel_size")
    assert (decision.value, decision.how) == (3, "forced by traits")
    assert decision.because[1].startswith("with 2: ")


def test_more_than_one_rank_needs_an_all_reduce():
    found = plan(V2_LITE, "h200x2", tensor_parallel_size=2)
    assert found.decision("all_reduce", 1).value is None
    assert any(b.reason.startswith("all_reduce") for b in found.blockers)
    with pytest.raises(PlanError, match="all_reduce"):
        plan(V2_LITE, "h200x2").decision("all_reduce", 1)


def test_each_format_of_linear_weights_is_decided_for_itself():
    q4 = WeightFormat("q4_1", 32, False)
    mixed = replace(SMALL_DENSE, weights=WeightTraits(q4, q4, None, None, WeightFormat("q8_0", 32), q4))
    untied = replace(mixed, tied_embeddings=False)
    assert plan(mixed, "cpu").backends("linear.q4_1") == {"cpu_native"}
    assert plan(untied, "cpu").backend("linear.q8_0", 1) == "cpu_native"
    assert "lm_head" in plan(untied, "cpu").decision("linear.q8_0", 1).because[0]
    with pytest.raises(PlanError, match="no decision"):
        plan(mixed, "cpu").decision("linear.q8_0", 1)


def test_decisions_exist_for_every_step_that_can_happen():
    found = plan(V2_LITE, "cpu", max_num_seqs=5, max_num_batched_tokens=100)
    for tokens in range(1, 101):
        assert found.backend("moe", tokens) == "cpu_native"
    assert found.buckets("attention.decode") == (1, 2, 4, 8)
    with pytest.raises(PlanError, match="at 9 tokens"):
        found.decision("attention.decode", 9)


def test_reasons_name_traits_and_never_a_model():
    for where in MACHINES:
        text = json.dumps(plan(KIMI_K25, where).to_json()).lower()
        for name in ("deepseek_v3", "deepseekv3", "kimi", "forcausallm", "conditionalgeneration"):
            assert name not in text


def test_a_decision_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="needs a reason"):
        Decision("moe", 1, "reference", "default", ())


def test_stored_sizes_replace_computed_ones():
    args, hardware = EngineArgs("model"), machine("cpu")
    known = resolve(args, V2_LITE, hardware, stored_bytes={"routed experts": 12345})
    item = next(i for i in known.memory.items if i.name == "weights: routed experts")
    assert item.bytes == 12345
    assert "from the tensors" in item.formula


def test_modules_stored_otherwise_than_their_class_get_a_decision_of_their_own():
    q4, q6 = WeightFormat("q4_k", 32, False), WeightFormat("q6_k", 16)
    weights = replace(
        V2_LITE.weights,
        routed_experts=q4,
        exceptions=(("self_attn.o_proj", q6), ("mlp.experts.down_proj", q6), ("self_attn.o_proj", q4)),
    )
    found = plan(replace(V2_LITE, weights=weights), "cpu")
    assert "self_attn.o_proj" in found.decision("linear.q6_k", 1).because[0]
    assert "self_attn.o_proj" in found.decision("linear.q4_k", 1).because[0]
    assert "q4_k group 32 and q6_k group 16" in found.decision("moe", 1).because[0]
    assert found.backend("moe", 1) == "cpu_native"


def test_a_pool_smaller_than_an_asked_context_is_the_users_word():
    """Both were asked: what is longer than the pool is refused one by one, at admission (C06)."""
    found = plan(V2_LITE, "cpu", max_model_len=4096, num_kv_pages=8)
    assert (found.max_model_len, found.num_kv_pages) == (4096, 8)


def test_a_moe_backend_for_a_model_without_experts_is_refused():
    with pytest.raises(PlanError, match="no experts"):
        plan(SMALL_DENSE, "cpu", moe_backend="reference")

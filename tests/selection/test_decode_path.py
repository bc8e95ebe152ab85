"""How decode steps are computed: fused where nothing stands against it, and whatever does names itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pellucid.core import PlanError
from pellucid.selection.args import EngineArgs
from pellucid.selection.decode_path import FUSED, LAYERED, PROMPT_TOKENS, decide_decode
from pellucid.selection.plan import Decision
from pellucid.selection.registry import discover
from tests.selection.models import KIMI_K25, SMALL_DENSE, V2_LITE, plan

H200 = "h200"

OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "a CPU": ({"device": "cpu"}, "this is the cpu"),
    "ranks": ({"ranks": 2}, "2 ranks"),
    "fp32": ({"dtype": "fp32", "kv_dtype": "fp32"}, "not in fp32 with fp32"),
    "an fp8 cache": ({"kv_dtype": "fp8"}, "not in bf16 with fp8"),
    "a cache of the other 16 bits": ({"dtype": "fp16"}, "not in fp16 with bf16"),
    "biases": ({"model": replace(V2_LITE, mlp_bias=True)}, "the MLPs have biases"),
    "batch invariance": ({"batch_invariant": True}, "--batch-invariant"),
    "another attention": ({"attention.decode": "reference"}, "attention.decode@4 is reference"),
    "other experts": ({"moe": "marlin"}, "moe@4 is marlin"),
    "packed weights": ({"linear.int4": "marlin"}, "linear.int4@4 is marlin"),
    "no attention at all": ({"attention.decode": None}, "attention.decode@4 is None"),
}


def decide(**changes: Any) -> tuple[Decision, Decision, Decision]:
    """Of V2-Lite in bf16 on one CUDA device; names of ops change the backend at their second bucket."""
    backends = {"attention.prefill": "triton_mla", "attention.decode": "triton_mla", "moe": "triton_fused"}
    backends["linear.bf16"] = "reference"
    ops = {name: changes.pop(name) for name in list(changes) if "." in name or name == "moe"}
    kernels = [Decision(op, 1, value, "default", ("first",)) for op, value in backends.items()]
    kernels += [Decision(op, 4, ops.get(op, backends.get(op)), "default", ("first",)) for op in backends | ops]
    model = changes.pop("model", V2_LITE)
    where = {"device": "cuda", "ranks": 1, "dtype": "bf16", "kv_dtype": "bf16"}
    where |= {name: changes.pop(name) for name in list(changes) if name in where}
    found = decide_decode(EngineArgs("model", **changes), model, **where, kernels=kernels, backends=discover())
    path, graphs, prompts = found
    assert (path.op, graphs.op, prompts.op) == ("decode_path", "cuda_graphs", "prompt_graphs")
    return path, graphs, prompts


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_without_an_obstacle_decode_is_fused_and_captured(dtype: str) -> None:
    path, graphs, prompts = decide(dtype=dtype, kv_dtype=dtype)
    assert (path.value, path.how) == (FUSED, "default")
    assert (graphs.value, graphs.how) == (True, "default")
    assert (prompts.value, prompts.how) == (PROMPT_TOKENS, "default")


@pytest.mark.parametrize("name", OBSTACLES)
def test_each_obstacle_makes_it_layered_and_says_so(name: str) -> None:
    changes, words = OBSTACLES[name]
    path, graphs, prompts = decide(**changes)
    assert (path.value, path.how) == (LAYERED, "forced by traits")
    assert words in " ".join(path.because)
    assert (graphs.value, graphs.how) == (False, "forced by traits")
    assert (prompts.value, prompts.how) == (0, "forced by traits")


@pytest.mark.parametrize("name", OBSTACLES)
def test_fused_that_can_not_be_is_refused_by_the_obstacles_name(name: str) -> None:
    changes, words = OBSTACLES[name]
    with pytest.raises(PlanError) as refused:
        decide(decode_path=FUSED, **changes)
    message = str(refused.value)
    assert message.startswith("--decode-path fused: ")
    assert words in message
    assert message.endswith("leave the flag out")


def test_prefill_may_run_on_any_backend() -> None:
    """But what is not ours is not captured."""
    path, graphs, prompts = decide(**{"attention.prefill": "reference"})
    assert (path.value, graphs.value) == (FUSED, True)
    assert (prompts.value, prompts.how) == (1, "forced by traits")
    assert "attention.prefill@4 is reference" in prompts.because[1]


@pytest.mark.parametrize("asked", [FUSED, LAYERED])
def test_a_path_that_is_asked_for_and_fits_is_taken(asked: str) -> None:
    path, graphs, prompts = decide(decode_path=asked)
    assert (path.value, path.how) == (asked, "asked")
    assert graphs.value is (asked == FUSED)
    assert bool(prompts.value) is (asked == FUSED)


@pytest.mark.parametrize("eager", [True, False])
def test_graphs_are_asked_for_or_off(eager: bool) -> None:
    path, graphs, prompts = decide(enforce_eager=eager)
    assert path.value == FUSED
    assert (graphs.value, graphs.how) == (not eager, "asked")
    assert bool(prompts.value) is not eager


def test_graphs_of_a_layered_path_are_refused_and_their_absence_is_not() -> None:
    for changes in ({"device": "cpu"}, {"decode_path": LAYERED}):
        with pytest.raises(PlanError, match=r"--no-enforce-eager.*layered"):
            decide(enforce_eager=False, **changes)
        assert decide(enforce_eager=True, **changes)[1].value is False


def test_a_path_that_nobody_knows_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="known are fused and layered"):
        EngineArgs("model", decode_path="fast")


@pytest.mark.parametrize("model", [V2_LITE, SMALL_DENSE], ids=["mla", "gqa"])
def test_16_bit_models_on_one_gpu_are_planned_fused(model: Any) -> None:
    found = plan(model, H200)
    assert (found.decode_path, found.cuda_graphs) == (FUSED, True)
    found = plan(model, H200, decode_path=LAYERED)
    assert (found.decode_path, found.cuda_graphs) == (LAYERED, False)
    assert plan(model, H200, enforce_eager=True).cuda_graphs is False


def test_plans_that_can_not_be_fused_say_why() -> None:
    cases: list[tuple[Any, ...]] = [
        (V2_LITE, "cpu", {}, "this is the cpu"),
        (V2_LITE, "h200x2", {"tensor_parallel_size": 2}, "2 ranks"),
        (V2_LITE, H200, {"dtype": "float32"}, "not in fp32"),
        (V2_LITE, H200, {"attention_backend": "reference"}, "attention.decode@1 is reference"),
        (V2_LITE, H200, {"moe_backend": "reference"}, "moe@1 is reference"),
        (KIMI_K25, "rtx-pro-6000x8-pcie", {}, "8 ranks"),
    ]
    for model, where, flags, words in cases:
        found = plan(model, where, **flags)
        assert found.decode_path == LAYERED
        assert words in " ".join(found.decision("decode_path").because)
        with pytest.raises(PlanError, match="--decode-path fused"):
            plan(model, where, decode_path=FUSED, **flags)


def test_larger_buckets_than_a_decode_step_has_may_take_other_experts_over_the_same_weights() -> None:
    kernels = [Decision("attention.decode", 4, "triton_mla", "default", ("first",)),
               Decision("linear.bf16", 4, "reference", "default", ("first",))]  # fmt: skip
    backends = discover()
    where = {"device": "cuda", "ranks": 1, "dtype": "bf16", "kv_dtype": "bf16", "backends": backends}

    def path(at_4: str, at_64: str) -> str:
        moe = [Decision("moe", bucket, name, "measured", ("it was",)) for bucket, name in ((4, at_4), (64, at_64))]
        return str(decide_decode(EngineArgs("model"), V2_LITE, **where, kernels=[*kernels, *moe])[0].value)

    assert path("triton_fused", "deep_gemm") == FUSED
    assert path("deep_gemm", "deep_gemm") == LAYERED
    assert path("triton_fused", "reference") == LAYERED

"""What each declared backend says of Kimi-K2.5 on each machine, against the documented limits of its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.hardware.facts import GPU
from pellucid.selection.misfits import Need, misfits
from pellucid.selection.registry import discover
from pellucid.traits.backend import ANY, BackendTraits
from pellucid.traits.model import WeightFormat
from tests.selection.models import KIMI_K25, SMALL_DENSE, kinds, machine, plan, rejection

PRO, H200, B200, CPU = "rtx-pro-6000x8-pcie", "h200", "b200x8-nvlink", "cpu"

DECODE = {
    # candidate: kinds besides "not built" and packages, on the PRO 6000 (8 heads), H200, B200 and CPU
    "triton_mla": (set(), set(), set(), {"device"}),
    "flashmla": ({"compute_capability"}, set(), {"compute_capability"}, {"device"}),
    "fa3_mla": (
        {"compute_capability", "phase"},
        {"phase"},
        {"compute_capability", "phase"},
        {"device", "phase"},
    ),
    "flashinfer_mla": (set(), set(), set(), {"device"}),
    "trtllm_mla": ({"compute_capability"}, {"compute_capability"}, set(), {"device"}),
    "cutlass_mla": (
        {"compute_capability", "num_heads"},
        {"compute_capability", "num_heads"},
        {"num_heads"},
        {"device", "num_heads"},
    ),
    "xqa_mla": (
        {"num_heads"},
        {"compute_capability", "num_heads"},
        {"compute_capability", "num_heads"},
        {"device", "num_heads"},
    ),
    "triton_gqa": ({"attention"},) * 4,
    "fa3_gqa": ({"attention"},) * 4,
    "flashinfer_gqa": ({"attention"},) * 4,
}
MOE = {
    "triton_fused": ({"weights"}, {"weights"}, {"weights"}, {"device", "weights"}),
    "marlin": (set(), set(), set(), {"device"}),
    "humming": (set(), set(), set(), {"device"}),
    "flashinfer_trtllm": ({"compute_capability"}, {"compute_capability"}, set(), {"device"}),
    "flashinfer_cutlass": ({"weights"}, set(), {"weights"}, {"device"}),
    "deep_gemm": ({"compute_capability", "weights"}, {"weights"}, {"weights"}, {"device", "weights"}),
}


@pytest.mark.parametrize(("column", "where"), list(enumerate((PRO, H200, B200, CPU))))
@pytest.mark.parametrize(("op", "table"), [("attention.decode", DECODE), ("moe", MOE)])
def test_every_candidate_is_rejected_for_its_documented_limits(op, table, column, where):
    decision = plan(KIMI_K25, where).decision(op, 1)
    for candidate, expected in table.items():
        assert kinds(decision, candidate) - {"not_built", "package"} == expected[column], (candidate, where)


@pytest.mark.parametrize("where", [PRO, H200, B200])
@pytest.mark.parametrize("candidate", ["flashmla", "trtllm_mla", "cutlass_mla", "xqa_mla"])
def test_decode_kernels_do_not_serve_prefill(candidate, where):
    assert "phase" in kinds(plan(KIMI_K25, where).decision("attention.prefill", 1), candidate)


@pytest.mark.parametrize("where", [PRO, H200, B200, CPU])
def test_every_declared_backend_is_either_taken_or_explained(where):
    found = plan(KIMI_K25, where)
    for op in ("attention", "moe", "linear"):
        declared = {b.name for b in discover() if b.op == op}
        for decision in (d for d in found.decisions if d.op.split(".")[0] == op):
            assert {r.candidate for r in decision.rejected} | {decision.value} - {None} == declared
            assert all(r.misfits for r in decision.rejected)


def test_a_backend_that_only_waits_to_be_built_says_so():
    decision = plan(KIMI_K25, PRO).decision("attention.decode", 1)
    waiting = replace(_backend("triton_mla"), built_in=False)
    assert [m.kind for m in misfits(waiting, _need(PRO))] == ["not_built"]
    assert not rejection(decision, "flashmla").only_not_built


def test_a_kernel_for_128_heads_fits_a_model_of_128_heads_and_names_the_ranks_otherwise():
    model = replace(KIMI_K25, attention=replace(KIMI_K25.attention, num_heads=128))
    one = plan(model, B200, tensor_parallel_size=1).decision("attention.decode", 1)
    eight = plan(model, B200, tensor_parallel_size=8).decision("attention.decode", 1)
    assert "num_heads" not in kinds(one, "cutlass_mla")
    misfit = next(m for m in rejection(eight, "cutlass_mla").misfits if m.kind == "num_heads")
    assert misfit.remedy == "--tensor-parallel-size 1"
    assert "128" in misfit.reason
    assert "16" in misfit.reason


def _need(where=H200, **changes) -> Need:
    hardware = machine(where)
    return replace(Need(KIMI_K25, hardware, hardware.device, "bf16", phase="decode"), **changes)


def _backend(name: str) -> BackendTraits:
    return next(b for b in discover() if b.name == name)


@pytest.mark.parametrize(
    ("name", "where", "fits", "refused"),
    [
        ("trtllm_mla", B200, {32, 64}, {1, 16, 128}),
        ("flashmla", H200, {64}, {1, 16, 32, 128}),
        ("cutlass_mla", B200, {1, 16, 64, 128}, {256}),
        ("xqa_mla", PRO, {16, 32, 64, 128}, {1, 256}),
        ("flashinfer_mla", H200, {1, 16, 64, 256}, set()),
    ],
)
def test_page_sizes_are_those_of_the_kernel(name, where, fits, refused):
    def misfit(page):
        return [m for m in misfits(_backend(name), _need(where, page_size=page)) if m.kind == "page_size"]

    assert not any(misfit(page) for page in fits)
    for page in refused:
        assert misfit(page)[0].remedy in ("--block-size 64", "--block-size 128")


@pytest.mark.parametrize(("name", "where"), [("xqa_mla", PRO), ("cutlass_mla", B200)])
def test_single_token_decoders_refuse_draft_verification(name, where):
    for length, expected in ((1, False), (4, True)):
        found = {m.kind for m in misfits(_backend(name), _need(where, query_len=length))}
        assert ("query_len" in found) is expected


@pytest.mark.parametrize("name", ["trtllm_mla", "xqa_mla", "flashmla", "cutlass_mla", "flashinfer_mla"])
def test_an_fp8_cache_is_read_by_the_kernels_that_declare_it_which_is_none_so_far(name):
    backend, need = _backend(name), _need(kv_dtype="fp8")
    declared = replace(backend, kv_dtypes=backend.kv_dtypes | {"fp8"})
    assert ["kv_dtype" in {m.kind for m in misfits(one, need)} for one in (backend, declared)] == [True, False]


@pytest.mark.parametrize(("nope", "fits"), [(128, True), (192, False)])
def test_an_absorbed_kernel_ignores_the_nope_width_and_an_exact_one_does_not(nope, fits):
    model = replace(KIMI_K25, attention=replace(KIMI_K25.attention, qk_nope_head_dim=nope))
    for absorbed, where in (("flashmla", H200), ("trtllm_mla", B200)):
        assert not any(m.kind == "head_dims" for m in misfits(_backend(absorbed), _need(where, model=model)))
    need = _need(model=model, phase="prefill")
    assert any(m.kind == "head_dims" for m in misfits(_backend("fa3_mla"), need)) is not fits


def test_an_unknown_capability_runs_what_is_bound_by_limits_alone():
    unknown = replace(machine(PRO), gpus=(GPU("future", 130, 96 << 30, 101376, 200),) * 8)
    found = plan(KIMI_K25, unknown).decision("attention.decode", 1)
    assert found.value == "triton_mla"
    for candidate in ("flashmla", "fa3_mla", "flashinfer_mla", "trtllm_mla", "cutlass_mla", "xqa_mla"):
        assert "compute_capability" in kinds(found, candidate)


@pytest.mark.parametrize("absent", ["torch", "triton"])
def test_a_missing_package_comes_with_the_command_that_installs_it(absent):
    hardware = machine(H200)
    hardware = replace(hardware, packages={k: v for k, v in hardware.packages.items() if k != absent})
    found = [m for m in misfits(_backend("triton_mla"), _need(hardware=hardware)) if m.kind == "package"]
    assert [m.remedy for m in found] == (["pip install triton"] if absent == "triton" else [])


def test_a_package_version_outside_the_tested_ones_is_a_misfit():
    from pellucid.traits.backend import Package

    backend = replace(_backend("triton_mla"), packages=(Package("triton", tested=("3.5.0",)),))
    found = next(m for m in misfits(backend, _need()) if m.kind == "package")
    assert found.remedy == "pip install triton==3.5.0"
    assert "3.6.0" in found.reason


def test_a_toolkit_older_than_needed_is_a_misfit():
    for cuda, expected in (((12, 4), True), ((12, 8), False), ((13, 0), False), (None, True)):
        hardware = replace(machine(PRO), cuda=cuda)
        found = {m.kind for m in misfits(_backend("xqa_mla"), _need(PRO, hardware=hardware))}
        assert ("toolkit" in found) is expected, cuda


def test_an_expert_width_that_the_ranks_cut_too_small_names_fewer_ranks():
    model = replace(KIMI_K25, moe=replace(KIMI_K25.moe, intermediate_size=512))
    need = _need(PRO, model=model, tensor_parallel_size=8, weights=(KIMI_K25.weights.routed_experts,))
    found = next(m for m in misfits(_backend("marlin"), need) if m.kind == "tensor_parallel")
    assert found.remedy == "--tensor-parallel-size 4"


def test_int4_with_zero_points_and_other_groups_are_refused_where_not_declared():
    def found(**changes):
        form = replace(KIMI_K25.weights.routed_experts, **changes)
        return [m.reason for m in misfits(_backend("marlin"), _need(weights=(form,))) if m.kind == "weights"]

    assert not found()
    assert "symmetric" in found(symmetric=False)[0]
    assert "not 48" in found(group_size=48)[0]


def test_what_is_not_declared_is_not_supported():
    blank = BackendTraits(name="blank", op="attention", summary="", priority=0, source="")
    found = {m.kind for m in misfits(replace(blank, attention=frozenset({"mla"})), _need())}
    assert found == {
        *("not_built", "device", "phase", "head_dims", "num_heads", "query_len", "page_size", "kv_layout"),
    }
    on_cuda = replace(blank, attention=frozenset({"mla"}), devices=frozenset({"cuda"}), built_in=True)
    assert {m.kind for m in misfits(on_cuda, _need())} - found == {"compute_capability", "dtype", "kv_dtype"}
    assert "weights" in {
        m.kind for m in misfits(replace(blank, op="linear"), _need(weights=(KIMI_K25.weights.lm_head,)))
    }


def test_grouped_query_models_have_candidates_of_their_own():
    decision = plan(SMALL_DENSE, H200).decision("attention.decode", 8)
    assert decision.value == "triton_gqa"
    assert kinds(decision, "reference") == {"order"}
    assert kinds(decision, "fa3_gqa") == {"package"}
    assert kinds(decision, "flashmla") == {"attention"}


def test_declarations_are_honest_about_capabilities():
    for backend in discover():
        if "cuda" in backend.devices:
            assert backend.sm is ANY or backend.sm, backend.name
        assert backend.source, backend.name


@pytest.mark.parametrize(("scheme", "run"), [("bf16", True), ("nvfp4", False)])
def test_a_backend_may_be_run_with_some_of_the_weights_that_its_kernel_reads(scheme, run):
    form = WeightFormat(scheme, None if run else 16)
    found = [m for m in misfits(_backend("flashinfer_cutlass"), _need(weights=(form,))) if m.kind == "not_built"]
    assert [m.reason for m in found] == ([] if run else ["this version does not bring nvfp4 weights into its form"])


@pytest.mark.parametrize(("reach", "fits"), [("channel", True), (None, True), ("row", False)])
def test_a_scale_that_reaches_further_than_a_group_has_to_be_declared(reach, fits):
    form = WeightFormat("fp8", None if reach else 128, scale_per=reach)
    found = [m for m in misfits(_backend("marlin"), _need(weights=(form,))) if m.kind == "weights"]
    assert (not found) is fits


# Which scheme each MoE kernel reads where, as SGLang's and vLLM's own choices show: PRO 6000, H200, B200.
MOE_SCHEMES = [
    ("fp8", 128, "triton_fused", ({"weights"}, {"weights"}, {"weights"})),
    ("fp8", 128, "deep_gemm", ({"compute_capability", "weights"}, {"weights"}, {"weights"})),
    ("bf16", None, "deep_gemm", ({"compute_capability"}, set(), set())),
    ("fp8", 128, "flashinfer_trtllm", ({"compute_capability"}, {"compute_capability"}, set())),
    ("fp8", 128, "flashinfer_cutlass", ({"weights"}, set(), {"weights"})),
    ("nvfp4", 16, "flashinfer_cutlass", (set(), {"weights"}, set())),
    ("nvfp4", 16, "flashinfer_trtllm", ({"compute_capability"}, {"compute_capability"}, set())),
    ("nvfp4", 16, "triton_fused", ({"weights"}, {"weights"}, {"weights"})),
    ("bf16", None, "flashinfer_cutlass", (set(), set(), set())),
    ("bf16", None, "triton_fused", (set(), set(), set())),
]


@pytest.mark.parametrize(("scheme", "group", "candidate", "expected"), MOE_SCHEMES)
def test_moe_kernels_read_what_they_are_known_to_read_where(scheme, group, candidate, expected):
    model = replace(KIMI_K25, weights=replace(KIMI_K25.weights, routed_experts=WeightFormat(scheme, group)))
    for where, wanted in zip((PRO, H200, B200), expected, strict=True):
        found = kinds(plan(model, where).decision("moe", 1), candidate) - {"not_built", "package"}
        assert found == wanted, where

"""A trace from end to end on the small engines: what was decided, by which line, on what, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pellucid.tracer.conditions import stopping
from pellucid.tracer.decide import decide
from pellucid.tracer.evidence import Evidencing
from pellucid.tracer.gpus import simulated_gpu
from pellucid.tracer.record import Decision, Trace, trace_from_json
from pellucid.tracer.run import Depth, TraceRequest, trace_many
from pellucid.tracer.sources import SourceTree, installed
from tests.tracer.fake_engine import line_of, write_fake_engine, write_fake_model

ARGUMENTS = "sglang/srt/server_args.py"
OVERRIDES = "sglang/srt/arg_groups/overrides.py"
BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> SourceTree:
    return installed("sglang", write_fake_engine(tmp_path_factory.mktemp("engine")))


@pytest.fixture(scope="module")
def on_b200(sglang: SourceTree, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Several models and flags on one GPU: one child traces them all."""
    folder = tmp_path_factory.mktemp("models")
    gpu = simulated_gpu("b200", 1)
    plain = write_fake_model(folder / "plain")
    hybrid = write_fake_model(folder / "hybrid", "FakeHybridForCausalLM", kv_lora_rank=None, mamba_num_heads=8)
    sparse = write_fake_model(folder / "sparse", "OtherForCausalLM", index_topk=2048)
    block = write_fake_model(folder / "block", moe_intermediate_size=1536, quantization_config=BLOCK_FP8)
    asked = {
        "plain": TraceRequest(sglang, plain, gpu),
        "renamed": TraceRequest(sglang, plain, gpu, architecture="OtherForCausalLM"),
        "hybrid": TraceRequest(sglang, hybrid, gpu),
        "sparse": TraceRequest(sglang, sparse, gpu),
        "block": TraceRequest(sglang, block, gpu, flags=("--tp-size", "8")),
        "flag": TraceRequest(sglang, plain, gpu, flags=("--attention-backend", "fa3", "--page-size", "16")),
        "split": TraceRequest(sglang, plain, gpu, flags=("--attention-backend", "split")),
        "unknown flag": TraceRequest(sglang, plain, gpu, flags=("--no-such-flag",)),
    }
    requests = [
        TraceRequest(one.tree, one.model, one.gpu, one.flags, architecture=one.architecture, depth="configuration")
        for one in asked.values()
    ]
    return dict(zip(asked, trace_many(requests), strict=True))


def site(decision: Decision) -> tuple[str, int]:
    assert decision.site is not None
    return decision.site.file, decision.site.line


def test_a_decision_has_its_value_its_line_and_the_conditions_with_what_they_look_at(
    on_b200: dict[str, Trace], sglang: SourceTree
) -> None:
    found = on_b200["plain"].decision("attention_backend")
    assert (found.value, found.how, found.level) == ("trtllm_mla", "forced", "configuration")
    assert site(found) == (ARGUMENTS, line_of(sglang.root, ARGUMENTS, 'self.attention_backend = "trtllm_mla"'))
    assert found.evidence == ("name", "hardware", "flag")
    names, sm, unset = found.history[-1].guards
    assert [(term.value, term.truth, term.evidence) for term in names.terms] == [("'FakeV3ForCausalLM'", True, "name")]
    assert [(term.expression, term.value, term.truth) for term in sm.terms] == [("is_sm100_supported()", "True", True)]
    assert [term.evidence for term in unset.terms] == ["flag"] * 3
    assert [one.function for one in found.history[-1].stack][:1] == ["__post_init__"]


def test_a_field_that_nothing_touched_has_its_default_and_one_that_the_user_gave_is_a_flag(
    on_b200: dict[str, Trace],
) -> None:
    found = on_b200["flag"]
    assert [found.decision(name).how for name in ("attention_backend", "page_size", "grammar_backend", "tp_size")] == [
        "flag",
        "flag",
        "default",
        "flag",
    ]
    assert (found.decision("attention_backend").value, found.decision("page_size").value) == ("fa3", 16)


def test_a_declared_field_is_decided_by_the_line_that_declares_it(
    on_b200: dict[str, Trace], sglang: SourceTree
) -> None:
    found = on_b200["sparse"]
    assert found.decision("dsa_decode_backend").value == "trtllm"
    assert site(found.decision("dsa_decode_backend")) == (OVERRIDES, line_of(sglang.root, OVERRIDES, '["dsa_decode'))
    assert site(found.decision("kv_cache_dtype")) == (OVERRIDES, line_of(sglang.root, OVERRIDES, '{"kv_cache_dtype"'))
    assert on_b200["hybrid"].decision("disable_radix_cache").value is True


def test_both_halves_of_a_tuple_are_decided_on_its_line(on_b200: dict[str, Trace], sglang: SourceTree) -> None:
    line = line_of(sglang.root, ARGUMENTS, '= "fa3", "flashmla"')
    halves = [on_b200["split"].decision(f"{half}_attention_backend") for half in ("prefill", "decode")]
    assert [(one.value, site(one)) for one in halves] == [("fa3", (ARGUMENTS, line)), ("flashmla", (ARGUMENTS, line))]


def test_the_name_alone_changes_what_the_name_decides(on_b200: dict[str, Trace]) -> None:
    plain, renamed = on_b200["plain"], on_b200["renamed"]
    assert renamed.architecture == "OtherForCausalLM"
    changed = {one.field for one in plain.decisions if one.value != renamed.decision(one.field).value}
    assert changed == {"attention_backend", "moe_runner_backend", "quantization", "page_size"}


def test_a_road_that_was_not_taken_names_the_operand_that_stopped_it(on_b200: dict[str, Trace]) -> None:
    could = {one.value: one for one in on_b200["renamed"].decision("attention_backend").could}
    stopped = stopping(could["'trtllm_mla'"])
    assert stopped is not None
    guard, (term,) = stopped
    assert guard.taken and (term.value, term.truth, term.evidence) == ("'OtherForCausalLM'", False, "name")


def test_a_default_that_only_a_stub_kept_is_tainted(on_b200: dict[str, Trace]) -> None:
    found = on_b200["plain"].decision("fp8_gemm_runner_backend")
    assert (found.value, found.how, found.tainted) == ("auto", "default", ("flashinfer",))
    assert on_b200["plain"].stubs == ("flashinfer",)
    assert on_b200["renamed"].decision("fp8_gemm_runner_backend").tainted == ()


def test_a_probe_of_a_package_that_the_wheel_requires_is_evidence_and_no_taint(on_b200: dict[str, Trace]) -> None:
    found = on_b200["plain"].decision("sampling_backend")
    assert found.value == "flashinfer" and "package" in found.evidence and not found.tainted


def test_log_lines_are_those_that_the_engine_would_print(on_b200: dict[str, Trace], sglang: SourceTree) -> None:
    first = on_b200["plain"].log[0]
    assert first.text == "Use trtllm_mla as attention backend on sm100 for FakeV3ForCausalLM"
    assert (first.level, first.site.line) == ("INFO", line_of(sglang.root, ARGUMENTS, "Use trtllm_mla as"))
    assert on_b200["renamed"].log == ()


def test_the_engine_s_own_refusal_has_its_words_and_line_and_no_value_is_final(
    on_b200: dict[str, Trace], sglang: SourceTree
) -> None:
    found = on_b200["block"]
    assert found.refusal is not None and not found.refusal.ours
    assert found.refusal.message.startswith("ValueError: moe_intermediate_size 1536 over 8 GPUs is not divisible")
    assert found.refusal.site is not None
    assert found.refusal.site.line == line_of(sglang.root, ARGUMENTS, "raise ValueError(")
    assert {one.how for one in found.decisions} == {"unknown"}
    assert found.decision("attention_backend").history[-1].value == "trtllm_mla"


def test_a_flag_that_the_engine_does_not_have_is_refused_in_its_parser_s_words(on_b200: dict[str, Trace]) -> None:
    refusal = on_b200["unknown flag"].refusal
    assert refusal is not None and not refusal.ours and "unrecognized arguments: --no-such-flag" in refusal.message


def test_a_trace_goes_through_json(on_b200: dict[str, Trace]) -> None:
    for found in on_b200.values():
        assert trace_from_json(json.loads(json.dumps(found.to_json()))) == found


def test_the_user_s_path_is_shown_and_not_that_of_the_copy(on_b200: dict[str, Trace]) -> None:
    assert "pellucid-trace-" not in json.dumps(on_b200["plain"].to_json())


def test_other_gpus_decide_otherwise(sglang: SourceTree, tmp_path: Path) -> None:
    model = write_fake_model(tmp_path / "model")
    names = ("h200", "rtxpro6000")
    requests = [TraceRequest(sglang, model, simulated_gpu(name, 8), depth="configuration") for name in names]
    hopper, pro = trace_many(requests)
    assert [one.decision("attention_backend").value for one in (hopper, pro)] == ["fa3", "triton"]
    assert [one.decision("chunked_prefill_size").value for one in (hopper, pro)] == [8192, 8192]
    assert hopper.decision("attention_backend").evidence[0] == "trait"
    assert pro.flags == ("--tp-size", "8")


def test_a_returned_value_is_decided_on_the_return_and_layers_that_can_t_be_built_change_nothing(
    tmp_path: Path,
) -> None:
    root = write_fake_engine(tmp_path / "engine", "vllm")
    model = write_fake_model(tmp_path / "model")
    request = TraceRequest(installed("vllm", root), model, simulated_gpu("b200", 1), depth="layers")
    found = trace_many([request])[0]
    assert found.refusal is not None and found.refusal.ours and "model_loader" in found.refusal.message
    backend = found.decision("attention_backend")
    cuda = "vllm/platforms/cuda.py"
    assert (backend.value, site(backend)) == ("FLASHINFER_MLA", (cuda, line_of(root, cuda, "return backend")))
    assert backend.history[-1].stack[0].file == "vllm/config/vllm.py"
    assert found.decision("block_size").value == 64


def traced(tmp_path: Path, replace: dict[str, str], depth: Depth = "configuration") -> Trace:
    root = write_fake_engine(tmp_path / "engine", replace=replace)
    model = write_fake_model(tmp_path / "model")
    return trace_many([TraceRequest(installed("sglang", root), model, simulated_gpu("b200", 1), depth=depth)])[0]


def test_reading_alone_runs_nothing_and_gives_no_value(tmp_path: Path) -> None:
    found = traced(tmp_path, {"import argparse": "raise RuntimeError('was run')\nimport argparse"}, depth="static")
    assert {(one.value, one.how, one.level) for one in found.decisions} == {(None, "unknown", "static")}
    assert "'trtllm_mla'" in {one.value for one in found.decision("attention_backend").could}
    assert any("nothing was run" in note for note in found.notes)


@pytest.mark.parametrize(
    "renamed",
    [
        {"prepare_server_args": "make_arguments"},
        {"__post_init__": "resolve_everything"},
        {"def _handle_attention_backend_compatibility": "def _choose_attention"},
    ],
    ids=["entry", "resolution", "half a rename"],
)
def test_a_version_that_moved_its_code_gives_no_value_and_says_why(tmp_path: Path, renamed: dict[str, str]) -> None:
    found = traced(tmp_path, renamed)
    assert {one.value for one in found.decisions} == {None}
    assert {one.how for one in found.decisions} == {"unknown"}
    assert found.refusal is None or found.refusal.ours
    assert found.notes or found.refusal, "the reason is told"
    assert found.decision("attention_backend").could, "the lines are still shown"


def test_functions_renamed_throughout_change_nothing(tmp_path: Path, on_b200: dict[str, Trace]) -> None:
    found = traced(tmp_path, {"_handle_": "_settle_", "dsa_defaults": "sparse_defaults", "is_sm100_": "is_big_"})
    expected = on_b200["plain"]
    assert [(one.field, one.value, one.how) for one in found.decisions] == [
        (one.field, one.value, one.how) for one in expected.decisions
    ]


def test_a_value_whose_line_is_out_of_sight_is_kept_and_its_line_is_not_guessed(tmp_path: Path) -> None:
    hidden = "vars(self).update(zip(['page_' + 'size'], [1]))"
    found = traced(tmp_path, {"            self.page_size = 1": f"            {hidden}", "self.page_size = 64": "pass"})
    page_size = found.decision("page_size")
    assert (page_size.value, page_size.site) == (1, None)
    assert any("page_size" in note and "no recorded line" in note for note in found.notes)


def test_a_line_whose_value_did_not_last_makes_the_field_unknown(tmp_path: Path) -> None:
    lost = "self.page_size = 64\n                vars(self)['page' + '_size'] = None\n                self.tp_size += 0"
    replaced = {"self.page_size = 64": lost, "if self.page_size is None:\n            self.page_size = 1": "pass"}
    found = traced(tmp_path, replaced)
    assert found.decision("page_size").how == "unknown"
    assert found.decision("page_size").value is None


def test_a_tree_that_is_no_longer_that_engine_is_said_to_have_moved(tmp_path: Path) -> None:
    root = tmp_path / "engine"
    write_fake_engine(root)
    for path in (root / "sglang/srt").rglob("*.py"):
        path.unlink()
    request = TraceRequest(installed("sglang", root), write_fake_model(tmp_path / "m"), simulated_gpu("b200", 1))
    found = trace_many([request])[0]
    assert found.decisions == ()
    assert found.refusal is not None and found.refusal.ours and "its code has moved" in found.refusal.message
    assert any("has none of the modules that decide" in note for note in found.notes)


def test_a_field_left_unset_by_code_that_nothing_calls_any_more_is_unknown(tmp_path: Path) -> None:
    moved = {
        "        self._handle_fp8_gemm()\n": "        pass\n",
        "    def _handle_fp8_gemm": (
            "    def finalize(self):\n        self._handle_fp8_gemm()\n\n    def _handle_fp8_gemm"
        ),
    }
    found = traced(tmp_path, moved)
    backend = found.decision("fp8_gemm_runner_backend")
    assert (backend.value, backend.how) == (None, "unknown")
    assert any("fp8_gemm_runner_backend: left unset" in note and "_handle_fp8_gemm" in note for note in found.notes)
    assert found.decision("quantization").how == "forced"


def test_code_that_no_condition_declined_is_not_in_doubt_where_another_module_imports_it(tmp_path: Path) -> None:
    hidden = "\n\ndef late_backend(server_args):\n    server_args.fp8_gemm_runner_backend = 'triton'\n"
    root = write_fake_engine(
        tmp_path / "engine",
        replace={"\n\ndef mamba_radix_cache": f"{hidden}\n\ndef mamba_radix_cache"},
        extra={"sglang/srt/elsewhere.py": "from sglang.srt.arg_groups.overrides import late_backend\n"},
    )
    model = write_fake_model(tmp_path / "model")
    request = TraceRequest(installed("sglang", root), model, simulated_gpu("b200", 1), depth="configuration")
    found = trace_many([request])[0]
    assert found.decision("fp8_gemm_runner_backend").how == "default"


HOOK = """
    def update_block_size_for_backend(self, vllm_config):
        if vllm_config.attention_config.backend == "FLASHINFER_MLA":
            vllm_config.cache_config.block_size = 32
"""
LOADER = {
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": "",
    "vllm/model_executor/model_loader/utils.py": """
import torch
def get_model_architecture(model_config):
    return torch.nn.Module
def initialize_model(vllm_config):
    return torch.nn.Module()
""",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/parallel_state.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
}


@pytest.mark.parametrize("depth", ["layers", "configuration"])
def test_a_block_size_that_vllm_sets_again_behind_the_layers_is_that_or_unknown(tmp_path: Path, depth: Depth) -> None:
    root = write_fake_engine(
        tmp_path / "engine",
        "vllm",
        replace={
            "    def check_and_update_config": f"{HOOK}\n    def check_and_update_config",
            "        self.hf_config = Simple": "        self.dtype = torch.float16\n        self.hf_config = Simple",
            "import json\nfrom dataclasses": "import json\nimport torch\nfrom dataclasses",
            'return getattr(self.hf_config, "kv_lora_rank", None) is not None': (
                'return getattr(self.hf_config, "kv_lora_rank", None) is not None\n\n'
                "    hf_text_config = property(lambda self: self.hf_config)"
            ),
            "    kernel_config: KernelConfig\n": (
                "    kernel_config: KernelConfig\n"
                "    compilation_config = SimpleNamespace(mode=__import__('enum').Enum('Mode', 'NONE').NONE)\n"
            ),
        },
        extra=LOADER,
    )
    model = write_fake_model(tmp_path / "model")
    found = trace_many([TraceRequest(installed("vllm", root), model, simulated_gpu("b200", 1), depth=depth)])[0]
    block = found.decision("block_size")
    assert [one.value for one in block.history][:1] == [64]
    if depth == "layers":
        assert found.refusal is None
        assert (block.value, block.how) == (32, "forced")
        assert site(block)[1] == line_of(root, "vllm/platforms/cuda.py", "block_size = 32")
    else:
        assert (block.value, block.how) == (None, "unknown")
        assert any("block_size: it was 64 so far" in note for note in found.notes)


def test_lines_that_look_a_layer_s_backend_up_later_are_not_what_it_had_been_before() -> None:
    def made(line: int, value: str) -> dict[str, object]:
        place = {"file": "a.py", "line": line, "source": "x", "function": "f"}
        return {
            "field": "attn_backend",
            "owner": None,
            "value": value,
            "site": place,
            "guards": [],
            "stack": [],
            "stubs": [],
            "level": "layers",
            "carried": False,
        }

    layer = {"kind": "attention", "backend": "FLASH", "backend_class": "Flash"}
    lines = [
        made(1, "BackendEnum.FLASH"),
        made(2, "vllm.backends.Flash"),
        made(3, "Flash"),
        made(4, "BackendEnum.FLASH"),
    ]
    outcome = {"values": {"x": 1}, "defaults": {}, "given": [], "layers": [layer], "assignments": lines}
    decisions, _ = decide(outcome, Evidencing(frozenset(), frozenset()))
    found = next(one for one in decisions if one.field == "attention_layer_backend")
    assert [one.site.line for one in found.history] == [1, 2]

"""`pellucid explain` as a user meets it: the answer, its reasons, errors in one line, and no heavy imports."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli, main
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import ExecutionPlan

TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "dtype": "bfloat16",
    "text_config": TEXT,
    "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "vt_num_attention_heads": 16},
}


def renamed():
    config = copy.deepcopy(KIMI)
    config["architectures"] = config["text_config"]["architectures"] = ["SomethingElseForCausalLM"]
    return config


def lifted():
    outer = {k: v for k, v in KIMI.items() if k not in ("text_config", "vision_config", "model_type")}
    return {**outer, **TEXT, "architectures": ["DeepseekV3ForCausalLM"]}


@pytest.fixture
def kimi(tmp_path):
    return folder(tmp_path / "kimi", KIMI)


def folder(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def explain(*args):
    result = CliRunner().invoke(cli, ["explain", *args])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_three_names_of_one_model_get_one_plan_on_every_machine(tmp_path):
    paths = [folder(tmp_path / str(i), config) for i, config in enumerate((KIMI, renamed(), lifted()))]
    for where in ("rtx-pro-6000x8-pcie", "h200"):
        plans = [ExecutionPlan.from_json(json.loads(explain(p, "--hardware", where, "--json"))) for p in paths]
        assert plans[0] == plans[1] == plans[2]


def test_the_plan_of_kimi_on_eight_workstation_cards_says_what_matters(kimi):
    text = explain(kimi, "--hardware", "rtx-pro-6000x8-pcie")
    by_name = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and line[2] != " "}
    assert by_name["tensor_parallel_size"].split()[1] == "8"
    assert "forced by traits" in by_name["tensor_parallel_size"]
    assert by_name["attention.decode@1..256"].split()[1] == "triton_mla"
    decode = text[text.index("attention.decode@") : text.index("moe@")]
    for words in (
        "8 query heads per rank",
        "not reference: fits; after triton_mla in the fixed order",
        "not trtllm_mla: compiled for SM 10.0 or 10.3, this is SM 12.0",
        "takes 128 query heads per rank, here 8 (64 / 8)",
        "triton_gqa, fa3_gqa, flashinfer_gqa: for another kind of attention",
    ):
        assert words in decode
    assert "int4 group 32 symmetric" in text
    assert "70272" in text
    assert "would not start" in text
    assert explain(kimi, "--hardware", "rtx-pro-6000x8-pcie") == text


def test_why_shows_one_decision_with_both_numbers_of_the_tile(kimi):
    text = explain(kimi, "--hardware", "rtx-pro-6000x8-pcie", "--why", "attention.prefill@100")
    assert text.startswith("attention.prefill@128 = triton_mla")
    assert "106496" in text
    assert "101376" in text
    assert "remedy: pip install flashinfer-python" in text
    assert "moe@" not in text


def test_why_in_json_is_the_decision_of_the_plan(kimi):
    one = json.loads(explain(kimi, "--hardware", "h200", "--why", "kv.page_size", "--json"))
    every = json.loads(explain(kimi, "--hardware", "h200", "--json"))["decisions"]
    assert one in every
    assert one["value"] == 64


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--why", "attention@1"), ("no such decision", "attention.decode@1..256")),
        (("--why", "moe@100000"), ("decided for 1 to 8192",)),
        (("--attention-backend", "flashmla"), ("--attention-backend flashmla", "SM 12.0")),
        (("--hardware", "h2000"), ("h2000", "b200x8-nvlink")),
        (("--max-model-len", "300000"), ("262144",)),
        (("--dtype", "int3"), ("unknown dtype",)),
    ],
)
def test_an_error_is_one_line_with_its_remedy_and_exit_code_2(kimi, args, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", kimi, "--hardware", "rtx-pro-6000x8-pcie", *args])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_model_that_needs_an_unknown_trait_is_refused_by_that_trait(tmp_path, capsys):
    path = folder(tmp_path / "sparse", {**lifted(), "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128})
    with pytest.raises(SystemExit):
        main(["explain", path, "--hardware", "h200"])
    assert "sparse" in capsys.readouterr().err


def test_a_path_that_is_not_there_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path / "nowhere" / "at" / "all")])
    assert "nowhere" in capsys.readouterr().err


def test_only_what_was_typed_is_called_asked(kimi):
    plan = json.loads(explain(kimi, "--hardware", "rtx-pro-6000x8-pcie", "--max-num-seqs", "256", "--json"))
    asked = {d["op"] for d in plan["decisions"] if d["how"] == "asked"}
    assert asked == {"max_num_seqs"}
    off = json.loads(explain(kimi, "--hardware", "h200", "--no-enable-prefix-caching", "--json"))
    decision = next(d for d in off["decisions"] if d["op"] == "enable_prefix_caching")
    assert (decision["value"], decision["how"]) == (False, "asked")


def test_every_engine_argument_is_a_flag():
    text = CliRunner().invoke(cli, ["explain", "--help"], terminal_width=200).output
    for name in EngineArgs.__dataclass_fields__:
        assert name == "model" or f"--{name.replace('_', '-')}" in text


def test_help_lists_every_verb():
    text = CliRunner().invoke(cli, ["--help"]).output
    assert "explain" in text
    assert "completion" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell):
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert "_PELLUCID_COMPLETE" in result.output


def test_explaining_imports_no_tensor_library(kimi):
    code = (
        "import sys; from pellucid.cli.main import cli;"
        f"cli.main(['explain', {kimi!r}, '--hardware', 'h200'], standalone_mode=False);"
        "print([m for m in ('torch', 'numpy', 'transformers', 'gguf', 'safetensors') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_a_program(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "pellucid.cli", "explain", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert "Traceback" not in run.stderr


def test_why_without_a_bucket_shows_the_smallest(kimi):
    assert explain(kimi, "--hardware", "h200", "--why", "moe") == explain(kimi, "--hardware", "h200", "--why", "moe@1")


def v3_like():
    """A sibling: 128 heads, fp8 experts."""
    config = {**lifted(), "num_attention_heads": 128, "num_key_value_heads": 128}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    return config


def test_diff_of_two_models_names_the_trait_that_changes_the_kernel(kimi, tmp_path):
    other = folder(tmp_path / "v3", v3_like())
    lines = explain(kimi, "--hardware", "b200x8-nvlink", "--diff", other).splitlines()
    assert lines[:2] == ["A  kimi on b200x8-nvlink", "B  v3 on b200x8-nvlink"]
    assert lines[2] == "what differs, and what it changes"
    experts = "  weights.routed_experts  int4 group 32 symmetric | fp8 block 128x128"
    assert any(line.startswith(experts) for line in lines)


def test_diff_of_two_machines_needs_only_the_name_of_the_other(kimi):
    text = explain(kimi, "--hardware", "b200x8-nvlink", "--diff", "rtx-pro-6000x8-pcie")
    assert "compute capability  10.0" in text
    assert "trtllm_mla for attention.prefill, attention.decode  (by compute capability)" in text


def test_diff_of_a_renamed_model_is_one_line(kimi, tmp_path):
    other = folder(tmp_path / "renamed", renamed())
    text = explain(kimi, "--hardware", "h200", "--diff", other)
    assert text.startswith("equal plans: ") and text.count("\n") == 1
    assert json.loads(explain(kimi, "--hardware", "h200", "--diff", other, "--json"))["equal"] is True


def test_stored_plans_can_be_shown_and_compared_with_each_other_and_with_a_model(kimi, tmp_path):
    for where in ("h200", "b200x8-nvlink"):
        (tmp_path / f"{where}.json").write_text(explain(kimi, "--hardware", where, "--json"))
    first, second = (str(tmp_path / f"{where}.json") for where in ("h200", "b200x8-nvlink"))
    assert explain(first) == explain(kimi, "--hardware", "h200")
    text = explain(first, "--diff", second)
    assert "A  h200.json" in text and "tensor_parallel_size" in text
    assert explain(first, "--diff", kimi, "--hardware", "h200").startswith("equal plans: ")
    served = tmp_path / "served.json"
    served.write_text(json.dumps({"plan": json.loads(Path(first).read_text()), "notes": []}))
    assert explain(first, "--diff", str(served)).startswith("equal plans: ")


def test_html_is_one_file_with_the_same_content(kimi, tmp_path):
    page = tmp_path / "plan.html"
    assert explain(kimi, "--hardware", "rtx-pro-6000x8-pcie", "--html", str(page)).startswith("wrote ")
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "attention.decode@1..256" in text and "triton_mla" in text
    explain(kimi, "--hardware", "rtx-pro-6000x8-pcie", "--diff", "h200", "--html", str(page))
    assert "What differs, and what it changes" in page.read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--why", "moe.decode_path@1"), ("no such decision; nearest: ", "decode_path")),
        (("--why", "flashmla"), ("flashmla is a candidate of attention.prefill, attention.decode",)),
        (("--diff", "no-such-thing"), ("--diff no-such-thing", "h200")),
        (("--why", "moe", "--diff", "h200"), ("leave out --diff",)),
        (("--html", "/no/such/folder/plan.html"), ("--html /no/such/folder/plan.html", "can't be written")),
    ],
)
def test_a_mistake_in_the_new_flags_is_one_line(kimi, args, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", kimi, "--hardware", "rtx-pro-6000x8-pcie", *args])
    err = capsys.readouterr().err
    assert stopped.value.code != 0
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_stored_plan_that_is_none_of_ours_is_refused_by_its_name(tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"decisions": [{"op": "x"}], "memory": {}}))
    with pytest.raises(SystemExit):
        main(["explain", str(path)])
    assert "old.json: not a plan of this version" in capsys.readouterr().err


def test_a_stored_plan_is_not_moved_to_another_machine(kimi, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(explain(kimi, "--hardware", "h200", "--json"))
    with pytest.raises(SystemExit):
        main(["explain", str(path), "--diff", "b200x8-nvlink"])
    assert "is a stored plan; give another, or a model" in capsys.readouterr().err


@pytest.fixture
def stored(kimi, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(explain(kimi, "--hardware", "h200", "--json"))
    return str(path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-num-seqs", "8"], "--max-num-seqs 8: plan.json is a stored plan"),
        (["--hardware", "h200"], "--hardware h200: plan.json is"),
        (["--hardware", "this"], "--hardware this: plan.json is"),
        (["--no-enable-prefix-caching", "--why", "moe"], "--no-enable-prefix-caching: plan.json is"),
        (["--measure", "off", "--dtype", "fp16", "--json"], "--dtype fp16 --measure off: plan.json is"),
        (["--max-num-seqs", "8", "--diff", "{stored}"], "--max-num-seqs 8: plan.json and plan.json are stored plans"),
    ],
)
def test_a_flag_that_can_not_change_a_stored_plan_is_refused_in_one_line(stored, flags, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", stored, *(flag.replace("{stored}", stored) for flag in flags)])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith(f"error: {named}") and err.count("\n") == 1
    assert "leave that out, or explain the model" in err


def test_flags_that_shape_the_output_of_a_stored_plan_stay_and_those_of_a_model_beside_it_too(stored, kimi, tmp_path):
    page = tmp_path / "plan.html"
    assert "moe@1" in explain(stored, "--why", "moe@1")
    assert json.loads(explain(stored, "--json", "--html", str(page)).partition("\n")[2])["decisions"]
    assert page.exists()
    assert explain(stored, "--diff", stored).startswith("equal plans: ")
    text = explain(stored, "--diff", kimi, "--hardware", "h200", "--max-num-seqs", "8")
    assert "B 8  asked: --max-num-seqs" in text
    text = explain(kimi, "--hardware", "h200", "--max-num-seqs", "8", "--diff", stored)
    assert "A 8  asked: --max-num-seqs" in text


def test_what_was_measured_on_this_machine_before_is_shown_with_its_errors(tmp_path, monkeypatch):
    from pellucid.hardware import load_hardware
    from pellucid.selection.evidence import Measurement
    from pellucid.tuning.session import undecided
    from pellucid.tuning.store import EvidenceStore, Provenance, Record

    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    if load_hardware("this").cpu.compiler is None:
        pytest.skip("one candidate alone runs here without a C++ compiler")
    asked = ("demo-mla", "--device", "cpu")
    plan = ExecutionPlan.from_json(json.loads(explain(*asked, "--json")))
    store = EvidenceStore.of(load_hardware("this"), "cpu")
    for question in undecided(plan):
        first, *others = question.order
        results = {first: Measurement(20e-6, 0.5e-6), **{name: Measurement(90e-6, 2e-6) for name in others}}
        store.add(Record(question, store.fingerprint, results, Provenance()))
    text = explain(*asked, "--why", "attention.decode@1")
    assert text.startswith("attention.decode@1 = cpu_native  (measured)")
    assert "20.0 ± 0.5 us *" in text and "90.0 ± 2.0 us" in text
    assert "the same for attention.decode@1..16" in text
    assert "(measured)" not in explain(*asked, "--why", "attention.decode@1", "--measure", "off")
    assert "equal plans" in explain(*asked, "--diff", "demo-mla")

"""`pellucid explain` as a user meets it: the answer, its reasons, errors in one line, and no heavy imports."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

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
        "not trtllm_mla: not built into this version; compiled for SM 10.0 or 10.3, this is SM 12.0",
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

"""`doctor` says what `serve` does: the same files and flags, and the same verdict, before any weight is read."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli
from pellucid.cli.serve import PACKAGES
from pellucid.core import PellucidError
from pellucid.doctor import diagnose as module
from pellucid.doctor.devices import DriverFacts
from pellucid.doctor.diagnose import Case, diagnose
from pellucid.doctor.report import Check, Report, render_report
from pellucid.hardware import load_hardware
from pellucid.models.hub import demo_mla
from pellucid.selection.args import EngineArgs
from pellucid.server.args import ServeArgs
from pellucid.server.launch import prepare
from tests.headers import CONFIGS

ANY_PORT = ServeArgs(port=0)


@pytest.fixture
def demo(tmp_path):
    """demo-mla as links, to be damaged."""
    folder = tmp_path / "demo"
    folder.mkdir()
    for path in demo_mla().iterdir():
        if path.suffix in (".json", ".safetensors"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def here():
    return load_hardware("this")


def report_of(model, hardware, flags=None, serve_args=ANY_PORT, is_here=True):
    return diagnose(Case(EngineArgs(str(model), **(flags or {})), serve_args, hardware, is_here, PACKAGES))


def starts(model, flags=None, serve_args=ANY_PORT):
    """What `serve` itself does with it, up to where it would start its engine."""
    try:
        prepare(EngineArgs(str(model), **(flags or {})), serve_args)
    except PellucidError:
        return False
    return True


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def rewrite(name, text):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)

    return change


def edit_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        rewrite("config.json", json.dumps({**config, **changes}))(folder)

    return change


def as_it_is(folder):
    pass


WEIGHTS = (*(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), "model.safetensors.index.json")

CASES = {
    "as it is": (as_it_is, {}, {}, True, ""),
    "no tokenizer": (remove("tokenizer.json"), {}, {}, True, "tokenizer"),
    "no weights": (remove(*WEIGHTS), {}, {}, False, "files"),
    "no weights, but drawn": (remove(*WEIGHTS), {"load_format": "synthetic"}, {}, True, ""),
    "a shard missing": (remove(WEIGHTS[1]), {}, {}, False, "files"),
    "config torn": (rewrite("config.json", "{"), {}, {}, False, "files"),
    "tokenizer torn": (rewrite("tokenizer.json", "{"), {}, {}, False, "server"),
    "trait missing": (edit_config(index_topk=64, index_n_heads=4, index_head_dim=64), {}, {}, False, "files"),
    "template missing": (as_it_is, {"chat_template": "/no/such/file"}, {}, False, "server"),
    "length too long": (as_it_is, {"max_model_len": 10**6}, {}, False, "flags"),
    "pages too many": (as_it_is, {"num_kv_pages": 10**9}, {}, False, "flags"),
    "kernel of another device": (as_it_is, {"device": "cpu", "attention_backend": "flashmla"}, {}, False, "flags"),
    "GPU that is not there": (as_it_is, {"device": "cuda"}, {}, False, "GPU"),
    "key file missing": (as_it_is, {}, {"api_key_file": "/no/such/file"}, False, "server"),
    "parser unknown": (as_it_is, {}, {"tool_call_parser": "nonsense"}, False, "server"),
    "plain torch asked for": (as_it_is, {"dtype": "bf16"}, {}, True, "slow path"),
}


@pytest.mark.parametrize("name", CASES)
def test_doctor_and_serve_agree_on_whether_it_starts(name, demo, here):
    change, flags, serving, expected, line = CASES[name]
    if name == "GPU that is not there" and here.gpus:
        pytest.skip("there is one")
    change(demo)
    serve_args = replace(ANY_PORT, **serving)
    report = report_of(demo, here, flags, serve_args)
    assert report.starts is starts(demo, flags, serve_args) is expected
    assert report.exit_code == (0 if expected else 1)
    failed = {check.name for check in report.checks if check.status == "fail"}
    assert (line in failed) if not expected else not failed
    if line and expected and not here.gpus:
        assert line in {check.name for check in report.checks if check.status == "warn"}
    assert all(check.remedy for check in report.checks if check.status in ("warn", "fail"))


def test_a_server_that_runs_already_is_found_by_its_port(demo, here):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        report = report_of(demo, here, serve_args=ServeArgs(port=taken.getsockname()[1]))
    assert [check.name for check in report.checks if check.status == "fail"] == ["port"]


def test_without_a_model_the_machine_alone_is_checked(here):
    report = report_of("", here)
    assert {check.group for check in report.checks} == {"host", "devices"}


def test_of_a_machine_that_is_not_here_the_host_is_not_checked_and_the_plan_is(tmp_path):
    report = report_of(CONFIGS / "DeepSeek-V2-Lite.json", load_hardware("h200"), is_here=False)
    assert report.starts
    assert {check.status for check in report.checks if check.group == "host"} == {"not checked"}
    assert any(check.name == "attention.decode@1..256" for check in report.checks)


def test_the_bill_says_what_weights_graphs_and_workspace_take_and_what_is_left():
    report = report_of(CONFIGS / "DeepSeek-V2-Lite.json", load_hardware("h200"), is_here=False)
    memory = {check.name: check.found for check in report.checks if check.group == "memory"}
    names = ["weights", "workspace", "graphs, runtime", "left for KV", "KV per token", "tokens that fit"]
    assert list(memory) == names
    assert memory["weights"].startswith("29.3 GiB") and "routed experts 26.8 GiB" in memory["weights"]
    assert memory["KV per token"].startswith("31104 B")
    assert memory["tokens that fit"] == "3291242, 20 requests of 163840 tokens"


def test_what_blocks_a_plan_is_named_by_its_op_with_a_remedy():
    report = report_of(CONFIGS / "Kimi-K2.5.json", load_hardware("h200"), is_here=False)
    failed = {check.name: check for check in report.checks if check.status == "fail"}
    assert failed.keys() == {"left for KV", "moe", "memory"}
    assert "more devices" in failed["left for KV"].remedy
    assert render_report(report).splitlines()[-1] == "would not start: left for KV, moe, memory"


def test_memory_that_another_program_holds_is_found_before_the_weights_load(monkeypatch):
    hardware = load_hardware("h200")
    facts = DriverFacts(free_bytes=(hardware.gpus[0].memory_bytes // 2,))
    monkeypatch.setattr(module, "read_driver_facts", lambda: facts)
    report = report_of(CONFIGS / "DeepSeek-V2-Lite.json", hardware, {"load_format": "synthetic"})
    (check,) = [check for check in report.checks if check.name == "free now"]
    assert check.status == "fail" and "--gpu-memory-utilization 0.5" in check.remedy


def test_weights_that_do_not_fit_the_disk_are_found_before_they_are_downloaded(tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    shutil.copy(CONFIGS / "DeepSeek-V2-Lite.json", snapshot / "config.json")
    index = snapshot / "model.safetensors.index.json"
    weight_map = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    monkeypatch.setattr(module, "resolve_model", lambda name, weights: snapshot)
    (snapshot / "model-00002-of-00002.safetensors").write_bytes(b"a part that is here")
    for size, status in ((1 << 30, "ok"), (1 << 60, "fail")):
        index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
        found = {check.name: check for check in report_of("owner/model", load_hardware("this")).checks}
        assert found["disk"].status == status
        assert "the first start downloads the weights" in found["files"].found


# --- the command --------------------------------------------------------------------------------


def test_the_command_ends_with_the_verdict_and_its_exit_code(demo):
    good = CliRunner().invoke(cli, ["doctor", str(demo), "--port", "0"])
    assert good.exit_code == 0
    assert good.output.splitlines()[-1].startswith("would start")
    bad = CliRunner().invoke(cli, ["doctor", str(CONFIGS / "Kimi-K2.5.json"), "--hardware", "rtx-pro-6000x8-pcie"])
    assert bad.exit_code == 1
    assert bad.output.splitlines()[-1] == "would not start: moe, all_reduce"


def test_json_has_every_line_and_the_verdict(demo):
    result = CliRunner().invoke(cli, ["doctor", str(demo), "--port", "0", "--json"])
    values = json.loads(result.output)
    assert values["starts"] is (result.exit_code == 0)
    assert {"group", "name", "status", "found", "remedy"} == values["checks"][0].keys()


def test_the_machine_is_checked_in_two_seconds_and_nothing_heavy_is_loaded():
    code = (
        "import sys; from pellucid.cli.main import cli;"
        "cli.main(['doctor', '--port', '0'], standalone_mode=False);"
        "print([m for m in ('torch', 'numpy', 'transformers', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.stdout.splitlines()[-1] == "[]"
    # Processor time: what others do on a busy machine is not the command's.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_a_model_is_checked_without_torch():
    code = (
        "import sys; from pellucid.cli.main import cli;"
        "cli.main(['doctor', 'demo-mla', '--port', '0'], standalone_mode=False);"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"


def test_what_was_not_checked_is_one_line_and_remedies_stand_below():
    checks = (
        Check("host", "a", "not checked", "elsewhere"),
        Check("host", "b", "not checked", "elsewhere"),
        Check("host", "c", "warn", "low", "raise it"),
    )
    lines = render_report(Report("model", checks)).splitlines()
    assert lines == [
        *("model", "host", "  not checked: a, b (elsewhere)", "  warn  c  low", "           remedy: raise it"),
        "would start; 1 warning",
    ]


def test_a_line_that_warns_has_to_say_what_to_do():
    with pytest.raises(ValueError, match="needs a remedy"):
        Check("host", "x", "warn", "bad")


def test_the_folder_of_a_config_is_enough_for_another_machine(tmp_path):
    shutil.copy(CONFIGS / "DeepSeek-V2-Lite.json", tmp_path / "config.json")
    assert report_of(tmp_path, load_hardware("h200"), is_here=False).starts

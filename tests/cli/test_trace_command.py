"""`pellucid trace` as a user meets it: what is asked of the tracer, what is printed, errors in one line."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pellucid.cli.main import cli, main
from pellucid.core import PellucidError
from pellucid.tracer import run
from pellucid.tracer.record import Decision, LogLine, Refusal, Site, Trace, trace_from_json
from pellucid.tracer.run import TraceRequest
from tests.tracer.fake_engine import VERSION, write_fake_engine, write_fake_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    return write_fake_engine(write_fake_engine(tmp_path / "site-packages"), "vllm")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path / "models" / "fake-v3")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TraceRequest]:
    """The requests that reach the tracer, which answers each by what was asked instead of running anything."""
    requests: list[TraceRequest] = []

    def answer(batch: Sequence[TraceRequest], progress: object = None) -> tuple[Trace, ...]:
        requests.extend(batch)
        return tuple(_answer(request) for request in batch)

    monkeypatch.setattr(run, "trace_many", answer)
    return requests


def _answer(request: TraceRequest) -> Trace:
    backend = "trtllm_mla" if request.gpu.sm == 100 else "triton"
    return Trace(
        engine=request.tree.engine,
        version=request.tree.version,
        model=request.model.name,
        architecture=request.architecture or "FakeV3ForCausalLM",
        gpu=str(request.gpu),
        flags=request.flags,
        decisions=(Decision("attention_backend", backend, "forced", "configuration"),),
        log=(LogLine("INFO", f"attention_backend='{backend}'", Site("sglang/srt/server_args.py", 1, "logger.info(")),),
    )


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, arguments)], catch_exceptions=False)


def test_an_engine_is_traced_on_the_machine_and_with_the_flags_that_were_named(
    site_packages: Path, model: Path, asked: list[TraceRequest]
) -> None:
    options = ("--model", model, "--gpu", "sm120x8-pcie", "--path", site_packages, "--tp", 4, "--env", "A=b=c")
    result = invoke("sglang", *options, "--as", "OtherForCausalLM", "--", "--attention-backend", "fa3", "--no")
    assert result.exit_code == 0
    (request,) = asked
    assert (request.tree.engine, request.tree.version, request.model) == ("sglang", VERSION, model)
    assert (request.gpu.sm, request.gpu.count, request.gpu.link) == (120, 8, "pcie")
    assert request.flags == ("--attention-backend", "fa3", "--no")
    assert (request.tensor_parallel, request.architecture, dict(request.environment)) == (
        4,
        "OtherForCausalLM",
        {"A": "b=c"},
    )
    assert f"sglang {VERSION}, fake-v3 (OtherForCausalLM) on rtxpro6000x8-pcie" in result.output
    assert "triton" in result.output


def test_json_is_a_trace_that_can_be_read_again_and_compared(
    site_packages: Path, model: Path, asked: list[TraceRequest], tmp_path: Path
) -> None:
    saved = []
    for gpu in ("b200", "h200"):
        result = invoke("sglang", "--model", model, "--gpu", gpu, "--path", site_packages, "--json")
        saved.append(tmp_path / f"{gpu}.json")
        saved[-1].write_text(result.stdout)
    assert trace_from_json(json.loads(saved[0].read_text())).decision("attention_backend").value == "trtllm_mla"
    shown = invoke("diff", "--saved", saved[0], "--saved", saved[1])
    direct = invoke("diff", "--engine", f"sglang@{site_packages}", "--model", model, "--gpu", "b200", "--gpu", "h200")
    assert shown.output == direct.output
    assert "trtllm_mla" in shown.output


def test_one_decision_the_log_and_the_html_report(
    site_packages: Path, model: Path, asked: list[TraceRequest], tmp_path: Path
) -> None:
    options = ("sglang", "--model", model, "--gpu", "b200", "--path", site_packages)
    one = json.loads(invoke(*options, "--field", "attention_backend", "--json").stdout)
    assert (one["field"], one["value"]) == ("attention_backend", "trtllm_mla")
    assert "attention_backend='trtllm_mla'" in invoke(*options, "--log").output
    report = tmp_path / "report.html"
    result = invoke(*options, "--html", report)
    assert (result.stdout, result.stderr) == ("", f"wrote {report}\n")
    assert report.read_text().lower().startswith("<!doctype html>")
    traced = len(asked)
    with pytest.raises(PellucidError, match=r"--html .*can't be written: there is no folder"):
        invoke(*options, "--html", tmp_path / "no" / "report.html")
    assert len(asked) == traced


def test_the_rename_test_compares_a_model_with_itself(
    site_packages: Path, model: Path, asked: list[TraceRequest]
) -> None:
    options = ("diff", "--engine", f"sglang@{site_packages}", "--model", model, "--gpu", "b200")
    assert invoke(*options, "--as", "OtherForCausalLM").exit_code == 0
    assert [request.architecture for request in asked] == [None, "OtherForCausalLM"]


def test_two_engines_are_compared_on_one_machine(site_packages: Path, model: Path, asked: list[TraceRequest]) -> None:
    engines = ("--engine", f"sglang@{site_packages}", "--engine", f"vllm@{site_packages}")
    assert invoke("diff", *engines, "--model", model, "--gpu", "h200x8").exit_code == 0
    assert [(request.tree.engine, request.gpu.count) for request in asked] == [("sglang", 8), ("vllm", 8)]


def test_a_folder_of_models_stands_for_each_of_them_once(
    site_packages: Path, model: Path, asked: list[TraceRequest]
) -> None:
    other = write_fake_model(model.parent / "fake-other")
    engines = ("--engine", f"sglang@{site_packages}")
    result = invoke("grid", *engines, "--model", model.parent, "--model", model, "--gpu", "b200", "--gpu", "h200")
    assert result.exit_code == 0
    expected = [(folder, gpu) for folder in (other, model) for gpu in ("b200", "h200")]
    assert [(request.model, str(request.gpu)) for request in asked] == expected
    values = json.loads(
        invoke("grid", *engines, "--model", model.parent, "--gpu", "b200", "--gpu", "h200", "--json").stdout
    )
    assert values["values"]["attention_backend"] == [["trtllm_mla", "triton"]] * 2


def test_preflight_ends_with_the_code_of_its_verdict(
    site_packages: Path, model: Path, asked: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("preflight", f"sglang@{site_packages}", "--model", model, "--gpu", "b200")
    assert invoke(*options).exit_code == 0
    answer = run.trace_many
    monkeypatch.setattr(
        run,
        "trace_many",
        lambda requests, progress: tuple(replace(one, refusal=Refusal("no kernel")) for one in answer(requests)),
    )
    refused = invoke(*options)
    assert refused.exit_code == 1
    assert "no kernel" in refused.output


@pytest.mark.parametrize(("ours", "code"), [(False, 1), (True, 3)])
def test_a_trace_that_did_not_reach_the_end_does_not_end_with_0(
    site_packages: Path,
    model: Path,
    asked: list[TraceRequest],
    monkeypatch: pytest.MonkeyPatch,
    ours: bool,
    code: int,
) -> None:
    answer, refusal = run.trace_many, Refusal("no kernel", ours=ours)
    monkeypatch.setattr(
        run, "trace_many", lambda batch, _: tuple(replace(one, refusal=refusal) for one in answer(batch))
    )
    options = ("sglang", "--model", model, "--gpu", "b200", "--path", site_packages)
    assert invoke(*options).exit_code == code
    assert json.loads(invoke(*options, "--json").stdout)["refusal"]["message"] == "no kernel"


def test_an_engine_s_verb_takes_the_name_that_the_other_verbs_take(
    site_packages: Path, model: Path, asked: list[TraceRequest]
) -> None:
    for named in (f"sglang@{site_packages}", f"vllm=={VERSION}@{site_packages}"):
        assert invoke(named, "--model", model, "--gpu", "b200").exit_code == 0
    assert [request.tree.engine for request in asked] == ["sglang", "vllm"]


def test_what_an_engine_says_can_not_command_the_terminal(
    site_packages: Path, model: Path, asked: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = run.trace_many
    line = LogLine("WARNING", "\x1b[2Jgone\nnext\r\x9b1m", Site("a.py", 1, "x"))
    monkeypatch.setattr(run, "trace_many", lambda batch, _: tuple(replace(one, log=(line,)) for one in answer(batch)))
    shown = invoke("sglang", "--model", model, "--gpu", "b200", "--path", site_packages, "--log").output
    assert r"\x1b[2Jgone" in shown
    assert not set(shown) & set("\x1b\r\x9b")
    shown = invoke("preflight", f"sglang@{site_packages}", "--model", model, "--gpu", "b200").output
    (warning,) = (one for one in shown.splitlines() if "it would warn" in one)
    assert "gone next" in warning


def test_gpus_that_the_engine_s_flags_ask_for_must_be_there(
    site_packages: Path, model: Path, asked: list[TraceRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("sglang", "--model", str(model), "--path", str(site_packages), "--gpu")
    for flags in (("--tp-size", "16"), ("--tp=16",), ("--tensor_parallel_size=16",)):
        with pytest.raises(SystemExit) as stopped:
            main(["trace", *options, "h200x8", "--", *flags])
        assert stopped.value.code
        assert "has 8 GPUs, but 16 are asked for" in capsys.readouterr().err
    assert invoke(*options, "h200x8", "--", "--tp-size", 16, "--nnodes", 2).exit_code == 0
    assert invoke(*options, "h200", "--", "--tp-size", 8).exit_code == 0
    assert [request.gpu.count for request in asked] == [8, 8]


def test_a_model_of_the_hub_is_the_folder_of_its_files(
    site_packages: Path, model: Path, asked: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.models.hub.resolve_model", lambda name, weights: model)
    options = ("--gpu", "b200", "--path", site_packages)
    for named in ("owner/fake-v3", model / "config.json"):
        assert invoke("sglang", "--model", named, *options).exit_code == 0
    assert [request.model for request in asked] == [model, model]


def test_verify_ends_with_1_where_the_log_says_otherwise(
    site_packages: Path, model: Path, asked: list[TraceRequest], tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    for backend, code in (("trtllm_mla", 0), ("triton", 1)):
        log.write_text(f"[2026-01-01 00:00:00] server_args=ServerArgs(attention_backend='{backend}', tp_size=1)\n")
        result = invoke("verify", log, f"sglang@{site_packages}", "--model", model, "--gpu", "b200")
        assert result.exit_code == code, result.output


def test_why_answers_about_one_field(site_packages: Path, model: Path, asked: list[TraceRequest]) -> None:
    result = invoke("why", f"sglang@{site_packages}", "attention_backend", "--model", model, "--gpu", "b200")
    assert "trtllm_mla" in result.output


def test_fetch_takes_a_wheel_and_says_where_its_sources_are(site_packages: Path, tmp_path: Path) -> None:
    wheel = tmp_path / f"sglang-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(site_packages.rglob("*")):
            if path.relative_to(site_packages).parts[0].startswith("sglang"):
                archive.write(path, path.relative_to(site_packages).as_posix())
    result = invoke("fetch", wheel)
    assert result.output.startswith(f"sglang {VERSION}: sources in {tmp_path / 'cache'}")
    assert "runs with transformers" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sglang", "--gpu", "h200"), "Missing option '--model'"),
        (("sglang", "--model", "{model}", "--gpu", "h200", "stray"), "engine's own flags go behind `--`"),
        (("sglang", "--model", "{model}", "--attention-backend", "fa3"), "No such option"),
        (("sglang", "--model", "{model}", "--gpu", "h999", "--version", "9.9"), "--gpu h999: no such GPU"),
        (("sglang", "--model", "{model}", "--gpu", "h200", "--path", "{model}"), "no sglang-*.dist-info"),
        (("sglang", "--model", "{model}", "--env", "A"), "give NAME=VALUE"),
        (("sglang", "--model", "{model}", "--gpu", "h200", "--version", "new"), "'new' is no version"),
        (("sglang", "--model", "/nonexistent", "--gpu", "h200"), "give a folder with a config.json, or a hub name"),
        (("sglang", "--model", "{site}", "--gpu", "h200"), "no readable config.json"),
        (("fetch", "nothere.whl"), "nothere.whl: no such wheel"),
        (("why", "llama.cpp", "x", "--model", "{model}", "--gpu", "h200"), "known: sglang, vllm"),
        (("audit", "sglang@{site}", "--model", "{site}", "--gpu", "h200"), "no config.json in it"),
        (("diff", "--model", "{model}"), "give --engine once or twice"),
        (("diff", "--engine", "sglang@{site}", "--model", "{model}", "--gpu", "h200"), "both sides are the same"),
        (("diff", "--saved", "{model}/config.json"), "give --saved twice"),
        (("diff", "--saved", "{model}/config.json", "--saved", "{model}/config.json"), "this is no trace"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_remedy(
    arguments: tuple[str, ...], message: str, site_packages: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [one.format(model=model, site=site_packages) for one in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(["trace", *given])
    assert stopped.value.code
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert printed.startswith("error: ")


def test_a_small_engine_is_traced_in_a_process_of_its_own(site_packages: Path, model: Path) -> None:
    loaded = set(sys.modules)
    options = ("--model", model, "--gpu", "b200x8", "--path", site_packages, "--level", "configuration")
    result = invoke("sglang", *options, "--json")
    found = trace_from_json(json.loads(result.stdout))
    assert found.decision("attention_backend").value == "trtllm_mla"
    assert found.decision("page_size").value == 64
    assert found.decision("mem_fraction_static").value == round(1 - 512 * 8 / 183359, 3)
    assert {"sglang", "transformers"} & (set(sys.modules) - loaded) == set()

"""`doctor --kernels` where seconds, memory, the machine or the plan do not let it: what is said, and what is spent."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli, main
from pellucid.cli.serve import PACKAGES
from pellucid.doctor import diagnose as diagnosing
from pellucid.doctor import kernels as module
from pellucid.doctor.devices import DriverFacts
from pellucid.doctor.diagnose import Case, diagnose
from pellucid.doctor.report import Report
from pellucid.engine.startup import open_model
from pellucid.hardware import load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.resolve import resolve
from pellucid.server.args import ServeArgs
from pellucid.tuning.gate import Probe
from pellucid.tuning.measure import CannotMeasureError
from pellucid.tuning.store import EvidenceStore
from tests.doctor.acting import Acting, StartsLate
from tests.doctor.simulated import (
    MINE,
    MOE,
    OTHER,
    bench_of,
    figures_of,
    kept,
    lines,
    run,
)
from tests.headers import CONFIGS
from tests.tuning.simulated import DoesNotStart, gpu_machine, resolver

ANY_PORT = ServeArgs(port=0)

MOONLIGHT = CONFIGS / "Moonlight-16B-A3B.json"

# --- what could not be run ----------------------------------------------------------------------


def test_a_child_that_does_not_start_is_a_warning_and_says_how_to_see_why():
    with Probe(DoesNotStart()) as probe:
        report = run(probe)
    (check,) = report.checks
    assert check.status == "warn" and "did not start" in check.found and "import torch" in check.remedy
    assert report.kernels == ()


def test_when_time_is_up_the_verdicts_stand_and_a_start_still_asks_what_was_not_timed(cache):
    report = run(bench_of(wrong={OTHER: "row 2 differs"}), measure_seconds=1)
    (late_line,) = [check for check in report.checks if "the seconds to measure were spent" in check.found]
    assert report.starts and (late_line.name, late_line.status) == ("not timed", "warn")
    assert late_line.remedy == "--measure-seconds above 1"
    late = figures_of(report, "moe", 64)
    assert late["why_not_run"] and {c["seconds"] for c in late["candidates"]} == {None}
    assert not any(line["skipped"] for line in kept(cache))


def places(text: str) -> set[str]:
    """`{moe@8, moe@64}` of `moe@8,64`."""
    return {f"{op}@{bucket}" for op, _, buckets in (one.partition("@") for one in text.split(", "))
            for bucket in buckets.split(",")}  # fmt: skip


def test_the_seconds_bound_gate_and_timing_and_one_line_names_what_is_left():
    bench = bench_of()
    report = run(bench, measure_seconds=1)
    longest = 0.1
    assert bench.clock.now <= 1 + longest
    timed = {one.decision.key for one in report.kernels if any(m.seconds for m in one.decision.measured)}
    late, ungated = lines(report, "warn")["not timed"].split("; not gated to the end: ")
    assert timed and places(late.partition(": ")[0]) == {one.decision.key for one in report.kernels} - timed
    unknown = {one.decision.key for one in report.kernels if len(one.right) < len(one.candidates)}
    assert places(ungated) == unknown and "moe@64" in unknown


def test_figures_of_a_lone_candidate_take_no_more_than_the_seconds_either():
    bench = bench_of()
    sample = bench.sample

    def slow(question, candidate):
        bench.clock.advance(5.0)
        return sample(question, candidate)

    bench.sample = slow
    report = run(bench, resolver(max_num_seqs=1, max_num_batched_tokens=1), measure_seconds=60)
    assert bench.clock.now < 60 + 6 and "linear.bf16@1" in lines(report, "warn")["not timed"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("act", ["hangs", "hangs later"])
def test_a_candidate_that_runs_when_the_seconds_end_is_ended_with_them_and_not_called_wrong(device, act, monkeypatch):
    acts = Acting(dict.fromkeys((MINE, MOE, "cpu_native"), act))
    monkeypatch.setattr(module, "Probe", lambda _bench: Probe(acts, check_deadline_s=20, default_deadline_s=20))
    begin = time.monotonic()
    report = run(None, resolver(max_num_seqs=1, max_num_batched_tokens=1, device=device), measure_seconds=1)
    assert time.monotonic() - begin < 6
    assert report.starts and lines(report, "warn").keys() == {"not timed"}


def test_a_child_that_starts_when_the_seconds_end_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "Probe", lambda _bench: Probe(StartsLate()))
    begin = time.monotonic()
    (check,) = run(None, measure_seconds=1).checks
    assert time.monotonic() - begin < 6
    assert check.found.startswith("not run: the seconds") and check.remedy == "--measure-seconds above 1"


def test_while_another_process_measures_none_is_run():
    bench = bench_of()
    with EvidenceStore.of(gpu_machine(), "cuda").alone():
        report = run(bench)
    assert bench.asked == [] and report.starts
    assert "another process measures" in lines(report, "warn")["numeric gate, speed"]
    assert run(bench).kernels


def test_want_of_memory_is_a_warning_and_nothing_is_said_of_the_candidates(cache):
    bench = bench_of()
    check = bench.check

    def crowded(question, candidate):
        if question.op == "moe":
            raise CannotMeasureError("there was not enough free memory")
        return check(question, candidate)

    bench.check = crowded
    report = run(bench)
    assert report.starts and "not enough free memory" in lines(report, "warn")["moe@1,8,64"]
    assert {c["right"] for c in figures_of(report, "moe", 8)["candidates"]} == {None}
    assert not any(line["op"] == "moe" for line in kept(cache))


# --- where none is run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([str(CONFIGS / "DeepSeek-V2-Lite.json"), "--hardware", "h200"], 0, "this is another machine"),
        (["demo-mla", "--max-model-len", "1000000"], 1, "there is no plan"),
    ],
)
def test_where_kernels_can_not_run_the_report_says_why_and_the_exit_code_is_that_of_the_rest(words, code, reason):
    result = CliRunner().invoke(cli, ["doctor", *words, "--kernels", "--port", "0"])
    assert result.exit_code == code
    assert f"not checked: numeric gate, speed ({reason}" in result.output


def diagnosed(monkeypatch, hardware, serve_args=ANY_PORT, model=MOONLIGHT, **flags) -> tuple[Report, list]:
    """The report on a config alone, on a machine that is said to be this one, and the traits at each run of kernels."""
    ran = []
    monkeypatch.setattr(module, "run_kernels", lambda *given: (ran.append(given[1]) or (), []))
    args = EngineArgs(str(model), **{"load_format": "synthetic", **flags})
    return diagnose(Case(args, serve_args, hardware, True, PACKAGES, kernels=True)), ran


def on_a_whole_host(monkeypatch, free_share: float) -> None:
    """A host that lacks nothing, whose GPUs have that share of their memory free."""
    facts = DriverFacts(tuple(int(gpu.memory_bytes * free_share) for gpu in gpu_machine().gpus))
    monkeypatch.setattr(diagnosing, "read_driver_facts", lambda: facts)
    monkeypatch.setattr(diagnosing, "_host", lambda *_: [])


@pytest.mark.parametrize(("free_share", "reason"), [(1.0, ""), (0.5, "not before free now above is mended")])
def test_kernels_are_run_on_a_device_that_nobody_else_holds(free_share, reason, monkeypatch):
    on_a_whole_host(monkeypatch, free_share)
    report, ran = diagnosed(monkeypatch, gpu_machine())
    # Those of a start, or it would not know its figures again.
    assert ran == ([] if reason else [open_model(str(MOONLIGHT), "synthetic").traits])
    assert lines(report, "not checked").get("numeric gate, speed", "") == reason


@pytest.mark.parametrize(
    ("model", "flags", "names"),
    [
        (CONFIGS / "Kimi-K2.5.json", {"load_format": None}, "moe, memory"),
        (MOONLIGHT, {"gpu_memory_utilization": 0.1}, "memory"),
        (MOONLIGHT, {"tensor_parallel_size": 2}, "all_reduce"),
    ],
)
def test_where_no_start_could_use_them_none_is_run_and_one_line_names_the_blockers(model, flags, names, monkeypatch):
    on_a_whole_host(monkeypatch, 1.0)
    machine = gpu_machine()
    machine = replace(machine, gpus=machine.gpus * flags.get("tensor_parallel_size", 1))
    report, ran = diagnosed(monkeypatch, machine, model=model, **flags)
    assert ran == [] and not report.starts
    assert set(names.split(", ")) <= lines(report, "fail").keys()
    (check,) = [check for check in report.checks if check.group == "kernels"]
    assert check.found == f"nothing was measured: `serve` would not start, see {names} above"


def test_ranks_that_could_start_together_are_not_measured_as_one(monkeypatch):
    on_a_whole_host(monkeypatch, 1.0)
    monkeypatch.setattr(diagnosing, "resolve", lambda *given, **more: replace(resolve(*given, **more), blockers=()))
    machine = gpu_machine()
    report, ran = diagnosed(monkeypatch, replace(machine, gpus=machine.gpus * 2), tensor_parallel_size=2)
    found = lines(report, "not checked")["numeric gate, speed"]
    assert ran == [] and found == "2 ranks: this version measures the kernels of one alone"


def test_a_port_in_use_keeps_no_kernel_from_being_run(tiny, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = ServeArgs(port=taken.getsockname()[1])
        report, ran = diagnosed(monkeypatch, load_hardware("this"), port, tiny, device="cpu")
    assert "port" in lines(report, "fail") and len(ran) == 1


def test_a_device_that_is_not_there_is_named_before_its_kernels_are_asked_for():
    if load_hardware("this").gpus:
        pytest.skip("there is one")
    result = CliRunner().invoke(cli, ["doctor", "demo-mla", "--kernels", "--device", "cuda", "--port", "0"])
    assert result.exit_code == 1
    assert "not checked: numeric gate, speed (not before GPU above is mended)" in result.output


def test_kernels_without_a_model_have_no_shapes(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--kernels"])
    assert ended.value.code == 2
    assert "name MODEL too" in capsys.readouterr().err

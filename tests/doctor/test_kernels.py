"""`doctor --kernels`: every candidate is gated and timed, what is wrong is named, and the exit code says it."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli, main
from pellucid.cli.serve import PACKAGES
from pellucid.doctor import diagnose as diagnosing
from pellucid.doctor import kernels as module
from pellucid.doctor.devices import DriverFacts
from pellucid.doctor.diagnose import Case, diagnose
from pellucid.doctor.kernels import every_question, run_kernels
from pellucid.doctor.report import Report, render_report
from pellucid.engine.startup import make_plan, open_model
from pellucid.hardware import load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from pellucid.server.args import ServeArgs
from pellucid.tuning import store
from pellucid.tuning.gate import Probe
from pellucid.tuning.measure import CannotMeasureError
from pellucid.tuning.pool import ProbePool
from pellucid.tuning.session import undecided
from pellucid.tuning.start import tune_plan
from tests import checkpoints
from tests.doctor.acting import Acting
from tests.headers import CONFIGS
from tests.selection.models import INT4, V2_LITE
from tests.tuning.simulated import TWO_BUILT, DoesNotStart, SimulatedBench, gpu_machine, resolver

MINE, OTHER = "triton_mla", "flashinfer_mla"
MOE, OTHER_MOE = "triton_fused", "flashinfer_cutlass"

ANY_PORT = ServeArgs(port=0)

SLOW = {MINE: 100.0, OTHER: 150.0, MOE: 100.0, OTHER_MOE: 150.0, "reference": 900.0}
"""The defaults are fastest."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not through the environment: kernels that are built already stay where they are.
    monkeypatch.setattr(store, "cache_dir", tmp_path.joinpath)
    return tmp_path / "evidence"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("v2lite", tmp_path_factory.mktemp("tiny"))


TINY = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "4", "--port", "0",
        "--num-kv-pages", "16")  # fmt: skip


def bench_of(times=None, wrong=None, **settings) -> SimulatedBench:
    return SimulatedBench({**SLOW, **(times or {})}, wrong or {}, **settings)


def run(bench, make=None, traits=V2_LITE, **flags) -> Report:
    """On a card with two candidates of attention and of experts, beside the reference."""
    args = EngineArgs("model", **flags)
    clock = getattr(bench, "clock", None)
    resolved = make or resolver(**{k: v for k, v in flags.items() if k.endswith("backend")})
    figures, checks = run_kernels(
        args, traits, gpu_machine(), resolved, None, bench, **({"clock": clock} if clock else {})
    )
    return Report("simulated", tuple(checks), figures)


def lines(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.found for check in report.checks if check.status == status}


def kept(cache: Path) -> list[dict]:
    return [json.loads(line) for path in cache.glob("*.jsonl") for line in path.read_text().splitlines()]


def figures_of(report: Report, op: str, bucket: int) -> dict:
    (found,) = [one.to_json() for one in report.kernels if (one.decision.op, one.decision.bucket) == (op, bucket)]
    return found


# --- what is run --------------------------------------------------------------------------------


def test_each_op_is_looked_at_in_one_row_in_eight_in_the_largest_decode_step_in_chunks_and_in_the_largest_step():
    plan = resolver(max_num_seqs=64, max_num_batched_tokens=2048)({})
    found: dict[str, list[int]] = {}
    for question in every_question(plan):
        found.setdefault(question.op, []).append(question.bucket)
    assert found == {
        "attention.prefill": [512, 2048],
        "attention.decode": [1, 8, 64],
        "moe": [1, 8, 64, 512, 2048],
        "linear.bf16": [1, 8, 64, 512, 2048],
    }
    # Of what a start leaves open they are a start's own questions: it finds their figures.
    assert set(undecided(plan)) & set(every_question(plan)) == {
        q for q in every_question(plan) if plan.decision(q.op, q.bucket).how == "default"
    }


def test_every_candidate_that_fits_is_timed_whatever_the_plan_takes():
    asked = run(bench_of(), attention_backend=OTHER)
    for report in (run(bench_of()), asked):
        assert report.starts and not lines(report, "warn")
        for op, names in (("attention.decode", {MINE, OTHER, "reference"}), ("moe", {MOE, OTHER_MOE, "reference"})):
            found = figures_of(report, op, 8)
            assert {c["name"] for c in found["candidates"] if c["right"] and c["seconds"] > 0} == names
    assert figures_of(asked, "attention.decode", 8)["chosen"] == OTHER


def test_a_candidate_without_rivals_is_timed_too_and_not_kept_for_nobody_asks(cache):
    report = run(bench_of({"reference": 7.0}))
    (candidate,) = figures_of(report, "linear.bf16", 8)["candidates"]
    assert candidate["right"] and candidate["chosen"] and candidate["seconds"] == pytest.approx(7e-6)
    assert not any(line["op"].startswith("linear") for line in kept(cache))
    lone = run(bench_of(wrong={"reference": "row 0 differs"}))
    assert lone.exit_code == 1 and "linear.bf16@1,8,64" in lines(lone, "fail")


def test_what_is_fastest_is_marked_as_taken_and_the_table_has_each_bucket():
    report = run(bench_of({f"attention.decode {OTHER}@8": 40.0}))
    assert figures_of(report, "attention.decode", 8)["chosen"] == OTHER
    assert figures_of(report, "attention.decode", 1)["chosen"] == MINE
    text = render_report(report)
    assert f"  attention.decode@8  {OTHER}\n" in text and "40.0 ± 0.0 us *" in text


def test_weights_that_can_not_be_drawn_are_named_and_not_run():
    traits = replace(V2_LITE, weights=replace(V2_LITE.weights, routed_experts=INT4))
    backends = [replace(b, built_in=True) if b.name in TWO_BUILT else b for b in discover()]
    args = EngineArgs("model", max_num_seqs=8, max_num_batched_tokens=8)
    bench = bench_of()
    report = run(bench, partial(resolve, args, traits, gpu_machine(), backends=backends), traits)
    (name,) = lines(report, "not checked")
    assert name == "moe@1,8" and "only dense ones" in lines(report, "not checked")[name]
    assert not any(key.startswith("moe") for key, _ in bench.asked) and report.starts


# --- what is wrong ------------------------------------------------------------------------------


def test_a_wrong_rival_is_a_warning_that_names_it_its_buckets_and_the_words_of_the_gate():
    report = run(bench_of(wrong={OTHER_MOE: "row 2 differs by 0.5 of the reference"}))
    assert report.exit_code == 0
    assert lines(report, "warn") == {
        "moe@1,8,64": f"{OTHER_MOE} fails the numeric gate: row 2 differs by 0.5 of the reference; {MOE} runs there"
    }
    assert "wrong: row 2 differs" in render_report(report)
    found = {c["name"]: c for c in figures_of(report, "moe", 8)["candidates"]}[OTHER_MOE]
    assert (found["right"], found["seconds"], found["detail"]) == (False, None, "row 2 differs by 0.5 of the reference")


def test_a_wrong_default_gives_way_to_the_next_that_is_right_and_a_start_agrees(cache):
    report = run(bench_of(wrong={MOE: "row 0 is not finite"}))
    assert report.starts
    assert lines(report, "warn")["moe@1,8,64"].endswith(f"{OTHER_MOE} runs there")
    started = tune_plan(EngineArgs("model"), V2_LITE, gpu_machine(), resolver(), {}, measure=False)
    assert started.plan.backends("moe") == {OTHER_MOE}


@pytest.mark.parametrize(
    ("wrong", "flags", "words"),
    [
        ((MOE, OTHER_MOE, "reference"), {}, "no other that fits is right"),
        ((MOE,), {"moe_backend": MOE}, f"--moe-backend {MOE} runs it all the same"),
        ((MOE,), {"measure": "off"}, "--measure off runs it all the same"),
        ((MOE, OTHER_MOE, "reference"), {"measure": "off"}, "no other that fits is right"),
    ],
)
def test_where_the_plan_would_run_what_is_wrong_it_does_not_start(wrong, flags, words):
    report = run(bench_of(wrong=dict.fromkeys(wrong, "row 2 differs")), **flags)
    assert report.exit_code == 1
    (found,) = {check.found.partition("; ")[2] for check in report.checks if check.status == "fail"}
    assert found == words
    assert all(check.remedy for check in report.checks if check.status == "fail")
    if len(wrong) == 1:
        assert all("--moe-backend" in check.remedy for check in report.checks if check.status == "fail")


def test_experts_have_one_form_of_weights_so_that_each_wrong_somewhere_leaves_none():
    bench = bench_of()
    right = {(MOE, 1), (OTHER_MOE, 8), ("reference", 64)}
    check = bench.check
    bench.check = lambda q, c: "row 1 differs" if q.op == "moe" and (c, q.bucket) not in right else check(q, c)
    report = run(bench)
    assert report.exit_code == 1 and figures_of(report, "moe", 1)["chosen"] is None
    assert all("no other that fits is right" in found for found in lines(report, "fail").values())


@pytest.mark.parametrize(
    ("act", "words"),
    [("hangs", "hung: no answer within"), ("crashes", "crashed: signal SIGABRT"), ("raises", "raised ValueError")],
)
def test_a_candidate_that_hangs_or_crashes_ends_its_child_and_the_report_goes_on(act, words):
    make = resolver(max_num_seqs=1, max_num_batched_tokens=1)
    with Probe(Acting({OTHER: act, MOE: act}), check_deadline_s=0.3, default_deadline_s=0.3) as probe:
        report = run(probe, make)
    warned = lines(report, "warn")
    assert report.starts and warned.keys() == {"attention.prefill@1", "attention.decode@1", "moe@1"}
    assert f"{OTHER} fails the numeric gate: {words}" in warned["attention.decode@1"]
    assert "runs there" in warned["moe@1"] and figures_of(report, "moe", 1)["chosen"] != MOE
    assert any(c["seconds"] for c in figures_of(report, "moe", 1)["candidates"])


def test_on_a_card_candidates_are_compiled_many_at_once_and_what_fails_there_is_asked_again_alone(monkeypatch):
    class Crowded(ProbePool):
        def check_all(self, pairs, go_on):
            return super().check_all(pairs, go_on) | {pair: "raised: no memory" for pair in pairs if pair[1] == MINE}

    monkeypatch.setattr(module, "Probe", lambda _bench: Probe(Acting({OTHER: "wrong"})))
    monkeypatch.setattr(module, "ProbePool", Crowded)
    report = run(None, resolver(max_num_seqs=1, max_num_batched_tokens=1))
    warned = lines(report, "warn")
    assert warned.keys() == {"attention.prefill@1", "attention.decode@1"}
    assert all(found.startswith(f"{OTHER} fails the numeric gate: row 2 differs") for found in warned.values())
    assert MINE in lines(report, "ok")["attention.decode@1"]


def test_a_candidate_that_fails_while_it_is_timed_is_wrong_too():
    report = run(bench_of(wrong={f"{OTHER} later": "crashed: signal SIGSEGV"}))
    assert report.starts and "signal SIGSEGV" in lines(report, "warn")["attention.decode@1,8"]


# --- what could not be run ----------------------------------------------------------------------


def test_a_child_that_does_not_start_is_a_warning_and_says_how_to_see_why():
    with Probe(DoesNotStart()) as probe:
        report = run(probe)
    (check,) = report.checks
    assert check.status == "warn" and "did not start" in check.found and "import torch" in check.remedy
    assert report.kernels == ()


def test_when_time_is_up_the_verdicts_stand_and_a_start_still_asks_what_was_not_timed(cache):
    report = run(bench_of(wrong={OTHER: "row 2 differs"}), measure_seconds=1)
    warned = [check for check in report.checks if "the seconds to measure were spent" in check.found]
    assert warned and all("--measure-seconds above 1" in check.remedy for check in warned)
    assert report.starts and any("not timed" in check.found for check in warned)
    late = figures_of(report, "moe", 64)
    assert late["why_not_run"] and {c["seconds"] for c in late["candidates"]} == {None}
    assert not any(line["skipped"] for line in kept(cache))


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


# --- what is kept -------------------------------------------------------------------------------


def test_figures_are_kept_for_starts_and_for_the_next_run_that_takes_what_is_known(cache):
    first = run(bench_of())
    assert len(kept(cache)) == len({line["op"] + str(line["bucket"]) for line in kept(cache)}) > 5
    started = tune_plan(EngineArgs("model"), V2_LITE, gpu_machine(), resolver(), {}, measure=False).plan
    assert [started.decision("moe", bucket).how for bucket in (1, 2, 8)] == ["measured", "default", "measured"]
    bench = bench_of({OTHER: 1.0})
    assert run(bench, measure="cached").kernels == first.kernels
    # What has no rivals was never compared, and is timed each time.
    assert {key.partition("@")[0] for key, _ in bench.asked} == {"linear.bf16"}
    assert run(bench).kernels != first.kernels


def test_what_a_start_had_no_time_for_is_asked_also_where_known_figures_are_taken(cache):
    start = bench_of()
    args = EngineArgs("model", measure="cached", measure_seconds=1)
    tune_plan(args, V2_LITE, gpu_machine(), resolver(), {}, True, bench=start, clock=start.clock)
    assert any(line["skipped"] for line in kept(cache))
    bench = bench_of(wrong={OTHER_MOE: "row 2 differs"})
    report = run(bench, measure="cached")
    assert any(OTHER_MOE in found for found in lines(report, "warn").values())
    assert all(c["seconds"] or not c["right"] for one in report.kernels for c in one.to_json()["candidates"])


def test_a_key_on_the_command_line_is_not_in_what_is_kept(cache, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pellucid", "doctor", "--api-key", "sk-secret"])
    run(bench_of(), measure_seconds=600)
    commands = {line["command"] for line in kept(cache)}
    assert commands == {"pellucid doctor model --kernels --measure-seconds 600"}


# --- the command --------------------------------------------------------------------------------


def test_the_kernels_of_a_cpu_are_gated_and_timed_in_a_child_and_starts_know_it(tiny, cache):
    result = CliRunner().invoke(cli, ["doctor", str(tiny), "--kernels", "--json", *TINY])
    values = json.loads(result.stdout)
    assert result.exit_code == 0 and values["starts"]
    ops = {(one["op"], one["bucket"]) for one in values["kernels"]}
    assert ops == {("attention.prefill", 4), ("attention.decode", 1), ("attention.decode", 2)} | {
        (op, bucket) for op in ("moe", "linear.fp32") for bucket in (1, 2, 4)
    }
    for one in values["kernels"]:
        assert [c["name"] for c in one["candidates"]] == ["cpu_native", "reference"]
        assert all(c["right"] and c["seconds"] > 0 and c["error"] >= 0 for c in one["candidates"])
        assert [c["name"] for c in one["candidates"] if c["chosen"]] == [one["chosen"]]
    flags = {"device": "cpu", "threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 4, "num_kv_pages": 16}
    plan = make_plan(EngineArgs(str(tiny), **flags), open_model(str(tiny)))
    assert plan.decision("attention.decode", 1).measured
    shown = CliRunner().invoke(cli, ["doctor", str(tiny), "--kernels", "--measure", "cached", *TINY])
    assert shown.exit_code == 0 and "us *" in shown.stdout and "± half of the 95 % interval" in shown.stdout


def test_where_nothing_right_is_left_the_command_ends_with_one(tiny, monkeypatch):
    wrong = {"cpu_native": "row 2 differs", "reference": "row 3 differs"}
    monkeypatch.setattr(module, "Probe", contextmanager(lambda _bench: iter([SimulatedBench({}, wrong)])))
    result = CliRunner().invoke(cli, ["doctor", str(tiny), "--kernels", *TINY])
    assert result.exit_code == 1
    assert "cpu_native fails the numeric gate: row 2 differs" in result.output
    assert result.output.splitlines()[-1].startswith("would not start: ")


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


def diagnosed(monkeypatch, hardware, serve_args=ANY_PORT, **flags) -> tuple[Report, list]:
    """The report on a config alone, on a machine that is said to be this one, and the traits at each run of kernels."""
    ran = []
    monkeypatch.setattr(module, "run_kernels", lambda *given: (ran.append(given[1]) or (), []))
    args = EngineArgs(str(CONFIGS / "Moonlight-16B-A3B.json"), load_format="synthetic", **flags)
    return diagnose(Case(args, serve_args, hardware, True, PACKAGES, kernels=True)), ran


def on_a_whole_host(monkeypatch, free_share: float) -> None:
    """A host that lacks nothing, whose GPUs have that share of their memory free."""
    facts = DriverFacts(tuple(int(gpu.memory_bytes * free_share) for gpu in gpu_machine().gpus))
    monkeypatch.setattr(diagnosing, "read_driver_facts", lambda: facts)
    monkeypatch.setattr(diagnosing, "_host", lambda *_: [])


@pytest.mark.parametrize(
    ("free_share", "flags", "reason"),
    [
        (1.0, {}, ""),
        (0.5, {}, "not before free now above is mended"),
        (1.0, {"tensor_parallel_size": 2}, "2 ranks: this version measures the kernels of one alone"),
    ],
)
def test_kernels_are_run_on_one_rank_of_a_device_that_nobody_else_holds(free_share, flags, reason, monkeypatch):
    on_a_whole_host(monkeypatch, free_share)
    machine = gpu_machine()
    machine = replace(machine, gpus=machine.gpus * flags.get("tensor_parallel_size", 1))
    report, ran = diagnosed(monkeypatch, machine, **flags)
    # Those of a start, or it would not know its figures again.
    assert ran == ([] if reason else [open_model(str(CONFIGS / "Moonlight-16B-A3B.json"), "synthetic").traits])
    assert lines(report, "not checked").get("numeric gate, speed", "") == reason


def test_a_port_in_use_keeps_no_kernel_from_being_run(tiny, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = ServeArgs(port=taken.getsockname()[1])
        report, ran = diagnosed(monkeypatch, load_hardware("this"), port, device="cpu")
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

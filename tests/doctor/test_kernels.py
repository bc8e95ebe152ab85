"""`doctor --kernels`: every candidate is gated and timed, what is wrong is named, and the exit code says it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from pellucid.cli.main import cli
from pellucid.doctor import kernels as module
from pellucid.doctor.kernels import every_question
from pellucid.doctor.report import render_report
from pellucid.engine.startup import make_plan, open_model
from pellucid.selection.args import EngineArgs
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from pellucid.traits.backend import ANY
from pellucid.tuning.gate import Probe
from pellucid.tuning.pool import ProbePool
from pellucid.tuning.session import undecided
from pellucid.tuning.start import tune_plan
from tests.doctor.acting import Acting
from tests.doctor.simulated import (
    MINE,
    MOE,
    OTHER,
    OTHER_MOE,
    TINY,
    TINY_FLAGS,
    bench_of,
    figures_of,
    kept,
    lines,
    run,
)
from tests.selection.models import INT4, V2_LITE
from tests.tuning.simulated import TWO_BUILT, SimulatedBench, gpu_machine, resolver

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
    backends = [replace(b, built_in=True, prepares=ANY) if b.name in TWO_BUILT else b for b in discover()]
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
    plan = make_plan(EngineArgs(str(tiny), **TINY_FLAGS), open_model(str(tiny)))
    assert plan.decision("attention.decode", 1).measured
    shown = CliRunner().invoke(cli, ["doctor", str(tiny), "--kernels", "--measure", "cached", *TINY])
    assert shown.exit_code == 0 and "us *" in shown.stdout and "± half of the 95 % interval" in shown.stdout


def test_where_nothing_right_is_left_the_command_ends_with_one_until_it_is_run_on_mended_kernels(tiny, monkeypatch):
    def doctor(wrong):
        monkeypatch.setattr(module, "Probe", contextmanager(lambda _bench: iter([SimulatedBench({}, wrong)])))
        return CliRunner().invoke(cli, ["doctor", str(tiny), "--kernels", *TINY])

    broken = doctor({"cpu_native": "row 2 differs", "reference": "row 3 differs"})
    assert broken.exit_code == 1
    assert "cpu_native fails the numeric gate: row 2 differs" in broken.output
    assert broken.output.splitlines()[-1].startswith("would not start: ")
    # What is kept of them blocks the plan, and not the command that finds out anew.
    assert CliRunner().invoke(cli, ["doctor", str(tiny), *TINY]).exit_code == 1
    assert doctor({}).exit_code == 0


def test_the_plan_above_the_figures_is_the_one_that_a_start_makes_of_them(tiny, monkeypatch):
    wrong = {"cpu_native": "row 2 differs"}
    monkeypatch.setattr(module, "Probe", contextmanager(lambda _bench: iter([SimulatedBench({}, wrong)])))
    result = CliRunner().invoke(cli, ["doctor", str(tiny), "--kernels", "--json", *TINY])
    moe = [check for check in json.loads(result.stdout)["checks"] if check["name"].startswith("moe@1..")]
    assert [check["found"] for check in moe if check["group"] == "plan"] == ["reference  (measured)"]

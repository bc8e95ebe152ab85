"""From what a plan leaves open to measured choices: the plan is right whatever the candidates do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.hardware import load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from pellucid.tuning.measure import Budget, CannotMeasureError
from pellucid.tuning.session import Session, Tuned, tune, undecided
from pellucid.tuning.step_choices import apply_choices, traits_of
from tests.selection.models import V2_LITE, kinds
from tests.tuning.simulated import SimulatedBench, gpu_machine, resolver, store_at

MINE, OTHER = "triton_mla", "flashinfer_mla"
MOE, OTHER_MOE = "triton_fused", "flashinfer_cutlass"

LAYERED = resolver(decode_path="layered")
"""Decode attention is one kernel of many there, so that a faster one is worth taking."""

EQUAL = {MINE: 100.0, OTHER: 100.0, MOE: 100.0, OTHER_MOE: 100.0, "reference": 900.0, "default": 500.0, "measured": 500}


def measured(folder: Path, bench: SimulatedBench | None, make=LAYERED, **session) -> Tuned:
    clock = SimulatedBench({}).clock if bench is None else bench.clock
    budget = Budget(session.pop("seconds", 600.0), clock)
    return tune(make, Session(session.pop("store", None) or store_at(folder), bench, budget, **session))


def bench_of(times: Mapping[str, float], wrong: Mapping[str, str] | None = None, **settings) -> SimulatedBench:
    return SimulatedBench({**EQUAL, **times}, wrong or {}, **settings)


def decode(tuned: Tuned, bucket: int = 1):
    return tuned.plan.decision("attention.decode", bucket)


def test_a_faster_candidate_is_chosen_in_its_bucket_alone(tmp_path):
    found = measured(tmp_path, bench_of({f"attention.decode {OTHER}@8": 50, "measured": 400}))
    assert (decode(found, 8).value, decode(found, 8).how) == (OTHER, "measured")
    assert kinds(decode(found, 8), MINE) == {"slower"}
    assert {decode(found, bucket).value for bucket in (1, 2, 4)} == {MINE}
    assert decode(found, 1).how == "measured"


def test_when_the_default_is_best_the_plan_is_the_default_one_with_its_figures(tmp_path):
    found = measured(tmp_path, bench_of({OTHER: 150, OTHER_MOE: 150}))
    assert [d.value for d in found.plan.decisions] == [d.value for d in LAYERED({}).decisions]
    assert decode(found).how == "measured"
    assert found.notes == ()


def test_a_tie_keeps_the_default(tmp_path):
    found = measured(tmp_path, bench_of({OTHER: 98.6}))
    assert decode(found).value == MINE
    assert kinds(decode(found), OTHER) == {"order"}


@pytest.mark.parametrize("reason", ["row 3 differs by 0.4", "hung: no answer within 9 s", "crashed: signal SIGSEGV"])
def test_a_fast_candidate_that_fails_the_gate_is_not_chosen_and_the_plan_says_why(tmp_path, reason):
    found = measured(tmp_path, bench_of({OTHER: 1}, {OTHER: reason}))
    assert decode(found).value == MINE
    rejected = next(r for r in decode(found).rejected if r.candidate == OTHER)
    assert [m.kind for m in rejected.misfits] == ["numerics"]
    assert reason in rejected.misfits[0].reason


def test_a_default_that_is_wrong_gives_way_whatever_the_step_says(tmp_path):
    found = measured(tmp_path, bench_of({"measured": 9000}, {MINE: "NaN"}))
    assert decode(found).value == OTHER
    assert any("numeric gate" in line for line in decode(found).because)


def test_experts_that_are_wrong_at_one_bucket_serve_none(tmp_path):
    bench = bench_of({})
    check = bench.check
    bench.check = lambda q, c: "row 0 differs" if (q.op, q.bucket, c) == ("moe", 64, MOE) else check(q, c)
    found = measured(tmp_path, bench)
    assert found.plan.backends("moe") == {OTHER_MOE}


def test_experts_that_win_at_some_buckets_alone_are_not_taken_for_weights_have_one_form(tmp_path):
    found = measured(tmp_path, bench_of({f"moe {OTHER_MOE}@64": 50, "measured": 400}))
    assert found.plan.backends("moe") == {MOE}
    assert any("their weights lie differently" in note for note in found.notes)
    everywhere = measured(tmp_path / "all", bench_of({OTHER_MOE: 50, "measured": 400}))
    assert everywhere.plan.backends("moe") == {OTHER_MOE}


def test_choices_that_make_the_step_slower_are_taken_back_and_the_plan_is_the_default_again(tmp_path):
    bench = bench_of({f"attention.decode {OTHER}@8": 50, f"attention.decode {OTHER}@4": 50, "measured@8": 560})
    found = measured(tmp_path, bench)
    assert decode(found, 8).value == MINE
    assert decode(found, 4).value == OTHER
    assert [note for note in found.notes if "step.decode@8" in note and "560" in note and "500" in note]
    assert not any("step.decode@4" in note for note in found.notes)
    # Its figures are still shown, and why they decide nothing.
    assert any(line.endswith(f"measured, but taken back: {found.notes[0]}") for line in decode(found, 8).because)
    assert {m.candidate for m in decode(found, 8).measured if m.taken_back} >= {MINE, OTHER}
    assert not any(m.taken_back for m in decode(found, 4).measured)


def test_a_choice_for_one_bucket_that_slows_another_is_taken_back(tmp_path):
    """Another decode backend means the layered path, at every bucket."""
    fused = resolver()
    bench = bench_of({f"attention.decode {OTHER}@8": 50, "step.decode measured@8": 400, "step.decode measured@1": 900})
    found = measured(tmp_path, bench, fused)
    assert found.plan.decode_path == "fused"
    assert {decode(found, bucket).value for bucket in (1, 2, 4, 8)} == {MINE}
    assert any("step.decode@1" in note for note in found.notes)
    # Refused in one round after the other, it is told once.
    assert len(set(found.notes)) == len(found.notes)


def test_a_step_confirms_that_is_not_slower_beyond_the_error(tmp_path):
    times = {f"attention.decode {OTHER}@8": 50, "measured": 501}
    found = measured(tmp_path, bench_of(times, noise=0.02))
    assert decode(found, 8).value == OTHER
    slower = measured(tmp_path / "slower", bench_of(times))
    assert decode(slower, 8).value == MINE


def test_a_step_that_fails_is_not_taken(tmp_path):
    bench = bench_of({f"attention.decode {OTHER}@8": 50}, {"measured": "raised RuntimeError: out of memory"})
    found = measured(tmp_path, bench)
    assert decode(found, 8).value == MINE
    assert any("out of memory" in note for note in found.notes)


def test_two_starts_give_the_same_plan_and_the_second_measures_nothing(tmp_path):
    fast = {f"attention.decode {OTHER}@8": 50, f"moe {OTHER_MOE}@64": 20, "measured@8": 560}
    first = measured(tmp_path, bench_of(fast, noise=0.02))
    second_bench = bench_of({OTHER: 1.0, OTHER_MOE: 1.0})
    second = measured(tmp_path, second_bench)
    assert second.plan == first.plan
    assert second_bench.asked == []
    # Nor does a process that may not measure, as the API's.
    assert measured(tmp_path, None).plan == first.plan


def test_twenty_noisy_starts_flip_no_decision(tmp_path):
    times = {f"attention.decode {OTHER}@8": 80, f"attention.decode {OTHER}@4": 99, OTHER_MOE: 130, "measured": 450}
    plans = set()
    for seed in range(20):
        found = measured(tmp_path / str(seed), bench_of(times, noise=0.01, seed=seed))
        plans.add(tuple((d.key, d.value) for d in found.plan.decisions))
    assert len(plans) == 1
    assert ("attention.decode@8", OTHER) in next(iter(plans))
    assert ("attention.decode@4", MINE) in next(iter(plans))


def test_when_time_is_up_the_rest_keeps_its_default_and_a_second_start_agrees_without_measuring(tmp_path):
    bench = bench_of({OTHER: 50, "measured": 400})
    first = measured(tmp_path, bench, seconds=4.0)
    assert bench.clock.now < 4.5
    hows = {decode(first, bucket).how for bucket in (1, 2, 4, 8)}
    assert hows == {"measured", "default"}
    assert any("keep their default" in note and "--measure-seconds" in note for note in first.notes)
    again = bench_of({})
    second = measured(tmp_path, again, thorough=False)
    assert again.asked == []
    assert second.plan == first.plan


def test_choices_that_there_was_no_time_to_confirm_are_not_taken(tmp_path):
    bench = bench_of({f"attention.decode {OTHER}@1": 50, "measured": 400})
    bench_check = bench.check

    def check(question, candidate):
        bench.clock.advance(500 if question.op.startswith("step") else 0)
        return bench_check(question, candidate)

    bench.check = check
    found = measured(tmp_path, bench, seconds=60)
    assert decode(found).value == MINE
    assert any("no time to confirm" in note for note in found.notes)


def test_no_time_at_all_gives_the_default_plan(tmp_path):
    bench = bench_of({OTHER: 1})
    found = measured(tmp_path, bench, seconds=0)
    assert found.plan == LAYERED({})
    assert bench.asked == []


def test_when_nothing_can_be_measured_the_plan_is_the_default_one_and_says_why(tmp_path):
    bench = bench_of({OTHER: 1})

    def start():
        raise CannotMeasureError("the process for it did not start: it crashed")

    bench.start = start
    found = measured(tmp_path, bench)
    assert found.plan == LAYERED({})
    assert any("did not start" in note and "pellucid tune" in note for note in found.notes)
    assert not (tmp_path / "evidence.jsonl").exists()


def test_want_of_memory_leaves_a_question_to_its_default_and_the_others_are_measured(tmp_path):
    bench = bench_of({f"attention.decode {OTHER}@8": 50, "measured": 400})
    check = bench.check

    def crowded(question, candidate):
        if question.op == "moe":
            raise CannotMeasureError("there was not enough free memory")
        return check(question, candidate)

    bench.check = crowded
    found = measured(tmp_path, bench)
    assert decode(found, 8).value == OTHER
    assert found.plan.decision("moe", 1).how == "default"
    assert any("not enough free memory" in note for note in found.notes)
    assert measured(tmp_path, bench_of({}), thorough=False).plan == found.plan


def test_stale_figures_are_used_with_a_note_and_measured_anew_when_asked(tmp_path):
    measured(tmp_path, bench_of({f"attention.decode {OTHER}@8": 50, "measured": 400}))
    newer = {"torch": "2.12.1"}
    bench = bench_of({})
    stale = measured(tmp_path, bench, store=store_at(tmp_path, soft=newer))
    assert decode(stale, 8).value == OTHER
    assert bench.asked == []
    assert any("torch 2.11.0 is 2.12.1 now" in note and "--measure full" in note for note in stale.notes)
    anew = measured(tmp_path, bench, store=store_at(tmp_path, soft=newer), mode="full")
    assert decode(anew, 8).value == MINE
    assert bench.asked
    assert not any("older versions" in note for note in anew.notes)


def test_figures_of_another_kernel_are_measured_anew(tmp_path):
    measured(tmp_path, bench_of({f"attention.decode {OTHER}@8": 50, "measured": 400}))
    bench = bench_of({})
    found = measured(tmp_path, bench, store=store_at(tmp_path, hard={"sources": "changed"}))
    assert decode(found, 8).value == MINE
    assert bench.asked


def test_what_was_asked_for_or_is_the_only_one_is_not_measured():
    plan = resolver(attention_backend=OTHER)({})
    assert {q.op for q in undecided(plan)} == {"moe"}
    assert all(q.order[0] == plan.backend(q.op, q.bucket) and len(q.order) > 1 for q in undecided(plan))


def test_buckets_far_apart_are_measured_first():
    buckets = [q.bucket for q in undecided(resolver()({})) if q.op == "moe"]
    assert buckets[:3] == [1, 8, 64]
    assert sorted(buckets) == [1, 2, 4, 8, 16, 32, 64]


def test_figures_depend_on_the_model_and_on_the_storage_of_the_cache():
    def traits(make) -> set[str]:
        return {q.traits for q in undecided(make({}))}

    assert traits(resolver()) == traits(resolver(seed=4))
    assert traits(resolver()) != traits(resolver(block_size=32))
    smaller = replace(V2_LITE, hidden_size=1024)
    there = {q.traits for q in undecided(resolve(EngineArgs("m"), smaller, gpu_machine()))}
    assert not there & {q.traits for q in undecided(resolve(EngineArgs("m"), V2_LITE, gpu_machine()))}


def test_a_machine_without_a_gpu_has_nothing_to_measure_but_its_own_kernels():
    plan = resolve(EngineArgs("model"), V2_LITE, load_hardware("cpu"))
    assert all(q.order == ("cpu_native", "reference") for q in undecided(plan))


def test_the_choices_of_a_step_are_put_into_its_plan():
    plan = resolver()({})
    given = (("decode_path", "layered"), ("cuda_graphs", "False"), ("kv.page_size", "32"), ("moe", OTHER_MOE),
             ("attention.decode@8", OTHER), ("projection.64x32@8", "library"))  # fmt: skip
    changed = apply_choices(plan, given)
    assert (changed.decode_path, changed.cuda_graphs, changed.page_size) == ("layered", False, 32)
    assert changed.backends("moe") == {OTHER_MOE}
    assert [changed.backend("attention.decode", b) for b in (4, 8)] == [MINE, OTHER]
    assert changed.decision("projection.64x32", 8).value == "library"
    assert apply_choices(plan, ()) == plan


def test_progress_names_what_is_measured(tmp_path):
    lines: list[str] = []
    measured(tmp_path, bench_of({}), on_progress=lines.append)
    assert any(line.startswith("attention.decode@8 (") for line in lines)


def test_figures_of_a_config_alone_hold_for_its_weights():
    plan = LAYERED({})
    assert any(line.startswith("weights (config): ") for line in plan.model)
    read = replace(plan, model=tuple(line.replace("weights (config)", "weights (tensors)") for line in plan.model))
    assert traits_of(read, "moe") == traits_of(plan, "moe")
    other = replace(plan, model=tuple(line.replace("bf16", "fp16") for line in plan.model))
    assert traits_of(other, "moe") != traits_of(plan, "moe")


def test_experts_that_read_one_form_of_weights_may_serve_a_bucket_each(tmp_path, monkeypatch):
    from pellucid.tuning import step_choices

    shared = [replace(b, weight_form="gate_up") if b.name in (MOE, OTHER_MOE) else b for b in discover()]
    monkeypatch.setattr(step_choices, "discover", lambda: shared)
    bench = bench_of({f"moe {OTHER_MOE}@64": 50, "measured": 400})
    found = measured(tmp_path, bench)
    assert found.plan.decision("moe", 64).value == OTHER_MOE
    assert found.plan.backends("moe") == {MOE, OTHER_MOE}
    (step,) = {key for key, _ in bench.asked if key.startswith("step.")}
    assert step == "step.prefill@64"


def test_what_a_plan_merely_says_of_itself_is_no_difference_of_its_steps():
    from pellucid.tuning.step_choices import differences

    default = LAYERED({})
    said = [replace(d, value=not d.value) if d.op == "batch_invariant" else d for d in default.decisions]
    plan = replace(default, decisions=tuple(said))
    assert plan.decision("batch_invariant").value != default.decision("batch_invariant").value
    assert differences(plan, default, "step.decode", 8) == ()
    paged = [replace(d, value=16) if d.op == "kv.page_size" else d for d in default.decisions]
    moved = differences(replace(default, decisions=tuple(paged)), default, "step.decode", 8)
    assert moved == (("kv.page_size", "16"),)

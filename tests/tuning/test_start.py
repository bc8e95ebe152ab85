"""At the start of an engine: what is measured, when, and that a machine without a GPU notices nothing of it."""

from __future__ import annotations

import errno
import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from pellucid import LLM, SamplingParams
from pellucid.cli.main import cli
from pellucid.core import PellucidError, PlanError
from pellucid.engine.startup import make_plan, open_model
from pellucid.hardware import load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Measurement
from pellucid.selection.resolve import resolve
from pellucid.tuning import start, store
from pellucid.tuning.gate import Probe
from pellucid.tuning.start import tune_plan
from pellucid.tuning.step_choices import traits_of
from tests import checkpoints
from tests.engine.tiny import engine_arguments
from tests.selection.models import V2_LITE
from tests.tuning.simulated import SimulatedBench, gpu_machine, resolver

pytest.importorskip("triton", reason="triton is for Linux")

STEP = {"default": 500.0, "measured": 480.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not through the environment: kernels that are built already stay where they are.
    monkeypatch.setattr(store, "cache_dir", tmp_path.joinpath)
    return tmp_path / "evidence"


def on_a_card(bench: SimulatedBench | None, may_measure: bool = True, **flags):
    args = EngineArgs("model", **{"measure": "cached", "measure_seconds": 3600, **flags})
    clock = (bench or SimulatedBench({})).clock
    return tune_plan(args, V2_LITE, gpu_machine(), resolver(), {}, may_measure, bench=bench, clock=clock)


def lines(cache: Path) -> list[dict]:
    return [json.loads(line) for path in cache.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_a_cold_start_on_a_card_measures_backends_projections_and_steps(cache):
    bench = SimulatedBench({**STEP, "library": 45.0})
    found = on_a_card(bench)
    ops = {line["op"].partition(".")[0] for line in lines(cache)}
    assert ops == {"attention", "moe", "apart", "projection", "experts", "lm_head", "mla", "step"}
    assert any(d.op.startswith("projection.") and d.value == "library" for d in found.plan.decisions)
    assert found.notes[0].startswith("measured ") and str(cache) in found.notes[0]


IN_STEPS = {"apart", "projection", "experts", "lm_head", "mla"}


def test_a_start_spends_no_time_on_plain_torch_as_the_only_rival_and_tune_does(cache):
    args = EngineArgs("model", max_num_seqs=4, max_num_batched_tokens=16, measure_seconds=3600)
    for mode, expected in (("cached", IN_STEPS), ("full", {"attention", "moe", *IN_STEPS})):
        bench = SimulatedBench({"reference": 5000})
        asked = replace(args, measure=mode)
        make = partial(resolve, asked, V2_LITE, load_hardware("h200"))
        plan = tune_plan(asked, V2_LITE, load_hardware("h200"), make, {}, True, bench=bench, clock=bench.clock).plan
        assert {key.partition(".")[0].partition("@")[0] for key, _ in bench.asked} == expected
        assert plan.backends("moe") == {"triton_fused"}
    # What `tune` found out is in the next start's plan.
    again = tune_plan(args, V2_LITE, load_hardware("h200"), make, {}, True, bench=SimulatedBench({})).plan
    assert again.decision("moe", 1).how == "measured"


def test_a_warm_start_measures_nothing_and_gives_the_same_plan_with_or_without_a_bench(cache):
    first = on_a_card(SimulatedBench({**STEP, "library": 45.0}, noise=0.004))
    bench = SimulatedBench({})
    assert on_a_card(bench).plan == first.plan
    assert bench.asked == []
    assert on_a_card(None, may_measure=False).plan == first.plan
    assert on_a_card(None, may_measure=False).notes == ()


def test_full_measures_anew_and_off_neither_measures_nor_reads(cache):
    on_a_card(SimulatedBench({**STEP, "library": 45.0}))
    bench = SimulatedBench({**STEP, "library": 60.0})
    assert not any(d.value == "library" for d in on_a_card(bench, measure="full").plan.decisions)
    assert bench.asked
    bench = SimulatedBench({})
    assert on_a_card(bench, measure="off").plan == resolver()({})
    assert bench.asked == []


def test_the_seconds_of_a_start_are_kept_to_and_a_cold_start_has_fewer_than_twenty():
    bench = SimulatedBench({**STEP})
    found = on_a_card(bench, measure_seconds=5)
    # The last candidate may run over.
    assert bench.clock.now < 5.5
    assert any("keep their default" in note for note in found.notes)
    assert start.DEFAULT_SECONDS < 20


def test_without_the_flag_a_first_start_measures_and_a_second_reads_and_off_does_neither(cache):
    bench = SimulatedBench({**STEP, "library": 45.0})
    assert on_a_card(bench, measure="off").plan == resolver()({})
    assert bench.asked == [] and not cache.exists()
    first = on_a_card(bench, measure=None)
    assert bench.asked != [] and first.plan != resolver()({})
    bench = SimulatedBench({})
    assert on_a_card(bench, measure=None).plan == first.plan
    assert on_a_card(bench, measure="off").plan == resolver()({})
    assert bench.asked == []


def test_what_a_start_had_no_time_for_a_longer_session_asks_and_another_start_does_not():
    first = SimulatedBench({**STEP})
    assert any("keep their default" in note for note in on_a_card(first, measure_seconds=5).notes)
    again = SimulatedBench({**STEP})
    on_a_card(again, measure_seconds=5)
    assert again.asked == []
    longer = SimulatedBench({**STEP})
    found = on_a_card(longer, measure="cached", measure_seconds=3600)
    assert longer.asked != []
    assert not any("keep their default" in note for note in found.notes)


def test_several_ranks_are_not_measured_but_take_what_is_known(cache):
    def two(evidence):
        plan = resolver()(evidence)
        decisions = [replace(d, value=2) if d.op == "tensor_parallel_size" else d for d in plan.decisions]
        return replace(plan, decisions=tuple(decisions))

    bench = SimulatedBench({})
    found = tune_plan(EngineArgs("model", measure="cached"), V2_LITE, gpu_machine(), two, {}, True, bench=bench)
    assert bench.asked == [] and not cache.exists()
    assert found.plan == two({})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("v2lite", tmp_path_factory.mktemp("tiny"))


def test_an_engine_without_a_gpu_starts_no_child_and_writes_nothing(tiny, cache, monkeypatch):
    def never(*_args, **_options):
        raise AssertionError("a child was started")

    monkeypatch.setattr(Probe, "_start", never)
    args = {"device": "cpu", "num_kv_pages": 16, "max_num_seqs": 2, **engine_arguments("v2lite")}
    llm = LLM(tiny, **args)
    assert not cache.exists()
    assert len(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
    assert llm.plan == LLM(tiny, measure="off", **args).plan


def test_a_machine_that_is_not_this_one_is_not_measured_and_has_no_figures_from_here(tiny, cache):
    args = EngineArgs(str(tiny), device="cpu", measure="full")
    make_plan(args, open_model(str(tiny)), load_hardware("cpu"), measure=True)
    assert not cache.exists()


def test_full_measures_the_kernels_of_a_cpu_in_a_child_and_the_next_start_reads_it(tiny, cache, caplog):
    """Real backends, a real child: the tiny model's own kernels against plain torch, one bucket of tokens."""
    caplog.set_level(logging.INFO)
    flags = {"device": "cpu", "threads": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_kv_pages": 16}
    flags |= {"linear_backend": "cpu_native", "moe_backend": "cpu_native"}
    files, said = open_model(str(tiny)), []
    args = EngineArgs(str(tiny), measure="full", measure_seconds=60, **flags)
    first = make_plan(args, files, measure=True, on_progress=said.append)
    decision = first.decision("attention.decode", 1)
    assert decision.how == "measured"
    assert {m.candidate: m.right for m in decision.measured} == {"cpu_native": True, "reference": True}
    assert any(line.startswith("attention.decode@1") for line in said)
    assert any("measured " in record.message for record in caplog.records)
    assert make_plan(EngineArgs(str(tiny), **flags), files) == first
    (path,) = cache.glob("*.jsonl")
    assert all(line["samples"] for line in lines(cache) if line["results"])
    path.write_text("not a line\n" + path.read_text())
    assert make_plan(EngineArgs(str(tiny), **flags), files, measure=True) == first


def test_tune_prints_the_table_of_what_it_measured(tiny, cache):
    words = ["tune", str(tiny), "--device", "cpu", "--threads", "1", "--max-num-seqs", "1", "--num-kv-pages", "16"]
    words += ["--max-num-batched-tokens", "1", "--linear-backend", "cpu_native", "--moe-backend", "cpu_native"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "attention.decode@1" in result.output
    assert "cpu_native" in result.output and "reference" in result.output
    assert lines(cache)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tune", "{model}", "--measure", "off"], "--measure off: there is nothing to tune then"),
        (["bench", "choices", "{model}", "--measure", "full"], "--measure full: here what was measured before"),
        (["bench", "choices", "{model}", "--save", "/no/such/folder/x.jsonl"], "there is no folder /no/such/folder"),
        (["bench", "choices", "{model}", "--device", "cpu"], "run `pellucid tune` first"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_measured(tiny, cache, words, told):
    result = CliRunner().invoke(cli, [word.replace("{model}", str(tiny)) for word in words])
    assert isinstance(result.exception, PellucidError) and told in str(result.exception)
    assert not cache.exists()


@pytest.mark.parametrize(("flag", "value"), [("measure", "always"), ("measure_seconds", 0), ("measure_seconds", 1.5)])
def test_flags_that_mean_nothing_are_refused(flag, value):
    with pytest.raises(PlanError, match=f"--{flag.replace('_', '-')}"):
        EngineArgs("model", **{flag: value})


def test_where_every_candidate_gives_wrong_numbers_the_plan_says_so_and_does_not_start():
    decisions = [d for d in resolver()({}).decisions if d.op == "attention.decode"]
    wrong = Measurement(1e-3, 1e-5, right=False, detail="a padded row is not zero")
    evidence = {
        (d.op, d.bucket, name): wrong for d in decisions for name in (d.value, *(r.candidate for r in d.rejected))
    }
    assert [blocker.kind for blocker in resolver()(evidence).blockers] == ["numerics"]


def test_a_start_has_no_time_for_what_nvcc_compiles_and_a_longer_session_asks_it_then(cache):
    asked, taken = {}, {}
    for seconds in (12, 600, 12):
        bench = SimulatedBench({"flashinfer_mla": 1.0})
        args = EngineArgs(
            "model", max_num_seqs=4, max_num_batched_tokens=512, measure="cached", measure_seconds=seconds
        )
        make = resolver(max_num_seqs=4, max_num_batched_tokens=512)
        plan = tune_plan(args, V2_LITE, gpu_machine(), make, {}, True, bench=bench, clock=bench.clock).plan
        asked[seconds] = {name for key, name in bench.asked if key.startswith("attention")}
        taken[seconds] = plan.decision("attention.prefill", 512).value
        if seconds == 12 and len(asked) == 1:
            assert "flashinfer_mla" not in asked[12] and taken[12] == "triton_mla"
    assert "flashinfer_mla" in asked[600] and taken[600] == "flashinfer_mla"
    # A start takes what the longer session found.
    assert asked[12] == set() and taken[12] == "flashinfer_mla"


def test_a_start_leaves_attention_of_short_prompts_alone_where_their_steps_are_captured(cache):
    """It is a small part of such a step. `--measure full` asks for it."""
    asked = {}
    for mode in ("cached", "full"):
        bench = SimulatedBench({})
        args = EngineArgs("model", max_num_seqs=4, max_num_batched_tokens=512, measure=mode, measure_seconds=600)
        tune_plan(args, V2_LITE, gpu_machine(), resolver(max_num_seqs=4, max_num_batched_tokens=512), {}, True,
                  bench=bench, clock=bench.clock)  # fmt: skip
        asked[mode] = {key for key, _ in bench.asked if key.startswith("attention.prefill")}
    assert asked["cached"] == {"attention.prefill@512"}
    assert asked["full"] == {f"attention.prefill@{1 << power}" for power in range(10)}


def test_while_another_process_measures_nothing_is_and_the_start_says_so(cache):
    machine = store.EvidenceStore.of(gpu_machine(), "cuda")
    with machine.alone() as first:
        assert first
        bench = SimulatedBench({"library": 45.0})
        found = on_a_card(bench)
        assert bench.asked == [] and found.plan == resolver()({})
        assert any("another process measures" in note for note in found.notes)
    bench = SimulatedBench({"library": 45.0})
    on_a_card(bench)
    assert bench.asked


def test_a_cache_that_can_not_be_written_keeps_nobody_from_measuring(cache):
    cache.write_text("a file where the folder should be")
    bench = SimulatedBench({"library": 45.0})
    assert any("can't be kept" in note for note in on_a_card(bench).notes)
    assert bench.asked


def test_a_folder_without_locks_keeps_nobody_from_measuring(cache, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with store.EvidenceStore.of(gpu_machine(), "cuda").alone() as alone:
        assert alone


def test_figures_of_a_cpu_hold_for_a_number_of_threads(cache):
    """A question's traits name it; on a card they do not."""
    cpu, card = load_hardware("cpu"), gpu_machine()
    plans = {threads: resolve(EngineArgs("model", device="cpu", threads=threads, num_kv_pages=9), V2_LITE, cpu)
             for threads in (1, 3)}  # fmt: skip
    assert {threads: f"{threads} threads" in traits_of(plan, "linear") for threads, plan in plans.items()} == {
        1: True, 3: True,
    }  # fmt: skip
    assert traits_of(plans[1], "linear") != traits_of(plans[3], "linear")
    on_card = [resolve(EngineArgs("model", threads=threads, num_kv_pages=99), V2_LITE, card) for threads in (1, 3)]
    assert traits_of(on_card[0], "linear") == traits_of(on_card[1], "linear")


def test_a_choice_that_takes_batch_invariance_away_says_so(cache, tiny: Path):
    """On a CPU our kernels have it, and plain torch has not."""
    flags = {"device": "cpu", "threads": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "num_kv_pages": 16}
    args, files = EngineArgs(str(tiny), measure="full", **flags), open_model(str(tiny))
    make = partial(resolve, args, files.traits, load_hardware("cpu"))
    if not make({}).batch_invariant:
        pytest.skip("no compiler here: plain torch is all there is")
    bench = SimulatedBench({**STEP, "reference": 10.0})
    found = tune_plan(args, files.traits, load_hardware("cpu"), make, {}, True, bench=bench, clock=bench.clock)
    assert not found.plan.batch_invariant
    assert any("--batch-invariant keeps it so" in note for note in found.notes)
    # Asked for, it is kept, and nothing needs to be said.
    asked = EngineArgs(str(tiny), measure="full", batch_invariant=True, **flags)
    make = partial(resolve, asked, files.traits, load_hardware("cpu"))
    found = tune_plan(asked, files.traits, load_hardware("cpu"), make, {}, True, bench=bench, clock=bench.clock)
    assert found.plan.batch_invariant
    assert not any("--batch-invariant" in note for note in found.notes)

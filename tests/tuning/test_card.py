"""On a card: tiles that are right, a cold start in its time, two starts alike, and a step that is never slower."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pellucid.engine.startup import make_plan, open_model
from pellucid.kernels.device import device_limits
from pellucid.layers.step_tiles import plan_tiles
from pellucid.runner.compile_ahead import CompileAhead
from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import STEP_TIE_SHARE, fastest, is_tie
from pellucid.selection.plan import ExecutionPlan
from pellucid.tuning.gate import GatedTrial
from pellucid.tuning.measure import Budget, Question, compare
from pellucid.tuning.projections import projections_of, tile_candidates
from pellucid.tuning.step_choices import traits_of
from pellucid.tuning.steps import Steps
from pellucid.tuning.workbench import Workbench

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return open_model(str(path), "synthetic")


def args(**flags) -> EngineArgs:
    return EngineArgs("config.json", **{"load_format": "synthetic", "device": "cuda", "max_num_seqs": 32,
                                        "max_model_len": 2048, "num_kv_pages": 2048, **flags})  # fmt: skip


def step_seconds(files, default: ExecutionPlan, plan: ExecutionPlan, rows: int) -> tuple[float, float]:
    """Of the default tiles and of the plan's, in turns."""
    given = tuple((f"{op}@{b}", str(plan.decision(op, b).value)) for op, b in plan_tiles(plan) if b == rows)
    question = Question("step.decode", rows, ("default", "measured"), "", given)
    bench = Workbench(files.traits, default)
    results = compare([GatedTrial(bench, question, name) for name in question.order], Budget(60)).results
    return results["default"].seconds, results["measured"].seconds


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 128])
def test_every_candidate_tile_multiplies_right(files, rows):
    plan = make_plan(args(measure="off"), files)
    bench, limits = Workbench(files.traits, plan), device_limits(torch.device("cuda"))
    wrong = {}
    for projection in projections_of(files.traits, rows):
        names = tile_candidates(projection, rows, limits)
        question = Question(f"apart.{projection.op}", rows, names, traits_of(plan, "step"))
        wrong |= {(projection.op, name): why for name in names if (why := bench.check(question, name))}
    assert wrong == {}


def test_measuring_adds_less_than_twenty_seconds_to_a_cold_start_and_none_to_a_warm_one(
    files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    # What the engine would compile without measuring, too.
    default = make_plan(args(measure="off"), files)
    with CompileAhead(files.traits, default, device_limits(torch.device("cuda")), os.cpu_count() or 1) as ahead:
        ahead.wait()
    begin = time.monotonic()
    first = make_plan(args(measure="cached"), files, measure=True)
    cold = time.monotonic() - begin
    begin = time.monotonic()
    second = make_plan(args(measure="cached"), files, measure=True)
    assert cold < 20
    assert time.monotonic() - begin < 1
    assert second == first


def test_measured_tiles_are_in_the_plan_and_never_slow_the_step_down(
    files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    plan = make_plan(args(measure="full", measure_seconds=150, max_num_seqs=8), files, measure=True)
    default = make_plan(args(measure="off", max_num_seqs=8), files)
    buckets = {bucket for _, bucket in plan_tiles(plan)}
    assert 1 in buckets
    for rows in sorted(buckets):
        by_default, measured = step_seconds(files, default, plan, rows)
        assert measured <= 1.01 * by_default, rows


def test_twenty_runs_choose_what_ties_in_every_run(files):
    """Of the tiles of two buckets: no run may choose what is slower in another by more than a tie."""
    plan = make_plan(args(measure="off", max_num_seqs=8), files)
    bench, limits = Workbench(files.traits, plan), device_limits(torch.device("cuda"))
    flipped = {}
    for rows in (1, 8):
        for projection in projections_of(files.traits, rows)[:2]:
            names = tile_candidates(projection, rows, limits)[:5]
            question = Question(projection.op, rows, names, traits_of(plan, "step"))
            trials = [GatedTrial(bench, question, name) for name in names]
            runs = [compare(trials, Budget(30), STEP_TIE_SHARE).results for _ in range(20)]
            chosen = {fastest(names, results, STEP_TIE_SHARE) for results in runs}
            for results in runs:
                mine = results[str(fastest(names, results, STEP_TIE_SHARE))]
                apart = [name for name in chosen if not is_tie(results[str(name)], mine, 2 * STEP_TIE_SHARE)]
                if apart:
                    flipped[question.key] = sorted(map(str, apart))
    assert flipped == {}


def test_what_one_candidates_step_writes_is_nobody_elses(files):
    """Steps of several candidates are captured before any is replayed: each still gives the tokens that it gave."""
    plan = make_plan(args(measure="off"), files)
    steps = Steps(files.traits, plan, None)
    timers = [steps.timer_under(plan, Question("step.decode", 4, ("default",))) for _ in range(4)]
    for timer in timers * 2:
        timer.sample()
    runner, found = steps._runner(plan), []
    with torch.inference_mode():
        for timer in timers:
            timer._run()
            torch.cuda.synchronize()
            found.append(runner._state.tokens[:4].tolist())
    assert all(tokens == found[0] for tokens in found) and len(set(found[0])) > 1

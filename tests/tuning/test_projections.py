"""Projections as measured choices: which there are, what they may take, and that the whole step decides."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.core import PlanError
from pellucid.kernels.device import DeviceLimits
from pellucid.layers.fused_step import FusedStep, projection_tile
from pellucid.layers.step_tiles import Projection, parse_tile, plan_tiles, tile_name
from pellucid.selection.evidence import Measurement
from pellucid.selection.explain import render_decision
from pellucid.tuning.measure import Budget, Question
from pellucid.tuning.projections import measure_tiles, projections_of, tile_candidates, tile_decision
from pellucid.tuning.session import Session, tune
from pellucid.tuning.step_choices import Tiles
from tests.selection.models import KIMI_K25, SMALL_DENSE, V2_LITE
from tests.tuning.simulated import SimulatedBench, resolver, store_at

pytest.importorskip("triton", reason="triton is for Linux")

H200, SMALL_CARD = DeviceLimits(90, 132, 232448), DeviceLimits(86, 82, 101376)
MODELS = {"kimi": KIMI_K25, "v2-lite": V2_LITE, "dense": SMALL_DENSE}


@given(st.data())
def test_a_tiles_name_gives_back_the_tile(data):
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.rows_linear import RowsTile

    size, small = st.sampled_from([1, 2, 4, 8, 64, 512, 2048]), st.integers(1, 9)
    ahead = st.sampled_from([0, 256, 1024])
    tile = data.draw(
        st.one_of(
            st.none(),
            st.builds(LinearTile, size, size, small, st.booleans(), small, small, ahead, st.booleans()),
            st.builds(RowsTile, size, size, small, small, small, ahead, st.booleans(), st.booleans()),
        )
    )
    name = tile_name(tile)
    assert parse_tile(name) == tile
    assert type(parse_tile(name)) is type(tile)
    assert " " not in name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gemv",
        "gemv-8x2048",
        "libraries",
        "rows-64x128-w4-s8-more",
        "dot--8x4-w1",
        "rows-64x128-w4-s8-norm",
        "gemv-8x2048-w8-tma",
    ],
)
def test_what_is_no_tile_is_refused_by_its_name(name):
    with pytest.raises(PlanError, match="tile of a step"):
        parse_tile(name)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())
def test_a_projections_name_gives_back_its_shape(rows, columns, pair):
    assert Projection.of(Projection(rows, columns, pair).op) == Projection(rows, columns, pair)


def test_names_in_a_plan_are_readable():
    assert Projection(6144, 4096).op == "projection.6144x4096"
    assert Projection(28672, 4096, True).op == "projection.28672x4096.swiglu"
    assert tile_name(parse_tile("gemv-8x2048-w8-a1024")) == "gemv-8x2048-w8-a1024"


@pytest.mark.parametrize("rows", [2, 32])
@pytest.mark.parametrize("shape", ["v3", "v2lite", "llama", "qwen3-moe"])
def test_the_projections_of_a_model_are_those_that_its_fused_step_launches(shape, rows, tmp_path):
    from pellucid.bench.kernels import LAUNCHERS
    from tests.kernels.triton.fused_steps import FusedSteps

    steps = FusedSteps.of(shape, rows, tmp_path, torch.device("cpu"), torch.float16)
    found = set()

    def project(self, x, weight, out, *, activation=None, **_):
        found.add(Projection(*weight.shape, activation is not None))

    with ExitStack() as stack:
        stack.enter_context(patch.object(FusedStep, "project", project))
        stack.enter_context(patch("pellucid.kernels.triton.row_ops.rms_norm"))
        for module, launchers in LAUNCHERS.items():
            for launcher in launchers:
                stack.enter_context(patch(f"pellucid.kernels.triton.{module}.{launcher}"))
        for name in ("absorb_rope_write", "split_decode", "combine_project"):
            stack.enter_context(patch(f"pellucid.kernels.triton.mla_decode.{name}"))
        step = steps.fused._bucket(rows)
        for half in steps.fused._halves:
            half.add_to(step)
    assert found == set(projections_of(steps.decoder.traits, rows))


def test_those_of_most_weights_come_first():
    sizes = [p.rows * p.columns for p in projections_of(replace(SMALL_DENSE, moe_layers=(False,) * 28), 1)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("limits", [H200, SMALL_CARD], ids=["h200", "rtx-3090"])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 128])
@pytest.mark.parametrize("model", MODELS)
def test_candidates_begin_with_the_default_and_fit_the_device(model, rows, limits):
    from pellucid.kernels.triton.linear import LinearTile, linear_tile
    from pellucid.kernels.triton.rows_linear import RowsTile, tile_bytes

    for projection in projections_of(MODELS[model], rows):
        names = tile_candidates(projection, rows, limits)
        assert names[0] == tile_name(projection_tile(*projection[:2], rows, projection.pair, limits))
        assert "library" in names and len(set(names)) == len(names) >= 2
        if rows <= 16:
            assert tile_name(linear_tile(*projection[:2], rows)) in names
        for tile in map(parse_tile, names):
            if isinstance(tile, RowsTile):
                assert tile_bytes(tile, rows) <= limits.shared_memory
                assert tile.tma == limits.tma
                programs = -(-projection.rows // tile.block_n) * tile.split
                # They wait for each other: all must be there at a time.
                assert not tile.together or programs <= limits.sm_count
            elif isinstance(tile, LinearTile):
                assert rows <= 16
                assert tile.warps & (tile.warps - 1) == 0 and tile.block_n & (tile.block_n - 1) == 0
                assert not projection.pair or tile.block_n >= 2
                assert not tile.dot or tile.block_k // tile.split >= 16


def candidates(projection: Projection, rows: int) -> tuple[str, ...]:
    return ("gemv-8x512-w2", "library", "gemv-4x512-w2")


def session_of(tmp_path, bench: SimulatedBench | None, seconds: float = 3600.0) -> Session:
    return Session(store_at(tmp_path), bench, Budget(seconds, (bench or SimulatedBench({})).clock))


EQUAL = {"gemv-8x512-w2": 100.0, "library": 100.0, "gemv-4x512-w2": 100.0}
WIDE = projections_of(V2_LITE, 1)[0].op


def measured(tmp_path, times, **settings) -> Tiles:
    session = session_of(tmp_path, SimulatedBench({**EQUAL, **times}, **settings))
    return measure_tiles(resolver()({}), V2_LITE, candidates, session.answer)


def test_the_steps_time_decides_and_not_that_of_the_launch_alone(tmp_path):
    found = measured(tmp_path, {f"apart.{WIDE} library@1": 92, f"{WIDE} library@1": 105, f"{WIDE} gemv-4x512-w2@1": 95})
    assert found.choices(1) == ((WIDE, "gemv-4x512-w2"),)
    assert found.choices(8) == ()


def test_what_is_clearly_slower_alone_is_not_tried_in_a_step(tmp_path):
    bench = SimulatedBench({**EQUAL, "library": 130})
    measure_tiles(resolver()({}), V2_LITE, candidates, session_of(tmp_path, bench).answer)
    assert not [key for key, name in bench.asked if name == "library" and not key.startswith("apart.")]


def test_what_is_fetched_ahead_is_asked_of_the_step_whatever_it_gives_alone(tmp_path):
    """Alone there is no launch before it in whose time it could be fetched."""
    more = "gemv-8x512-w2-a1024"
    bench = SimulatedBench({**EQUAL, f"apart.{WIDE} {more}@1": 140, f"{WIDE} {more}@1": 95, more: 130})
    found = measure_tiles(
        resolver()({}), V2_LITE, lambda p, rows: (*candidates(p, rows), more), session_of(tmp_path, bench).answer
    )
    assert found.choices(1) == ((WIDE, more),)


def test_a_tile_that_is_wrong_alone_is_never_in_a_step(tmp_path):
    bench = SimulatedBench({**EQUAL, "library": 10}, {"library": "row 1 differs by 0.3"})
    found = measure_tiles(resolver()({}), V2_LITE, candidates, session_of(tmp_path, bench).answer)
    assert all(found.choices(bucket) == () for bucket in found.buckets())
    assert not [key for key, name in bench.asked if name == "library"]


def test_chosen_tiles_are_in_force_while_the_next_is_measured(tmp_path):
    """Coordinate descent: the questions of the second projection name the first one's tile."""
    asked: list[Question] = []
    session = session_of(tmp_path, SimulatedBench({**EQUAL, f"{WIDE} library@1": 80}))

    def answer(question):
        asked.append(question)
        return session.answer(question)

    measure_tiles(resolver()({}), V2_LITE, candidates, answer)
    later = [q for q in asked if q.bucket == 1 and q.op.startswith("projection.") and q.op != WIDE]
    assert later and all(q.given == ((f"{WIDE}@1", "library"),) for q in later)


def tuned(tmp_path, bench: SimulatedBench | None, seconds: float = 3600.0):
    session = session_of(tmp_path, bench, seconds)
    names = candidates if bench else lambda p, rows: session.store.known_order(f"apart.{p.op}", rows, _about())
    return tune(resolver(), session, lambda plan: measure_tiles(plan, V2_LITE, names, session.answer))


def _about() -> str:
    from pellucid.tuning.step_choices import traits_of

    return traits_of(resolver()({}), "step")


STEP = {"default": 500.0, "measured": 480.0, "triton_mla": 10.0, "triton_fused": 10.0}


def test_the_plan_carries_measured_tiles_and_the_step_reads_them(tmp_path):
    plan = tuned(tmp_path, SimulatedBench({**EQUAL, **STEP, f"{WIDE} library@1": 80})).plan
    decision = plan.decision(WIDE, 1)
    assert (decision.value, decision.how) == ("library", "measured")
    assert "80.0 us a step, with the default gemv-8x512-w2 100.0 us" in decision.because[1]
    assert [m.candidate for m in decision.measured] == ["gemv-8x512-w2", "library", "gemv-4x512-w2"]
    assert "library" in render_decision(plan, decision)
    tiles = plan_tiles(plan)
    assert tiles[WIDE, 1] is None
    assert tiles[WIDE, 8] == parse_tile("gemv-8x512-w2")
    assert type(plan).from_json(plan.to_json()) == plan


def test_tiles_that_make_the_step_slower_together_are_taken_back_at_their_bucket(tmp_path):
    times = {**EQUAL, **STEP, f"{WIDE} library@1": 80, f"{WIDE} library@8": 80, "measured@8": 530}
    found = tuned(tmp_path, SimulatedBench(times))
    assert plan_tiles(found.plan).keys() & {(WIDE, 1)}
    assert not [key for key in plan_tiles(found.plan) if key[1] == 8]
    assert any("step.decode@8" in note for note in found.notes)


class AttentionLosesInAStep(SimulatedBench):
    def sample(self, question, candidate):
        seconds = super().sample(question, candidate)
        changed = [key for key, _ in question.given if key.startswith("attention.")]
        return 600e-6 if changed and candidate == "measured" else seconds


def test_a_backend_that_wins_alone_and_loses_the_step_does_not_cost_the_tiles(tmp_path):
    """Such attention is called layer by layer: beside it there would be no tile to measure."""
    bench = AttentionLosesInAStep({**EQUAL, **STEP, "flashinfer_mla": 5.0, f"{WIDE} library@1": 80})
    found = tuned(tmp_path, bench)
    assert found.plan.decode_path == "fused"
    assert found.plan.backends("attention.decode") == {"triton_mla"}
    assert plan_tiles(found.plan)[WIDE, 1] is None
    assert any("step.decode@1: the default stays" in note for note in found.notes)


def test_tiles_that_are_taken_back_leave_the_attention_that_was_confirmed_without_them(tmp_path):
    class TilesLose(SimulatedBench):
        def sample(self, question, candidate):
            seconds = super().sample(question, candidate)
            tiles = [key for key, _ in question.given if key.startswith("projection.")]
            return 600e-6 if tiles and candidate == "measured" else seconds

    plan = tuned(tmp_path, TilesLose({**EQUAL, **STEP, f"{WIDE} library@1": 80, "triton_fused": 50.0})).plan
    assert not [key for key in plan_tiles(plan) if key[1] == 1]
    assert plan.decision("moe", 1).how == "measured"


def test_a_measured_step_that_is_slower_beyond_the_error_is_refused_however_little(tmp_path):
    times = {**EQUAL, **STEP, f"{WIDE} library@1": 80, f"{WIDE} library@8": 80}
    found = tuned(tmp_path, SimulatedBench({**times, "default": 500.0, "measured@1": 501.0, "measured@8": 500.0}))
    assert (WIDE, 1) not in plan_tiles(found.plan) and (WIDE, 8) in plan_tiles(found.plan)


def test_a_second_start_takes_the_same_tiles_and_so_does_a_process_that_cannot_make_candidates_up(tmp_path):
    first = tuned(tmp_path, SimulatedBench({**EQUAL, **STEP, f"{WIDE} library@1": 80}, noise=0.004))
    again = SimulatedBench({})
    assert tuned(tmp_path, again).plan == first.plan
    assert again.asked == []
    assert tuned(tmp_path, None).plan == first.plan


def test_candidates_are_gated_many_at_a_time_and_those_that_fail_are_never_timed(tmp_path):
    bench, together = SimulatedBench({**EQUAL, **STEP}), []

    def check_all(pairs, go_on):
        together.extend(pairs)
        return {pair: "row 1 differs" if pair[1] == "library" else "" for pair in pairs if go_on()}

    session = session_of(tmp_path, bench)
    session.check_all = check_all
    questions = [Question("projection.64x32", rows, ("own", "library")) for rows in (1, 8)]
    session.gate_ahead(questions)
    assert {(question, name) for question, name in together} == {(q, name) for q in questions for name in q.order}
    answers = [session.answer(question) for question in questions]
    assert all(not answer["library"].right for answer in answers)
    assert "library" not in {name for _, name in bench.asked}


def test_without_time_every_projection_keeps_its_default(tmp_path):
    assert plan_tiles(tuned(tmp_path, SimulatedBench({"library": 1.0}), seconds=0).plan) == {}


def test_a_decision_says_who_was_wrong_slower_or_tied():
    question = Question("projection.64x32", 1, ("a", "b", "c", "d"))
    times = {"a": Measurement(1e-3, 0.0), "b": Measurement(1.004e-3, 0.0), "c": Measurement(2e-3, 0.0)}
    decision = tile_decision(question, {**times, "d": Measurement(float("inf"), 0.0, False, "row 0 differs")})
    assert decision.value == "a"
    assert {r.candidate: r.misfits[0].kind for r in decision.rejected} == {"b": "order", "c": "slower", "d": "numerics"}

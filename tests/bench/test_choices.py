"""Steps under the measured plan, the default and the plans of one backend, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pellucid.bench.choices import DEFAULT, MEASURED, compare_plans, left_out, measured_choices, rivals
from pellucid.core import PellucidError
from pellucid.engine.startup import make_plan, open_model
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import Decision, ExecutionPlan
from pellucid.tuning.projections import projections_of
from tests import checkpoints
from tests.selection.models import V2_LITE
from tests.tuning.simulated import resolver


def with_choice(plan: ExecutionPlan, op: str, bucket: int | None, value: object) -> ExecutionPlan:
    changed = [replace(d, value=value) if (d.op, d.bucket) == (op, bucket) else d for d in plan.decisions]
    return replace(plan, decisions=tuple(changed))


def test_rivals_are_every_backend_that_fits_and_the_library() -> None:
    plan = resolver()({})
    assert plan.decode_path == "fused"
    found = dict(rivals(plan, V2_LITE, "decode", 8))
    assert found.keys() == {"library for projections"}
    assert dict(rivals(plan, V2_LITE, "prefill", 8)) == {
        "flashinfer_mla for attention": (("attention.prefill@8", "flashinfer_mla"),)
    }
    projections = {(f"{one.op}@8", "library") for one in projections_of(V2_LITE, 8)}
    assert set(found["library for projections"]) == projections != set()


def test_plans_without_a_step_of_their_own_are_left_out_and_named() -> None:
    """Timed under the name of another, the default's own step would look like theirs."""
    plan = resolver()({})
    assert left_out(plan, V2_LITE, "decode", 8) == {
        "flashinfer_mla for attention": "a fused step can't call it",
        "flashinfer_cutlass for experts": "a fused step can't call it",
    }
    assert left_out(plan, V2_LITE, "prefill", 8) == {
        "flashinfer_cutlass for experts": "its form of the weights would be that of every step"
    }


def test_differences_are_those_of_the_bucket_and_its_tiles() -> None:
    default = resolver()({})
    measured = with_choice(default, "attention.decode", 8, "flashinfer_mla")
    tile = Decision("projection.64x32", 8, "library", "measured", ("faster",))
    measured = replace(measured, decisions=(*measured.decisions, tile, replace(tile, bucket=1)))
    assert measured_choices(measured, default, "decode", 8) == (
        ("attention.decode@8", "flashinfer_mla"),
        ("projection.64x32@8", "library"),
    )
    assert measured_choices(measured, default, "decode", 1) == (("projection.64x32@1", "library"),)
    assert measured_choices(measured, default, "prefill", 8) == ()
    # Experts of another form serve every bucket.
    experts = replace(default, decisions=tuple(
        replace(d, value="flashinfer_cutlass") if d.op == "moe" else d for d in default.decisions
    ))  # fmt: skip
    assert measured_choices(experts, default, "prefill", 8) == (("moe", "flashinfer_cutlass"),)


def test_every_plan_of_a_bucket_is_timed_and_the_record_says_how_far_behind_the_measured_one_is(tmp_path) -> None:
    files = open_model(str(checkpoints.write("v3", tmp_path)))
    args = EngineArgs(str(tmp_path), device="cpu", max_num_seqs=4, max_model_len=64, num_kv_pages=64, measure="off")
    default = make_plan(args, files)
    told: list[str] = []
    sizes = {"decode": (1, 2), "prefill": (8,)}
    measured = with_choice(default, "attention.prefill", 8, "reference")
    record = compare_plans(measured, default, files.traits, files.checkpoint.tensors, sizes, told.append)
    assert [line["measured_has"] for line in record["steps"]] == [{}, {}, {"attention.prefill@8": "reference"}]
    assert [(line["phase"], line["bucket"]) for line in record["steps"]] == [
        ("decode", 1), ("decode", 2), ("prefill", 8),
    ]  # fmt: skip
    for line in record["steps"]:
        assert {DEFAULT, MEASURED} <= line["times"].keys()
        assert all(one["us"] > 0 for one in line["times"].values())
        assert line["behind"] >= 0
    assert len(told) == 3 and told[0].startswith("decode@1: the default ")


def test_rows_beyond_the_plan_are_refused_before_anything_is_timed() -> None:
    default = resolver()({})
    with pytest.raises(PellucidError, match=r"decode steps of 128 rows: the plan has 8 at most \(--max-num-seqs\)"):
        compare_plans(default, default, V2_LITE, None, {"decode": (1, 128)}, print)


def test_plans_that_share_no_steps_are_not_compared() -> None:
    default = resolver()({})
    moved = with_choice(default, "kv.page_size", None, 16)
    with pytest.raises(PellucidError, match=r"another kv\.page_size"):
        compare_plans(moved, default, V2_LITE, None, {"decode": (1,)}, print)

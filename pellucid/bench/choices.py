"""Is the measured plan as fast as every plan of one backend? Whole steps under each of them, in turns, at each bucket.

Steps are those that `tuning` times: the model's first layers, captured as they are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.bench.provenance import provenance
from pellucid.core import PellucidError
from pellucid.layers.step_tiles import LIBRARY
from pellucid.selection.bucket import bucket as bucket_of
from pellucid.selection.decode_path import FUSED
from pellucid.selection.evidence import STEP_TIE_SHARE, Measurement, is_tile_op
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.traits.model import ModelTraits
from pellucid.traits.tensors import TensorIndex
from pellucid.tuning.measure import Budget, Question, compare
from pellucid.tuning.problems import REFERENCE
from pellucid.tuning.projections import MAX_ROWS, projections_of
from pellucid.tuning.step_choices import SHAPES_STEPS, Given, apply_choices, differences, share_weights
from pellucid.tuning.steps import Steps
from pellucid.tuning.timing import Timer

MEASURED, DEFAULT = "the measured plan", "the default"
SECONDS = 60
"""Most that one bucket may take; it is a few."""


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A step under one plan. Implements `tuning.measure.Trial`."""

    name: str
    timer: Timer

    def sample(self) -> float:
        return self.timer.sample()


def rivals(default: ExecutionPlan, traits: ModelTraits, phase: str, bucket: int) -> Iterator[tuple[str, Given]]:
    """Plans of one backend at a bucket, by name: each that fits, for attention and for experts; the library, for every
    projection. Some are `left_out`.
    """
    for name, key, backend, obstacle in _others(default, traits, phase, bucket):
        if not obstacle:
            yield name, ((key, backend),)
    if _is_fused(default, phase) and bucket <= MAX_ROWS:
        shapes = projections_of(traits, bucket)
        yield f"{LIBRARY} for projections", tuple((f"{shape.op}@{bucket}", LIBRARY) for shape in shapes)


def left_out(default: ExecutionPlan, traits: ModelTraits, phase: str, bucket: int) -> dict[str, str]:
    """Plans of one backend that have no such step to time beside the others, by name, and why."""
    return {name: obstacle for name, _, _, obstacle in _others(default, traits, phase, bucket) if obstacle}


def _is_fused(default: ExecutionPlan, phase: str) -> bool:
    return phase == "decode" and default.decode_path == FUSED


def _others(
    default: ExecutionPlan, traits: ModelTraits, phase: str, bucket: int
) -> Iterator[tuple[str, str, str, str]]:
    """Name of the plan, key of its decision, backend and obstacle, of all that fit instead of the default's.

    Plain torch is left out on a GPU, where it takes a hundred times as long.
    """
    usable = {(b.op, b.name) for b in discover() if b.fused_decode is not None}
    families = [(f"attention.{phase}", "attention"), *([("moe", "experts")] if traits.moe is not None else [])]
    for op, part in families:
        decision = default.decision(op, bucket)
        for name in (r.candidate for r in decision.rejected if r.runs):
            if name == REFERENCE and default.device == "cuda":
                continue
            obstacle = ""
            if _is_fused(default, phase) and (op.partition(".")[0], name) not in usable:
                obstacle = "a fused step can't call it"
            elif op == "moe" and not share_weights(op, (name, str(decision.value))):
                obstacle = "its form of the weights would be that of every step"
            yield f"{name} for {part}", decision.key, name, obstacle


def measured_choices(measured: ExecutionPlan, default: ExecutionPlan, phase: str, bucket: int) -> Given:
    """What the measured plan has at this bucket of a phase, besides the default's choices."""
    tiles = [(d.key, str(d.value)) for d in measured.decisions if is_tile_op(d.op) and d.bucket == bucket]
    return (*differences(measured, default, f"step.{phase}", bucket), *(tiles if phase == "decode" else ()))


def compare_plans(
    measured: ExecutionPlan,
    default: ExecutionPlan,
    traits: ModelTraits,
    tensors: TensorIndex | None,
    buckets: Mapping[str, Sequence[int]],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Times every plan at `buckets` of each phase ("decode", "prefill"): a record for `results/`.

    Sizes are rounded up to their buckets.

    Raises:
        PellucidError: a size is beyond the plan's, or the plans differ in what all buckets share, so that they have no
            steps in common.
    """
    for phase, most, flag in (("decode", default.max_num_seqs, "--max-num-seqs"),
                              ("prefill", default.max_num_batched_tokens, "--max-num-batched-tokens")):  # fmt: skip
        if max(buckets.get(phase, (0,)), default=0) > most:
            raise PellucidError(f"{phase} steps of {max(buckets[phase])} rows: the plan has {most} at most ({flag})")
    moved = [op for op in SHAPES_STEPS if measured.decision(op).value != default.decision(op).value]
    if moved:
        raise PellucidError(f"the measured plan has another {', '.join(moved)}: its steps can't be compared one by one")
    steps = Steps(traits, default, tensors)
    lines = []
    for phase, sizes in buckets.items():
        for bucket in dict.fromkeys(map(bucket_of, sizes)):
            plans = {
                DEFAULT: (),
                MEASURED: measured_choices(measured, default, phase, bucket),
                **dict(rivals(default, traits, phase, bucket)),
            }
            line = {"phase": phase, "bucket": bucket, **_bucket(steps, default, phase, bucket, plans)}
            line["left_out"] = left_out(default, traits, phase, bucket)
            lines.append(line)
            report(_told(line))
    return {"bench": "choices", **provenance("pellucid.cli"), "traits": list(default.model), "steps": lines}


def _bucket(
    steps: Steps, default: ExecutionPlan, phase: str, bucket: int, plans: Mapping[str, Given]
) -> dict[str, Any]:
    import torch

    question = Question(f"step.{phase}", bucket, tuple(plans))
    with torch.inference_mode():
        trials = []
        for name, given in plans.items():
            plan = apply_choices(default, given)
            trials.append(PlanTrial(name, steps.timer_under(plan, question)))
        results = compare(trials, Budget(SECONDS), STEP_TIE_SHARE).results
    has = dict(plans[MEASURED])
    if not {DEFAULT, MEASURED} <= results.keys():
        return {"measured_has": has, "times": {}, "behind": None}
    mine = results[MEASURED]
    times = {name: {"us": round(m.seconds * 1e6, 2), "error_us": round(m.error * 1e6, 2),
                    "measured_is": round(mine.seconds / m.seconds, 4)} for name, m in results.items()}  # fmt: skip
    return {"measured_has": has, "times": times, "behind": _behind(results)}


def _behind(results: Mapping[str, Measurement]) -> float:
    """By which share the measured plan is slower than the fastest; 0 when it is that."""
    best = min(m.seconds for m in results.values())
    return round(results[MEASURED].seconds / best - 1, 4)


def _told(line: Mapping[str, Any]) -> str:
    if line["behind"] is None:
        return f"{line['phase']}@{line['bucket']}: not timed within {SECONDS} s"
    times = ", ".join(f"{name} {one['us']:.1f} ± {one['error_us']:.1f} us" for name, one in line["times"].items())
    apart = "".join(f"; without {name}: {why}" for name, why in line["left_out"].items())
    return f"{line['phase']}@{line['bucket']}: {times}; behind the fastest by {line['behind']:.1%}{apart}"

"""What two plans differ in, step by step, and a plan with such choices in force. Used by `session` and `steps`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pellucid.selection.decode_path import FUSED, decide_prompts
from pellucid.selection.evidence import Measurement, is_tile_op
from pellucid.selection.plan import Decision, ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.tuning.measure import Question

ONE_FORM = ("moe", "linear")
"""Families whose weights have one prepared form: what serves one bucket serves them all, or shares their form."""

DEFAULT, MEASURED = "default", "measured"
"""The candidates of a step: the plan of the fixed order, and the plan of the figures."""

SHAPES_STEPS = ("dtype", "kv.dtype", "kv.layout", "kv.page_size", "decode_path", "cuda_graphs")
"""Decisions for all buckets that a step is computed by. Others tell of a plan, as `batch_invariant` does."""

Given = Sequence[tuple[str, str]]
"""Choices: an op (for every bucket) or `op@bucket`, and a name."""

STEP_OPS = {"step.decode": ("attention.decode", *ONE_FORM), "step.prefill": ("attention.prefill", *ONE_FORM)}


def traits_of(plan: ExecutionPlan, family: str) -> str:
    """What of model and storage a figure depends on, in words: where its formats were read does not matter."""
    model = (re.sub(r"^weights \(\w+\)", "weights", line) for line in plan.model)
    storage = [plan.dtype, *([f"{plan.threads} threads"] if plan.device == "cpu" else [])]
    if family in ("attention", "step"):
        length = f"{plan.max_model_len} tokens at most"
        storage += [f"KV {plan.kv_dtype} {plan.kv_layout} in pages of {plan.page_size}", length]
        storage += ["prompts captured"] if plan.prompt_graphs else []
    return " | ".join((*model, *storage))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Answered questions on projections: `projection.6144x4096` at a bucket, candidates by their tiles' names."""

    answers: tuple[tuple[Question, Mapping[str, Measurement]], ...] = ()

    def without(self, bucket: int) -> Tiles:
        return Tiles(tuple(answer for answer in self.answers if answer[0].bucket != bucket))

    def choices(self, bucket: int) -> tuple[tuple[str, str], ...]:
        """(op, tile) of those that are not the default."""
        return tuple(
            (question.op, str(decision.value))
            for question, decision in zip((q for q, _ in self.answers), self.decisions(), strict=True)
            if question.bucket == bucket and decision.value != question.order[0]
        )

    def buckets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(question.bucket for question, _ in self.answers))

    def decisions(self) -> tuple[Decision, ...]:
        from pellucid.tuning.projections import tile_decision

        return tuple(tile_decision(question, results) for question, results in self.answers)


def share_weights(op: str, names: Iterable[str]) -> bool:
    """Whether these backends of an op read one form of weights."""
    family = op.partition(".")[0]
    forms = {b.weight_form for b in discover() if b.op == family and b.name in set(names)}
    return len(forms) == 1 and forms != {None}


def steps(plan: ExecutionPlan, default: ExecutionPlan, tiles: Tiles) -> Iterable[Question]:
    """One question for each kind of step in which `plan` and `tiles` differ from `default`."""
    for step, families in STEP_OPS.items():
        buckets = plan.buckets(families[0])
        for bucket in sorted({*buckets, *(tiles.buckets() if step == "step.decode" else ())}):
            given = list(differences(plan, default, step, bucket))
            if step == "step.decode":
                given += [(f"{op}@{bucket}", name) for op, name in tiles.choices(bucket)]
            if given:
                yield Question(step, bucket, (DEFAULT, MEASURED), traits_of(default, "step"), tuple(given))


def differences(plan: ExecutionPlan, default: ExecutionPlan, step: str, bucket: int) -> Given:
    """In what a kind of step at a bucket is another under `plan`, tiles aside: as `apply_choices` takes it."""
    given = [(op, str(plan.decision(op).value)) for op in SHAPES_STEPS
             if plan.decision(op).value != default.decision(op).value]  # fmt: skip
    for one in plan.decisions:
        if one.bucket != bucket or is_tile_op(one.op) or not concerns(one.op, STEP_OPS[step]):
            continue
        other = default.decision(one.op, bucket).value
        if one.value != other:
            together = share_weights(one.op, {str(one.value), str(other)})
            whole = one.op.partition(".")[0] in ONE_FORM and not together
            given.append((one.op if whole else one.key, str(one.value)))
    return tuple(given)


def apply_choices(plan: ExecutionPlan, given: Given) -> ExecutionPlan:
    """The plan with the choices of a step in force: `moe` for every bucket, `attention.decode@8` for one.

    Choices of projections, which no plan has before they are measured, are added to it.
    """
    choices = dict(given)
    decisions = []
    for decision in plan.decisions:
        text = choices.get(decision.key, choices.get(decision.op))
        changed = text is not None and str(decision.value) != text
        decisions.append(replace(decision, value=_typed(text, decision)) if changed and text else decision)
    for key, name in given:
        if is_tile_op(key.partition("@")[0]):
            op, _, bucket = key.partition("@")
            decisions.append(Decision(op, int(bucket), name, "measured", ("in force while a step is timed",)))
    made = replace(plan, decisions=tuple(decisions))
    if not plan.prompt_graphs:
        return made
    # Follows from the others, as in `resolve`.
    prompts = replace(plan.decision("prompt_graphs"), value=0)
    if made.decode_path == FUSED and made.cuda_graphs:
        prompts = decide_prompts(decisions, discover())
    return replace(made, decisions=tuple(prompts if d.op == prompts.op else d for d in decisions))


def _typed(text: str, decision: Decision) -> str | int | bool:
    if isinstance(decision.value, bool):
        return text == "True"
    return int(text) if isinstance(decision.value, int) else text


def concerns(op: str, families: Sequence[str]) -> bool:
    """Whether an op is one of the families, or of one."""
    return op in families or op.partition(".")[0] in families

"""Renders an `ExecutionPlan` for people. Called by `pellucid explain` and at engine start; computes no choice anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pellucid.core import PellucidError
from pellucid.hardware.facts import format_bytes
from pellucid.selection.plan import Decision, ExecutionPlan, MemoryBill, Rejection
from pellucid.traits.misfit import MisfitKind

INDENT = "  "

FAR_OFF: dict[MisfitKind, str] = {
    "attention": "for another kind of attention",
    "device": "for another kind of device",
    "phase": "for the other phase",
}
"""Reasons that the overview states once for all candidates that have them; `--why` states every reason."""


def render(plan: ExecutionPlan, notes: Sequence[str] = ()) -> str:
    """The whole plan as text, without a trailing newline. `notes` come from reading the model."""
    lines = ["model"]
    lines += [INDENT + line for line in plan.model]
    lines += [f"{INDENT}note: {line}" for line in notes]
    lines += ["machine", *(INDENT + line for line in plan.hardware), *_starts(plan), "decisions"]
    groups = list(_grouped(plan.decisions))
    width = max(len(_title(group)) for group in groups)
    value_width = max(len(_value(group[0])) for group in groups)
    for group in groups:
        first = group[0]
        head = f"{_title(group):{width}}  {_value(first):{value_width}}  {first.how}: {first.because[0]}"
        lines.append(INDENT + head)
        lines += [f"{INDENT * 3}{reason}" for reason in first.because[1:]]
        lines += [f"{INDENT * 3}not {line}" for line in _rejections(first)]
    lines += _memory(plan.memory)
    lines.append("more: --why OP@BUCKET for one decision with everything known, --json for the plan itself")
    return "\n".join(lines)


def render_decision(decision: Decision) -> str:
    """One decision with every candidate, every reason, remedy and note."""
    lines = [f"{decision.key} = {_value(decision)}  ({decision.how})"]
    lines += [f"{INDENT}because {reason}" for reason in decision.because]
    for rejection in decision.rejected:
        lines.append(f"{INDENT}not {rejection.candidate}{_standing(rejection)}")
        for misfit in rejection.misfits:
            lines.append(f"{INDENT * 2}{misfit.kind}: {misfit.reason}")
            if misfit.remedy:
                lines.append(f"{INDENT * 3}remedy: {misfit.remedy}")
        lines += [f"{INDENT * 2}note: {note}" for note in rejection.notes]
    return "\n".join(lines)


def find_decision(plan: ExecutionPlan, key: str) -> Decision:
    """The decision called `attention.decode@8` or `kv.page_size`. Raises PellucidError listing what there is.

    Any token count may stand after the @; the bucket that holds it answers. Without one, the smallest does.
    """
    op, _, tokens = key.partition("@")
    known = {d.op: plan.buckets(d.op) for d in plan.decisions}
    listed = ", ".join(f"{name}@{b[0]}..{b[-1]}" if b else name for name, b in known.items())
    if not tokens and known.get(op):
        tokens = str(known[op][0])
    if op not in known or (tokens and not known[op]) or (tokens and not tokens.isdigit()):
        raise PellucidError(f"--why {key}: no such decision; known: {listed}")
    if not tokens:
        return plan.decision(op)
    if not 1 <= int(tokens) <= known[op][-1]:
        raise PellucidError(f"--why {key}: {op} is decided for 1 to {known[op][-1]} tokens")
    return plan.decision(op, int(tokens))


def _starts(plan: ExecutionPlan) -> list[str]:
    if not plan.blockers:
        return []
    lines = ["would not start"]
    for blocker in plan.blockers:
        lines.append(INDENT + blocker.reason)
        if blocker.remedy:
            lines.append(f"{INDENT * 2}remedy: {blocker.remedy}")
    return lines


def _grouped(decisions: Sequence[Decision]) -> Iterator[list[Decision]]:
    """Runs of decisions of one op that differ in nothing but the bucket."""
    group: list[Decision] = []
    for decision in decisions:
        if group and replace(decision, bucket=group[0].bucket) != group[0]:
            yield group
            group = []
        group.append(decision)
    if group:
        yield group


def _title(group: Sequence[Decision]) -> str:
    first, last = group[0], group[-1]
    return first.key if first is last else f"{first.op}@{first.bucket}..{last.bucket}"


def _value(decision: Decision) -> str:
    if decision.value is None:
        return "nothing"
    if isinstance(decision.value, bool):
        return "on" if decision.value else "off"
    return str(decision.value)


def _rejections(decision: Decision) -> Iterator[str]:
    """One line per candidate that was not taken; those far off share one."""
    shared: dict[str, list[str]] = {}
    for rejection in decision.rejected:
        far = next((text for kind, text in FAR_OFF.items() if kind in {m.kind for m in rejection.misfits}), None)
        if far is not None:
            shared.setdefault(far, []).append(rejection.candidate)
            continue
        reasons = "; ".join(m.reason + (f" (remedy: {m.remedy})" if m.remedy else "") for m in rejection.misfits)
        yield f"{rejection.candidate}: {reasons}{_standing(rejection)}"
    for far, names in shared.items():
        yield f"{', '.join(names)}: {far}"


def _standing(rejection: Rejection) -> str:
    return "; apart from this it fits" if rejection.only_not_built else ""


def _memory(bill: MemoryBill) -> list[str]:
    rows = [(item.name, format_bytes(item.bytes), item.formula) for item in bill.items]
    rows.append(
        (
            "left for KV",
            format_bytes(bill.kv_budget_bytes),
            f"of {format_bytes(bill.budget_bytes)}: {bill.budget_formula}",
        )
    )
    rows.append(("KV per token", f"{bill.kv_bytes_per_token} B", bill.kv_formula))
    tokens = max(0, bill.kv_budget_bytes) // bill.kv_bytes_per_token
    rows.append(("tokens that fit", str(tokens), "left for KV / KV per token"))
    width, size = (max(len(row[i]) for row in rows) for i in (0, 1))
    return ["memory of one rank", *(f"{INDENT}{name:{width}}  {value:>{size}}  {text}" for name, value, text in rows)]

"""A plan as checks: every choice with how it came, what is slower than it need be, what blocks it, and its memory.

Called by `doctor.diagnose`, with the plan that a start would make. Computes no choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pellucid.doctor.devices import DriverFacts, memory_in_use
from pellucid.doctor.report import Check
from pellucid.engine.inputs import slow_path_reasons
from pellucid.hardware.facts import Hardware, format_bytes
from pellucid.selection.evidence import is_tile_op
from pellucid.selection.plan import Decision, ExecutionPlan, MemoryBill
from pellucid.selection.view import rows, tokens_that_fit
from pellucid.traits.misfit import Misfit, MisfitKind

SEE = "see `pellucid explain` for every candidate"

CHANGEABLE: frozenset[MisfitKind] = frozenset({"package", "toolkit", "compiler"})
"""What an installation can change."""


def plan_checks(plan: ExecutionPlan, notes: Sequence[str]) -> Iterator[Check]:
    """The group "plan". `notes` tell how figures that were measured here came into it."""
    yield from _choices(plan)
    yield from (Check("plan", "note", "ok", note) for note in notes)
    yield from _slow(plan)
    for blocker in plan.blockers:
        remedy = blocker.remedy or f"another model or machine; {SEE}"
        yield Check("plan", blocker_name(plan, blocker), "fail", blocker.reason, remedy)


def blocker_name(plan: ExecutionPlan, blocker: Misfit) -> str:
    """The op, with which the reason of a blocker of one begins, or the blocker's kind."""
    op = blocker.reason.partition(" ")[0]
    return op if op in {d.op for d in plan.decisions} else blocker.kind


def _choices(plan: ExecutionPlan) -> Iterator[Check]:
    for name in ("device", "tensor_parallel_size", "dtype", "kv.dtype", "max_model_len", "max_num_seqs", "decode_path"):
        decision = plan.decision(name)
        yield Check("plan", name, "ok", f"{decision.value}  ({decision.how}: {decision.because[0]})")
    tiles = [d for d in plan.decisions if is_tile_op(d.op)]
    for row in rows([d for d in plan.decisions if d.bucket is not None and d.value is not None and d not in tiles]):
        yield Check("plan", row.title, "ok", f"{row.value}  ({row.how})")
    if tiles:
        # A line each would be most of the report.
        found = f"{len(tiles)} of decode steps  (measured; `pellucid explain` has them)"
        yield Check("plan", "tiles", "ok", found)


def _slow(plan: ExecutionPlan) -> Iterator[Check]:
    """Where plain torch runs although something faster of ours could, but for what the user can change."""
    for line in slow_path_reasons(plan):
        reason, _, remedy = line.rpartition("; ")
        yield Check("plan", "slow path", "warn", reason or line, remedy if reason else SEE)
    if plan.device != "cuda":
        return
    plain = [d for d in plan.decisions if d.value == "reference" and d.op.partition(".")[0] != "linear"]
    for row in rows([d for d in plain if not _is_fastest(d)]):
        changeable = [x for x in row.losers if x.misfits and {m.kind for m in x.misfits} <= CHANGEABLE]
        remedy = "; ".join(m.remedy for x in changeable[:1] for m in x.misfits if m.remedy)
        yield Check("plan", "slow path", "warn", f"plain torch computes {row.title}", remedy or SEE)


def _is_fastest(decision: Decision) -> bool:
    """Whether it won by speed. One that runs because others fail the gate did not."""
    return decision.how == "measured" and all(m.right for m in decision.measured)


def memory_checks(plan: ExecutionPlan, hardware: Hardware, driver: DriverFacts | None) -> Iterator[Check]:
    """The group "memory": the bill of one rank by what it is for, and what is left."""
    bill = plan.memory
    for name, size, formula in _bill_lines(bill):
        yield Check("memory", name, "ok", f"{format_bytes(size)}  ({formula})")
    left, budget = format_bytes(bill.kv_budget_bytes), f"of {format_bytes(bill.budget_bytes)}: {bill.budget_formula}"
    no_room = next((b for b in plan.blockers if b.kind == "memory"), None)
    if no_room is not None:
        yield Check("memory", "left for KV", "fail", f"{left} {budget}", no_room.remedy)
    else:
        yield Check("memory", "left for KV", "ok", f"{left} {budget}")
    yield Check("memory", "KV per token", "ok", f"{bill.kv_bytes_per_token} B  ({bill.kv_formula})")
    tokens, length = tokens_that_fit(bill), plan.max_model_len
    whole = f", {tokens // length} requests of {length} tokens" if tokens >= length else ""
    yield Check("memory", "tokens that fit", "ok" if no_room is None else "not checked", f"{tokens}{whole}")
    if driver is None:
        return
    in_use = memory_in_use(hardware, plan.tensor_parallel_size, bill.budget_bytes, driver)
    if in_use is not None:
        yield in_use


def _bill_lines(bill: MemoryBill) -> Iterator[tuple[str, int, str]]:
    weights = [item for item in bill.items if item.name.startswith("weights: ")]
    parts = ", ".join(f"{item.name.removeprefix('weights: ')} {format_bytes(item.bytes)}" for item in weights)
    yield "weights", sum(item.bytes for item in weights), parts
    names: Mapping[str, str] = {"activations": "workspace", "runtime": "graphs, runtime"}
    for item in bill.items:
        if item not in weights:
            yield names.get(item.name, item.name), item.bytes, item.formula

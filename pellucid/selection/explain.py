"""Renders an `ExecutionPlan` as text for people. Called by `pellucid explain` and at engine start; chooses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pellucid.hardware.facts import format_bytes
from pellucid.selection.plan import Decision, ExecutionPlan, MemoryBill
from pellucid.selection.view import TABLE_LEGEND, Loser, Row, Table, rows, show_value, title, tokens_that_fit

INDENT = "  "


def render(plan: ExecutionPlan, notes: Sequence[str] = ()) -> str:
    """The whole plan as text, without a trailing newline. `notes` come from reading the model."""
    lines = ["model"]
    lines += [INDENT + line for line in plan.model]
    lines += [f"{INDENT}note: {line}" for line in notes]
    lines += ["machine", *(INDENT + line for line in plan.hardware), *_starts(plan), "decisions"]
    shown = rows(plan.decisions)
    width = max(len(row.title) for row in shown)
    value_width = max(len(row.value) for row in shown)
    for row in shown:
        lines.append(f"{INDENT}{row.title:{width}}  {row.value:{value_width}}  {row.how}: {row.because[0]}")
        lines += [f"{INDENT * 3}{reason}" for reason in row.because[1:]]
        lines += [INDENT * 3 + line for line in table_lines(row.table)]
        lines += [f"{INDENT * 3}not {line}" for line in _losers(row)]
    if any(row.table for row in shown):
        lines.append(f"measured tables: {TABLE_LEGEND}")
    lines += ["memory of one rank", *(INDENT + line for line in render_memory(plan.memory))]
    lines.append("more: --why OP@BUCKET for one decision with everything known, --json for the plan itself")
    return "\n".join(lines)


def render_decision(plan: ExecutionPlan, decision: Decision) -> str:
    """One decision with every candidate, every reason, remedy and note."""
    lines = [f"{decision.key} = {show_value(decision.value)}  ({decision.how})"]
    same = next(row for row in rows(plan.decisions) if decision in row.decisions)
    if len(same.decisions) > 1:
        lines.append(f"{INDENT}the same for {title(same.decisions)}; shown is {decision.bucket}")
    lines += [f"{INDENT}because {reason}" for reason in decision.because]
    (row,) = rows([decision])
    if row.table is not None:
        lines += [f"{INDENT}measured ({TABLE_LEGEND})", *(INDENT * 2 + line for line in table_lines(row.table))]
    for loser in row.losers:
        lines.append(f"{INDENT}not {loser.name}" + (f"; {loser.standing}" if loser.standing else ""))
        for misfit in loser.misfits:
            lines.append(f"{INDENT * 2}{misfit.kind}: {misfit.reason}")
            if misfit.remedy:
                lines.append(f"{INDENT * 3}remedy: {misfit.remedy}")
        lines += [f"{INDENT * 2}note: {note}" for note in loser.notes]
    return "\n".join(lines)


def memory_rows(bill: MemoryBill) -> list[tuple[str, str, str]]:
    """Name, size and formula of each line of the bill, then what is left for KV and the tokens that it holds."""
    found = [(item.name, format_bytes(item.bytes), item.formula) for item in bill.items]
    left = f"of {format_bytes(bill.budget_bytes)}: {bill.budget_formula}"
    found.append(("left for KV", format_bytes(bill.kv_budget_bytes), left))
    found.append(("KV per token", f"{bill.kv_bytes_per_token} B", bill.kv_formula))
    found.append(("tokens that fit", str(tokens_that_fit(bill)), "left for KV / KV per token"))
    return found


def render_memory(bill: MemoryBill) -> list[str]:
    """The bill in columns, one line an item."""
    found = memory_rows(bill)
    width, size = (max(len(row[i]) for row in found) for i in (0, 1))
    return [f"{name:{width}}  {value:>{size}}  {text}" for name, value, text in found]


def _starts(plan: ExecutionPlan) -> list[str]:
    if not plan.blockers:
        return []
    lines = ["would not start"]
    for blocker in plan.blockers:
        lines.append(INDENT + blocker.reason)
        if blocker.remedy:
            lines.append(f"{INDENT * 2}remedy: {blocker.remedy}")
    return lines


def _losers(row: Row) -> Iterator[str]:
    """One line per candidate that was not taken; those far off share one."""
    shared: dict[str, list[str]] = {}
    for loser in row.losers:
        if loser.far is not None:
            shared.setdefault(loser.far, []).append(loser.name)
        else:
            yield f"{loser.name}: {loser_text(loser)}"
    for far, names in shared.items():
        yield f"{', '.join(names)}: {far}"


def loser_text(loser: Loser) -> str:
    """Every reason against a candidate, with its remedy, on one line."""
    reasons = [m.reason + (f" (remedy: {m.remedy})" if m.remedy else "") for m in loser.misfits]
    return "; ".join([*reasons, loser.standing] if loser.standing else reasons)


def table_lines(table: Table | None) -> list[str]:
    """The measured table in columns; empty without one."""
    if table is None:
        return []
    head = ["tokens", *table.candidates]
    body = [[str(bucket), *(f"{c.text} {c.mark:1}" if c else "-" for c in cells)] for bucket, cells in table.rows]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    return ["  ".join(f"{text:>{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in (head, *body)]

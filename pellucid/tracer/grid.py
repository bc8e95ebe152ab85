"""Lays traces out as matrices, one a field: models down, GPUs across. Called by `pellucid trace grid`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.core import PellucidError
from pellucid.tracer.record import Decision, Trace
from pellucid.tracer.text import MARK, WIDTH, refusal_text, shorten, show_value, table, wrapped

REFUSED = "✗"
STOPPED = "?"
MOST_REASON = 320


@dataclass(frozen=True, slots=True)
class Grid:
    """Traces by (row, column). Rows are models, columns GPUs; engine and version join where they are several."""

    heading: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    traces: tuple[tuple[Trace | None, ...], ...]

    def fields(self) -> tuple[str, ...]:
        """Every field of any cell, in the order of the decisions."""
        traces = [trace for row in self.traces for trace in row if trace is not None]
        return tuple(dict.fromkeys(one.field for trace in traces for one in trace.decisions))

    def cell(self, row: int, column: int, field: str) -> str:
        """The value, with a mark where stand-ins answered; ✗ where the engine refuses, ? where it is not known."""
        trace = self.traces[row][column]
        if trace is None:
            return ""
        found = next((one for one in trace.decisions if one.field == field), None)
        if found is None or found.how == "unknown":
            refused = trace.refusal is not None and not trace.refusal.ours
            return REFUSED if refused else STOPPED if found is not None or trace.refusal else "–"
        return show_value(found.value, limit=32) + (f" {MARK}" if found.tainted else "")

    def to_json(self) -> dict[str, Any]:
        """`values[field][row][column]`; None where there is no such trace or field."""
        values = {field: [[_value(trace, field) for trace in row] for row in self.traces] for field in self.fields()}
        refusals = {
            f"{self.rows[i]} on {self.columns[j]}": trace.refusal.message
            for i, row in enumerate(self.traces)
            for j, trace in enumerate(row)
            if trace is not None and trace.refusal is not None
        }
        return {"rows": self.rows, "columns": self.columns, "values": values, "refusals": refusals}


def arrange(traces: Sequence[Trace]) -> Grid:
    """The matrix of the traces, in the order given. Raises PellucidError for no trace, or two for one cell."""
    if not traces:
        raise PellucidError("a grid needs at least one trace: name models with --model and GPUs with --gpu")
    engines = list(dict.fromkeys(f"{trace.engine} {trace.version}" for trace in traces))
    several = len(engines) > 1
    cells: dict[tuple[str, str], Trace] = {}
    for trace in traces:
        row = f"{trace.model}, {trace.engine} {trace.version}" if several else trace.model
        if (row, trace.gpu) in cells:
            raise PellucidError(f"two traces for {row} on {trace.gpu}: a grid has one per model and GPU")
        cells[row, trace.gpu] = trace
    rows = tuple(dict.fromkeys(row for row, _ in cells))
    columns = tuple(dict.fromkeys(column for _, column in cells))
    placed = tuple(tuple(cells.get((row, column)) for column in columns) for row in rows)
    return Grid(" and ".join(engines), rows, columns, placed)


def render_grid(grid: Grid, fields: Sequence[str] = (), *, width: int = WIDTH) -> str:
    """One matrix a field, as text. Without `fields`, those that differ anywhere; the others are listed at the end.

    Raises PellucidError where a field of `fields` is in no trace.
    """
    known = grid.fields()
    for field in fields:
        if field not in known:
            raise PellucidError(f"no trace has the field {field!r}; they have {', '.join(known)}")
    matrices = {field: _matrix(grid, field) for field in fields or known}
    shown = {field: cells for field, cells in matrices.items() if fields or _varies(cells)}
    lines = [grid.heading]
    for field, cells in shown.items():
        lines += ["", *table([(field, *grid.columns), *((grid.rows[i], *row) for i, row in enumerate(cells))])]
    alike = [f"{field} {cells[0][0]}" for field, cells in matrices.items() if field not in shown]
    if alike:
        lines += ["", *wrapped("the same everywhere: ", ", ".join(alike), width)]
    refusals = _refusals(grid, width)
    lines += ["", *refusals] if refusals else []
    return "\n".join(lines)


def _matrix(grid: Grid, field: str) -> list[list[str]]:
    return [[grid.cell(i, j, field) for j in range(len(grid.columns))] for i in range(len(grid.rows))]


def _varies(cells: list[list[str]]) -> bool:
    return len({cell for row in cells for cell in row if cell not in ("", REFUSED)}) > 1


def _refusals(grid: Grid, width: int) -> list[str]:
    """Each reason once, with where it is given."""
    places: dict[str, list[str]] = {}
    for i, row in enumerate(grid.traces):
        for j, trace in enumerate(row):
            if trace is not None and trace.refusal is not None:
                mark = STOPPED if trace.refusal.ours else REFUSED
                reason = f"{mark} {refusal_text(trace.refusal)}"
                places.setdefault(reason, []).append(f"{grid.rows[i]} on {grid.columns[j]}")
    told = [f"{reason[0]} {'; '.join(where)}: {shorten(reason[2:], MOST_REASON)}" for reason, where in places.items()]
    return [line for text in told for line in wrapped("", text, width)]


def _value(trace: Trace | None, field: str) -> Any:
    found: Decision | None = next((one for one in trace.decisions if one.field == field), None) if trace else None
    value = found.value if found else None
    return json.loads(json.dumps(value, default=str))

"""Writes a plan as one HTML file that needs no network and no script. For `explain --html` and the server's `/plan`.

Shows what `explain` prints; every text of the model's files is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from pellucid.selection.explain import memory_rows
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.plan_diff import DecisionDiff, PlanDiff, SideOfDecision, fact_sections, render_diff
from pellucid.selection.view import TABLE_LEGEND, Cell, Row, Table, rows
from pellucid.traits.misfit import Misfit

STYLE = """
:root { --paper:#fcfdfd; --tint:#f0f5f5; --line:#dde6e7; --ink:#14211f; --soft:#566769; --accent:#0a6c7c;
  --good:#1a6e3c; --bad:#a8261c; --warn:#8a5200;
  --sans:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans","DejaVu Sans",sans-serif;
  --mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace; }
@media (prefers-color-scheme: dark) {
  :root { --paper:#0e1415; --tint:#172022; --line:#263235; --ink:#e3eaea; --soft:#94a5a7; --accent:#6cc4d4;
    --good:#7fcf9d; --bad:#f2938b; --warn:#e3b06a; } }
* { box-sizing:border-box; }
body { max-width:1080px; margin:0 auto; padding:24px 16px 64px; background:var(--paper); color:var(--ink);
  font:15px/1.5 var(--sans); overflow-wrap:anywhere; }
h1 { margin:0 0 8px; font-size:22px; } h2 { margin:32px 0 6px; font-size:17px; }
p { margin:4px 0; } ul { margin:4px 0; padding-left:20px; } li { margin:2px 0; }
.soft, .how { color:var(--soft); } .how { font-size:13px; } .good { color:var(--good); } .bad { color:var(--bad); }
.remedy { color:var(--good); } .remedy::before { content:"remedy: "; color:var(--soft); }
.name, .value, td.number, th.number { font-family:var(--mono); font-size:13px; } .value { font-weight:600; }
.value.none { color:var(--bad); } .how.measured { color:var(--good); } .how.asked { color:var(--accent); }
.how.forced { color:var(--warn); }
.stop { margin-top:12px; padding:8px 12px; border-left:3px solid var(--bad); background:var(--tint); }
details, .plain { border-top:1px solid var(--line); } summary { cursor:pointer; list-style:none; }
summary::-webkit-details-marker { display:none; } summary:hover, details[open] > summary { background:var(--tint); }
summary, .plain { display:grid; grid-template-columns:minmax(0,4fr) minmax(0,3fr) minmax(0,2fr); gap:2px 14px;
  padding:6px 4px; } summary .why, .plain .why { grid-column:1 / -1; color:var(--soft); font-size:13px; }
details > div { padding:4px 4px 16px; }
.scroll { overflow-x:auto; overflow-wrap:break-word; }
table { border-collapse:collapse; margin:6px 0; } td, th { padding:3px 14px 3px 0;
  text-align:left; vertical-align:top; font-weight:400; border-top:1px solid var(--line); } thead th { border:0;
  color:var(--soft); font-size:13px; } td.number, th.number { text-align:right; white-space:nowrap; }
.taken { font-weight:600; } .tie { color:var(--soft); } .wrong { color:var(--bad); white-space:normal; }
dl { margin:4px 0; } dt { margin-top:8px; } dd { margin:0 0 0 16px; }
@media (max-width:640px) { summary, .plain { grid-template-columns:1fr auto; } }
"""


def plan_html(plan: ExecutionPlan, notes: Sequence[str] = (), heading: str = "Plan") -> str:
    """The page of one plan. `notes` come from reading the model."""
    shown = rows(plan.decisions)
    body = [f"<h1>{escape(heading)}</h1>", *_blockers("Would not start", plan.blockers)]
    body += ["<h2>Model</h2>", _list([*plan.model, *(f"note: {line}" for line in notes)])]
    body += ["<h2>Machine</h2>", _list(plan.hardware), "<h2>Decisions</h2>"]
    body.append('<p class="soft">Decided once, before weights are read; the engine runs on this. Tap one for more.</p>')
    if any(row.table for row in shown):
        body.append(f'<p class="soft">Measured tables: {escape(TABLE_LEGEND)}.</p>')
    body += [_decision(row) for row in shown]
    body += ["<h2>Memory of one rank</h2>", *_memory(plan)]
    return _page(heading, body)


def diff_html(diff: PlanDiff) -> str:
    """The page of a difference."""
    heading = f"{diff.a} | {diff.b}"
    if diff.equal:
        return _page(heading, [f"<h1>{escape(heading)}</h1>", f"<p>{escape(render_diff(diff))}</p>"])
    body = [f"<h1>{escape(heading)}</h1>", f'<p class="soft">A: {escape(diff.a)}<br>B: {escape(diff.b)}</p>']
    for heading, facts in fact_sections(diff):
        lines = [(f.name, f.a, f.b, f.effect) for f in facts]
        body += [f"<h2>{escape(heading.capitalize())}</h2>", _grid(("fact", "A", "B", ""), lines)]
    if diff.decisions:
        body.append("<h2>Decisions that differ</h2>")
        body += [_decision_diff(one) for one in diff.decisions]
    if diff.fits:
        fits = [(f"{fit.candidate} for {', '.join(fit.ops)}", fit.a, fit.b, fit.cause) for fit in diff.fits]
        body += ["<h2>Candidates that fit otherwise</h2>", _grid(("candidate", "A", "B", ""), fits)]
    if diff.memory:
        body += ["<h2>Memory of one rank</h2>", _grid(("", "A", "B"), diff.memory)]
    for side, found in zip("AB", diff.blockers, strict=True):
        if found:
            body += [f"<h2>Keeps {side} alone from starting</h2>", _list(found)]
    return _page(heading, body)


def _page(heading: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Nothing may be fetched, whatever a model's file put into a text.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(heading)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body)
    ) + "\n</body>\n</html>\n"


def _decision(row: Row) -> str:
    cells = _head(row.title, row.value, row.how, row.because[0])
    rest = [f"<p>{escape(reason)}</p>" for reason in row.because[1:]]
    if row.table is not None:
        rest.append(_measured(row.table))
    near = [loser for loser in row.losers if loser.far is None]
    if near:
        items = (f'<dt class="name">not {escape(x.name)}</dt>{"".join(_misfits(x.misfits, x.standing))}' for x in near)
        rest.append(f"<dl>{''.join(items)}</dl>")
    far: dict[str, list[str]] = {}
    for loser in row.losers:
        if loser.far is not None:
            far.setdefault(loser.far, []).append(escape(loser.name))
    rest += [f'<p class="soft">not {", ".join(names)}: {escape(why)}</p>' for why, names in far.items()]
    if not rest:
        return f'<div class="plain">{cells}</div>'
    return f"<details>\n<summary>{cells}</summary>\n<div>\n" + "\n".join(rest) + "\n</div>\n</details>"


def _head(title: str, value: str, how: str, because: str) -> str:
    none = " none" if value == "nothing" else ""
    return (
        f'<span class="name">{escape(title)}</span><span class="value{none}">{escape(value)}</span>'
        f'<span class="how {escape(how.split()[0])}">{escape(how)}</span><span class="why">{escape(because)}</span>'
    )


def _misfits(misfits: Sequence[Misfit], standing: str = "") -> Iterator[str]:
    for misfit in misfits:
        remedy = f' <span class="remedy">{escape(misfit.remedy)}</span>' if misfit.remedy else ""
        yield f"<dd>{escape(misfit.reason)}{remedy}</dd>"
    if standing:
        yield f'<dd class="soft">{escape(standing)}</dd>'


def _measured(table: Table) -> str:
    names = "".join(f'<th class="number">{escape(name)}</th>' for name in table.candidates)
    body = []
    for bucket, cells in table.rows:
        shown = [f'<th class="number">{bucket}</th>']
        shown += [_measured_cell(cell) for cell in cells]
        body.append(f"<tr>{''.join(shown)}</tr>")
    head = f'<thead><tr><th class="number">tokens</th>{names}</tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _measured_cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td class="number">-</td>'
    kind = "wrong" if not cell.right else {"*": "taken", "=": "tie"}.get(cell.mark, "")
    return f'<td class="number {kind}">{escape(f"{cell.text} {cell.mark}")}</td>'


def _memory(plan: ExecutionPlan) -> Iterator[str]:
    found = "".join(
        f'<tr><th>{escape(name)}</th><td class="number">{escape(size)}</td><td class="soft">{escape(text)}</td></tr>'
        for name, size, text in memory_rows(plan.memory)
    )
    yield f'<div class="scroll"><table class="memory"><tbody>{found}</tbody></table></div>'


def _blockers(heading: str, found: Sequence[Misfit]) -> Iterator[str]:
    if found:
        yield f'<div class="stop"><b class="bad">{heading}</b><dl>{"".join(_misfits(found))}</dl></div>'


def _decision_diff(one: DecisionDiff) -> str:
    sides = "".join(f"<li>{name}: {_side(side)}</li>" for name, side in (("A", one.a), ("B", one.b)))
    head = f'<p><span class="name">{escape(one.title)}</span> <span class="soft">{escape(one.cause)}</span></p>'
    return f'<div class="plain"><div class="why">{head}<ul>{sides}</ul></div></div>'


def _side(side: SideOfDecision | None) -> str:
    if side is None:
        return "no such decision"
    against = f'<br><span class="soft">not {escape(side.against_other)}</span>' if side.against_other else ""
    how = f'<span class="how">{escape(side.how)}</span>'
    return f'<span class="value">{escape(side.value)}</span> {how} {escape(side.because)}{against}'


def _grid(titles: Sequence[str], found: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in found)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"

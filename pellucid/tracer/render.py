"""Renders a trace for a terminal: the table of decisions, one decision in full, the log. Called by `pellucid trace`.

How values, lines and tables look is told in `text`, for all views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pellucid.tracer.conditions import condition, deciding_terms, not_reached, stopping, was_evaluated
from pellucid.tracer.record import Assignment, Decision, Guard, Level, LogLine, Trace
from pellucid.tracer.text import (
    INDENT,
    MARK,
    SHOWN_ITEMS,
    WIDTH,
    column_widths,
    counted,
    is_untold,
    refusal_text,
    rests_on,
    seen_value,
    short_site,
    shorten,
    show_value,
    table,
    terms_text,
    title,
    wrapped,
)

MOST_NOT_REACHED = 8

LEADING = (
    "attention_backend", "moe_runner_backend", "moe_backend", "quantization", "kv_cache_dtype", "cache_dtype",
    "page_size", "block_size",
)  # fmt: skip
"""Fields that have a row even at their default."""

OTHER_LINES = "other lines that gave it"
"""Heading of a layer's history, which has no order in time."""

HEADINGS = ("field", "value", "how", "line", "rests on")

LEVELS: dict[Level, str] = {
    "configuration": "decided by the engine's argument resolution",
    "layers": "decided by the model class, built without weights",
    "static": "not run: lines of the source that could decide",
}


def render(trace: Trace, *, width: int = WIDTH) -> str:
    """The whole trace as text, without a trailing newline: what the model and the GPU decided first, then the rest."""
    lines = [title(trace), *refusal_lines(trace)]
    # Of a run that stopped, nothing is final.
    unsettled = [one for one in trace.decisions if one.how == "unknown" and trace.refusal is not None]
    told = [one for one in trace.decisions if has_row(one) and one not in unsettled]
    rows = {level: [_row(one) for one in told if one.level == level] for level in LEVELS}
    shown = {level: found for level, found in rows.items() if found}
    widths = column_widths([HEADINGS, *(row for found in shown.values() for row in found)])
    for index, (level, found) in enumerate(shown.items()):
        lines += ["", LEVELS[level], *table(found if index else [HEADINGS, *found], widths=widths)]
    if unsettled:
        lines += ["", *wrapped("not settled when it stopped: ", ", ".join(one.field for one in unsettled), width)]
    rest = [one for one in trace.decisions if one not in told and one not in unsettled]
    given = [one for one in rest if one.how != "default"]
    always = [f"{one.field} {show_value(one.value)}" for one in given if not is_untold(one)]
    computed = [f"{one.field} {show_value(one.value)}" for one in given if is_untold(one)]
    defaults = [f"{one.field} {show_value(one.value)}" for one in rest if one.how == "default"]
    if always:
        lines += ["", *wrapped("set under no condition on the model or the GPU: ", ", ".join(always), width)]
    if computed:
        lines += [
            "",
            *wrapped("computed from other values, with no telling condition recorded: ", ", ".join(computed), width),
        ]
    if defaults:
        lines += ["", *wrapped("at their defaults: ", ", ".join(defaults), width)]
    lines += _footnotes(trace, told, width)
    printed = f"--log for the {counted(len(_once(trace.log)), 'line')} it would print, " if trace.log else ""
    lines.append(f"more: --field NAME for one decision in full, {printed}--json, --html FILE")
    return "\n".join(lines)


def render_decision(trace: Trace, field: str) -> str:
    """One decision with its line, its conditions and their values, earlier values, and lines that were not reached.

    Raises PellucidError where the engine has no such field.
    """
    found = trace.decision(field)
    known = "computed, with no telling condition recorded" if is_untold(found) else f"rests on {rests_on(found)}"
    rests = f"; {known}" if found.evidence or is_untold(found) else ""
    lines = [title(trace), "", f"{field} = {show_value(found.value, limit=200)}  ({found.how}, {found.level}{rests})"]
    if found.tainted:
        lines.append(f"{INDENT}{MARK} {_stub_reason(found.tainted)}")
    if found.history:
        lines += _assignment_lines(found.history[-1])
    elif found.how == "default":
        lines.append(f"{INDENT}no line on the way set it")
    if len(found.history) > 1:
        lines.append(f"{INDENT}{OTHER_LINES if found.level == 'layers' else 'earlier values'}")
        earlier = [(show_value(one.value), str(one.site), one.site.source) for one in found.history[:-1]]
        lines += [INDENT + line for line in table(earlier)]
    could = not_reached(found)
    if could:
        lines.append(f"{INDENT}lines that could set it and were not reached")
        lines += [f"{INDENT * 2}{line}" for one in could[:MOST_NOT_REACHED] for line in _not_reached(one)]
        if len(could) > MOST_NOT_REACHED:
            lines.append(f"{INDENT * 2}and {len(could) - MOST_NOT_REACHED} more: --json")
    return "\n".join(lines)


def render_log(trace: Trace) -> str:
    """The lines that the engine would print, each with the line of code that prints it."""
    if not trace.log:
        return "the engine would print nothing on this way"
    return "\n".join(table([(one.level.lower(), short_site(one.site), one.text) for one in _once(trace.log)]))


def refusal_lines(trace: Trace) -> list[str]:
    """Why the engine would not start, or why the tracer could not go on; nothing where it starts."""
    if trace.refusal is None:
        return []
    who = "the tracer stopped, not the engine" if trace.refusal.ours else "the engine refuses to start"
    return ["", f"{who}: {refusal_text(trace.refusal)}"]


def has_row(found: Decision) -> bool:
    """What people ask about, what was asked for, what is unknown, and what model, machine or software decided."""
    if found.field in LEADING or found.level != "configuration" or found.how in ("flag", "unknown") or found.tainted:
        return True
    # Of a value that no recorded line gave it is not known what it rests on.
    return found.how == "forced" and (
        not found.history or any(kind not in ("flag", "other") for kind in found.evidence)
    )


def _row(found: Decision) -> tuple[str, ...]:
    value = "?" if found.how == "unknown" else show_value(found.value)
    return (
        found.field,
        f"{value} {MARK}" if found.tainted else value,
        found.how,
        short_site(found.site) if found.site else "",
        rests_on(found),
    )


def _footnotes(trace: Trace, decided: Sequence[Decision], width: int) -> Iterator[str]:
    """What limits the answer: stubs that were asked, lines that were not run, assumptions, packages."""
    yield ""
    tainted = sorted({name for one in decided for name in one.tainted})
    if tainted:
        yield from wrapped(f"{MARK} ", _stub_reason(tainted), width)
    for one in decided:
        if one.how == "unknown" and not one.history and trace.refusal is None:
            sites = ", ".join(short_site(could.site) for could in one.could[:SHOWN_ITEMS])
            told = (
                f"not evaluated; it could be set at {sites}"
                if sites
                else "not evaluated, and no line was seen to set it"
            )
            yield from wrapped(f"? {one.field}: ", told, width)
    for note in trace.notes:
        yield from wrapped("note: ", note, width)
    if trace.pins and "transformers" in trace.pins:
        yield f"with transformers {trace.pins['transformers']}, as the wheel pins it"


def _stub_reason(names: Sequence[str]) -> str:
    return f"stand-ins answered for {', '.join(names)}: the value may differ where they are installed"


def _assignment_lines(found: Assignment) -> Iterator[str]:
    where = f" in {found.site.function}" if found.site.function else ""
    yield f"{INDENT}{found.site}{where}"
    yield f"{INDENT * 3}{shorten(found.site.source, 100)}"
    if found.guards:
        yield f"{INDENT}because"
        yield from (INDENT + line for line in table([row for one in found.guards for row in _guard_rows(one, found)]))
    if found.stack:
        yield f"{INDENT}called from {', '.join(f'{short_site(one)} {one.function}'.strip() for one in found.stack[:3])}"


def _guard_rows(guard: Guard, found: Assignment) -> Iterator[tuple[str, str, str]]:
    """A row for each operand that decided the condition; the file is told where it is another than the line's."""
    place = str(guard.site.line) if guard.site.file == found.site.file else short_site(guard.site)
    known = deciding_terms(guard)
    if not known:
        yield place, "", f"{shorten(condition(guard), 80)}  (not evaluated)"
    for term in known:
        expression = shorten(term.expression, 70)
        kind = "" if term.evidence == "other" else f"  [{term.evidence}]"
        yield place, str(term.truth).lower(), f"{expression}{seen_value(term, expression)}{kind}"


def _not_reached(could: Assignment) -> Iterator[str]:
    yield f"{could.site}  {shorten(could.site.source, 60)}"
    stopped = stopping(could)
    if stopped is not None:
        yield f"{INDENT * 2}stopped at line {stopped[0].site.line}: {terms_text(stopped[1])}"
    else:
        yield f"{INDENT * 2}{'not reached' if was_evaluated(could) else 'its conditions were not evaluated'}"


def _once(log: Iterable[LogLine]) -> list[LogLine]:
    return list(dict.fromkeys(log))

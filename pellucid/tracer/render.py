"""Renders a trace for a terminal: the table of decisions, one decision in full, the log. Called by `pellucid trace`.

The other views (`diff`, `grid`, `audit`, `why`) take their way of showing values, lines and tables from here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pellucid.tracer.conditions import condition, deciding_terms, not_reached, stopping, was_evaluated
from pellucid.tracer.record import Assignment, Decision, Evidence, Guard, Level, LogLine, Refusal, Site, Term, Trace

INDENT = "  "
WIDTH = 110
MARK = "⚠"
MOST_VALUE = 40
MOST_SITE = 44
MOST_NOT_REACHED = 8
SHOWN_ITEMS = 3
_MEMBER = re.compile(r"(?:[A-Z]\w*\.)+([A-Z][A-Z0-9_]*)")

LEADING = (
    "attention_backend", "moe_runner_backend", "moe_backend", "quantization", "kv_cache_dtype", "cache_dtype",
    "page_size", "block_size",
)  # fmt: skip
"""Fields that have a row even at their default."""

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
    always = [f"{one.field} {show_value(one.value)}" for one in rest if one.how != "default"]
    defaults = [f"{one.field} {show_value(one.value)}" for one in rest if one.how == "default"]
    if always:
        lines += ["", *wrapped("set under no condition on the model or the GPU: ", ", ".join(always), width)]
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
    rests = f"; rests on {', '.join(kinds_of(found))}" if found.evidence else ""
    lines = [title(trace), "", f"{field} = {show_value(found.value, limit=200)}  ({found.how}, {found.level}{rests})"]
    if found.tainted:
        lines.append(f"{INDENT}{MARK} {_stub_reason(found.tainted)}")
    if found.history:
        lines += _assignment_lines(found.history[-1])
    elif found.how == "default":
        lines.append(f"{INDENT}no line on the way set it")
    if len(found.history) > 1:
        lines.append(f"{INDENT}earlier values")
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


def title(trace: Trace) -> str:
    """`sglang 0.5.9, kimi (SomeArchitecture) on sm120x8-pcie, with --tp-size 8`."""
    flags = f", with {' '.join(trace.flags)}" if trace.flags else ""
    return f"{trace.engine} {trace.version}, {trace.model} ({trace.architecture}) on {trace.gpu}{flags}"


def refusal_lines(trace: Trace) -> list[str]:
    """Why the engine would not start, or why the tracer could not go on; nothing where it starts."""
    if trace.refusal is None:
        return []
    who = "the tracer stopped, not the engine" if trace.refusal.ours else "the engine refuses to start"
    return ["", f"{who}: {refusal_text(trace.refusal)}"]


def refusal_text(refusal: Refusal) -> str:
    """The reason with its line; an exception without words is told by the statement that raised it."""
    if refusal.site is None:
        return refusal.message
    said = refusal.message if ":" in refusal.message else f"{refusal.message}, `{shorten(refusal.site.source, 90)}`"
    return f"{said}  ({refusal.site})"


def show_value(value: Any, *, limit: int = MOST_VALUE) -> str:
    """A value as people write it: text bare, enum members by name, numbers short, long lists by their ends."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        member = _MEMBER.fullmatch(value)
        return shorten(member[1] if member else value, limit) if value else "''"
    if isinstance(value, dict):
        return shorten("{" + ", ".join(f"{key}={show_value(one)}" for key, one in value.items()) + "}", limit)
    if isinstance(value, list | tuple):
        shown = [show_value(one) for one in value]
        if len(shown) > 2 * SHOWN_ITEMS:
            return f"[{', '.join(shown[:SHOWN_ITEMS])} … {shown[-1]}] ({len(shown)})"
        return shorten(f"[{', '.join(shown)}]", limit)
    return shorten(str(value), limit)


def show_apart(left: Any, right: Any, *, limit: int = MOST_VALUE) -> tuple[str, str]:
    """Two values beside each other; of two records, only the parts in which they differ."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return show_value(left, limit=limit), show_value(right, limit=limit)
    lefts, rights = dict(_parts(left)), dict(_parts(right))
    differing = [name for name in {**lefts, **rights} if lefts.get(name) != rights.get(name)]
    texts = [", ".join(f"{name}={show_value(side.get(name))}" for name in differing) for side in (lefts, rights)]
    return shorten(texts[0], limit), shorten(texts[1], limit)


def _parts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _parts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shorten(text: str, limit: int) -> str:
    """Source text on one line of at most `limit` characters; what is cut leaves an ellipsis."""
    text = " ".join(text.split())
    for space, bracket in (("[ ", "["), (" ]", "]"), ("( ", "("), (" )", ")")):
        text = text.replace(space, bracket)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def counted(number: int, noun: str) -> str:
    """`1 line`, `2 lines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def kinds_of(found: Decision) -> tuple[Evidence, ...]:
    """What a decision rests on. That a flag was not given goes without saying where something else decided."""
    others = tuple(kind for kind in found.evidence if kind != "flag")
    return others or found.evidence


def short_site(site: Site, *, limit: int = MOST_SITE) -> str:
    """The line without the package's folder; folders in the middle are left out where the path is too long."""
    parts = site.file.split("/")
    parts = parts[1:] if len(parts) > 1 else parts
    text = "/".join(parts)
    dropped = len(parts) > 2 and len(text) + len(f":{site.line}") > limit
    while dropped and len(parts) > 1 and len("/".join(parts)) + len(f"…/:{site.line}") > limit:
        parts = parts[1:]
    return f"{'…/' if dropped else ''}{'/'.join(parts)}:{site.line}"


def table(rows: Sequence[Sequence[str]], *, widths: Sequence[int] = ()) -> list[str]:
    """Lines of left-aligned columns, indented; the last column is not padded."""
    columns = widths or column_widths(rows)
    lines = []
    for row in rows:
        cells = [f"{cell:{wide}}" for cell, wide in zip(row, columns, strict=True)]
        lines.append((INDENT + INDENT.join(cells)).rstrip())
    return lines


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]


def wrapped(head: str, text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; all but the first are indented."""
    return textwrap.wrap(head + text, width, subsequent_indent=INDENT * 2, break_on_hyphens=False)


def guard_text(guard: Guard) -> str:
    """What decided a condition: `is_sm100_supported()` is false; the condition itself where that is not known."""
    known = deciding_terms(guard)
    return terms_text(known) if known else f"`{shorten(condition(guard), 90)}` was not evaluated"


def term_text(term: Term) -> str:
    """`gpu_mem < 35 * 1024` is false (97887.0): with the value that was compared, where the text does not hold it."""
    expression = shorten(term.expression, 70)
    came_out = "was not evaluated" if term.truth is None else f"is {str(term.truth).lower()}"
    return f"`{expression}` {came_out}{seen_value(term, expression)}"


def seen_value(term: Term, expression: str) -> str:
    """The operand's value in brackets, unless the truth or the text tells it."""
    if term.value is None or term.value == str(term.truth) or term.value.strip("'") in expression:
        return ""
    return f" ({shorten(term.value, 40)})"


def terms_text(terms: Iterable[Term]) -> str:
    return "; ".join(term_text(term) for term in terms)


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
        ", ".join(kinds_of(found)),
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

"""How values, lines of source, conditions and tables look as text. Used by every view of a trace.

The views are `render`, `diff`, `grid`, `audit`, `why`, `verify`, `preflight` and `html`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pellucid.tracer.conditions import condition, deciding_terms
from pellucid.tracer.record import Decision, Evidence, Guard, Refusal, Site, Term, Trace
from pellucid.tracer.static import is_written_out

INDENT = "  "
WIDTH = 110
MARK = "⚠"
UNTOLD = "…"
MOST_VALUE = 40
MOST_SITE = 44
SHOWN_ITEMS = 3
_MEMBER = re.compile(r"(?:[A-Z]\w*\.)+([A-Z][A-Z0-9_]*)")


def title(trace: Trace) -> str:
    """`sglang 0.5.9, kimi (SomeArchitecture) on sm120x8-pcie, with --tp-size 8`."""
    flags = f", with {' '.join(trace.flags)}" if trace.flags else ""
    return f"{trace.engine} {trace.version}, {trace.model} ({trace.architecture}) on {trace.gpu}{flags}"


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


def rests_on(found: Decision) -> str:
    """Its kinds in words; an ellipsis where nothing telling is known, since the line hands on a computed value."""
    return UNTOLD if is_untold(found) else ", ".join(kinds_of(found))


def is_untold(found: Decision) -> bool:
    """Whether no recorded condition tells what decided, and the line hands on a value that other lines computed."""
    telling = any(kind not in ("flag", "other") for kind in found.evidence)
    settled = found.how != "unknown" and bool(found.history)
    return settled and not telling and not is_written_out(found.history[-1], found.field)


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

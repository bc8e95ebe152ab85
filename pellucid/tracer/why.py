"""Answers why a field has its value: one paragraph that quotes the lines. Called by `pellucid trace why`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pellucid.tracer.conditions import deciding_terms, not_reached, steps, stopping, telling_terms, tells
from pellucid.tracer.record import Assignment, Decision, How, Trace
from pellucid.tracer.static import is_written_out
from pellucid.tracer.text import MARK, is_untold, kinds_of, short_site, shorten, show_value, term_text, terms_text

MOST_STOPPED = 3
MOST_POSSIBLE = 5

WITHOUT_LINE: dict[How, str] = {
    "flag": "the flag says so",
    "default": "that is its default, and no line on the way set it",
    "forced": "the finished configuration says so, and no recorded line gave it",
}


def why(trace: Trace, field: str) -> str:
    """One paragraph. Raises PellucidError where the engine has no such field, naming those that it has."""
    found = trace.decision(field)
    return " ".join(_sentences(trace, found))


def _sentences(trace: Trace, found: Decision) -> Iterator[str]:
    subject = f"{trace.engine} {trace.version} gives {trace.model} on {trace.gpu} {found.field} = "
    value = show_value(found.value, limit=120)
    if found.how == "unknown":
        yield f"What {trace.engine} {trace.version} would give {found.field} could not be evaluated."
        yield _possible(found)
    elif not found.history:
        yield f"{subject}{value}: {WITHOUT_LINE[found.how]}."
    else:
        yield f"{subject}{value} at {_quoted(found.history[-1])}."
        yield from _conditions(found.history[-1])
        yield from _earlier(found)
    yield from _evidence(found)
    yield from _stopped(found)
    if found.tainted:
        yield f"{MARK} Stand-ins answered for {', '.join(found.tainted)}: where they are installed it may differ."
    if found.level == "static" and found.how != "unknown":
        yield "This was read from the source, not run."


def _possible(found: Decision) -> str:
    lines = [str(one.site) for one in (*found.history, *found.could)]
    if not lines:
        return "No line of this version was seen to set it."
    more = f" and {len(lines) - MOST_POSSIBLE} other lines" if len(lines) > MOST_POSSIBLE else ""
    return f"It could be set at {', '.join(lines[:MOST_POSSIBLE])}{more}."


def _quoted(found: Assignment) -> str:
    where = f" in {found.site.function}" if found.site.function else ""
    return f"{found.site}{where} (`{shorten(found.site.source, 100)}`)"


def _conditions(found: Assignment) -> Iterator[str]:
    """What model, machine and software had to do with it; that flags were not given only where nothing else did."""
    guards = [guard for guard in found.guards if tells(guard)] or list(found.guards)
    held = [f"{terms_text(telling_terms(guard))}, line {guard.site.line}" for guard in guards if deciding_terms(guard)]
    if held:
        yield f"It came there since {'; '.join(held)}."


def _earlier(found: Decision) -> Iterator[str]:
    """Values before the last; of what a layer chose there is no order, only the lines that gave it."""
    if found.level == "layers":
        others = [short_site(one.site) for one in found.history[:-1]]
        if others:
            yield f"It is given at {', '.join(others)} too."
        return
    earlier = [f"{show_value(one.value)} ({short_site(one.site)})" for one in found.history[:-1]]
    if earlier:
        yield f"Before that it had been {', then '.join(earlier)}."


def _evidence(found: Decision) -> Iterator[str]:
    kinds = {"name": "the model's name", "trait": "numbers of its config", "hardware": "the GPU"}
    kinds |= {
        "package": "installed packages",
        "environment": "environment variables",
        "flag": "the engine's other settings",
    }
    told = [kinds[kind] for kind in kinds_of(found) if kind in kinds and not is_untold(found)]
    if told:
        listed = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
        yield f"It rests on {listed}."
    if is_untold(found):
        yield "That line hands on what others computed, and no recorded condition tells what decided those."
    elif found.history and "name" not in found.evidence and is_written_out(found.history[-1], found.field):
        yield "None of these conditions looks at a name."


def _stopped(found: Decision) -> Iterator[str]:
    """The lines nearest to being reached that would have given another value, and the operand that stopped each."""
    near = [one for one in not_reached(found) if stopping(one) and not _gives(one, found.value)]
    for could in [one for one in near if steps(one) + 1 >= steps(near[0])][:MOST_STOPPED]:
        stopped = stopping(could)
        if stopped is not None:
            reason = f"{term_text(stopped[1][0])}, line {stopped[0].site.line}"
            yield f"{short_site(could.site)} (`{shorten(could.site.source, 80)}`) was not reached: {reason}."


def _gives(could: Assignment, value: Any) -> bool:
    """Whether it is the same value: a line that was only read gives its value as source text."""
    return str(could.value).strip("\"'") == str(value)

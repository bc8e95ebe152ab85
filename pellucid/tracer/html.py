"""Writes a trace as one HTML file that needs no network and no script. Called by `pellucid trace --html`.

Every text of the engine, its log and the model's config is escaped: a traced tree is not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from pellucid.tracer.conditions import condition, deciding_terms, not_reached, outcome, stopping, tells
from pellucid.tracer.excerpt import Excerpts
from pellucid.tracer.html_style import STYLE
from pellucid.tracer.record import Assignment, Decision, Guard, Site, Trace
from pellucid.tracer.render import LEVELS, OTHER_LINES, has_row
from pellucid.tracer.text import (
    MARK,
    UNTOLD,
    guard_text,
    is_untold,
    kinds_of,
    refusal_text,
    seen_value,
    shorten,
    show_value,
    terms_text,
    title,
)
from pellucid.tracer.why import why

_QUOTED = re.compile(r"`([^`]*)`")

MOST_NEAR = 6
"""Lines that were not reached and are shown at once."""

MOST_EXCERPT = 14
"""Lines of interest that an excerpt shows; the conditions nearest to the deciding line are kept."""


def to_html(trace: Trace, root: Path | None = None) -> str:
    """The page. `root` is where the engine's source is: with it, each decision shows the lines that led to it."""
    source = Excerpts(root)
    told = [one for one in trace.decisions if has_row(one)]
    others = [one for one in trace.decisions if one not in told and one.how != "default"]
    groups = [(meaning, [one for one in told if one.level == level]) for level, meaning in LEVELS.items()]
    body = [_header(trace)]
    for meaning, found in (*groups, *_others(others)):
        if found:
            rows = "\n".join(_decision(one, trace, source) for one in found)
            body.append(f"<h2>{escape(meaning[0].upper() + meaning[1:])}</h2>\n{rows}")
    body += [*_defaults(trace), *_log(trace), *_facts(trace)]
    name = escape(f"{trace.engine} {trace.version}: {trace.model} on {trace.gpu}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Nothing may be fetched, whatever a traced tree put into a text.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _others(found: list[Decision]) -> list[tuple[str, list[Decision]]]:
    computed = [one for one in found if is_untold(one)]
    always = [one for one in found if one not in computed]
    return [
        ("set under no condition on the model or the GPU", always),
        ("computed from other values, with no telling condition recorded", computed),
    ]


def _header(trace: Trace) -> str:
    asked = title(trace).partition(", ")[2]
    lines = [f"<h1>{escape(trace.engine)} {escape(trace.version)}</h1>", f'<p class="asked">{escape(asked)}</p>']
    if trace.refusal is not None:
        who = "The tracer stopped" if trace.refusal.ours else "The engine refuses to start"
        lines.append(f'<p class="refusal"><b>{who}</b>: {escape(refusal_text(trace.refusal))}</p>')
    return "<header>\n" + "\n".join(lines) + "\n</header>"


def _decision(found: Decision, trace: Trace, source: Excerpts) -> str:
    value = "?" if found.how == "unknown" else show_value(found.value, limit=60)
    kinds = "".join(f'<span class="kind {escape(kind)}">{escape(kind)}</span>' for kind in kinds_of(found))
    kinds = UNTOLD if is_untold(found) else kinds
    mark = f'<span class="mark" title="a stand-in answered on the way">{MARK}</span>' if found.tainted else ""
    place = escape(str(found.site)) if found.site else ""
    head = (
        f'<summary><span class="field">{escape(found.field)}</span><span class="value">{escape(value)}{mark}</span>'
        f'<span class="how {found.how}">{found.how}</span><span class="place">{place}</span>'
        f'<span class="kinds">{kinds}</span></summary>'
    )
    parts = [f'<p class="why">{_quoted(why(trace, found.field))}</p>']
    if found.history:
        parts += list(_excerpt(found.history[-1], source))
    if len(found.history) > 1:
        heading = OTHER_LINES.capitalize() if found.level == "layers" else "Earlier values"
        parts.append(f"<h3>{heading}</h3>" + _list(_earlier(one) for one in found.history[:-1]))
    parts += _roads(not_reached(found))
    return f"<details>\n{head}\n<div>\n" + "\n".join(parts) + "\n</div>\n</details>"


def _excerpt(found: Assignment, source: Excerpts) -> Iterator[str]:
    """The deciding line and the conditions around it, as in the file; how they came out stands at the right."""
    near = [one for one in found.guards if one.site.function == found.site.function or tells(one)]
    by_line = {one.site.line: one for one in near[-MOST_EXCERPT:] if one.site.file == found.site.file}
    rows = []
    for line in source.excerpt(found.site.file, [*by_line, found.site.line]):
        if line.number is None:
            rows.append('<tr class="gap"><th>⋯</th><td></td><td></td></tr>')
            continue
        guard = by_line.get(line.number)
        kind = "hit" if line.number == found.site.line else _guard_class(guard) if guard else ""
        note = f'<span class="seen">{escape(_came_out(guard))}</span>' if guard else ""
        rows.append(f'<tr class="{kind}"><th>{line.number}</th><td>{line.html}</td><td>{note}</td></tr>')
    if rows:
        yield f'<p class="file">{escape(found.site.file)}</p>\n<div class="source"><table>{"".join(rows)}</table></div>'
        return
    conditions = [f"<code>{guard.site.line}</code> {_code(guard_text(guard))}" for guard in near]
    yield f"<pre>{escape(found.site.source)}</pre>" + _list(conditions)


def _came_out(guard: Guard) -> str:
    """`true (97887.0)`; of several operands, those that decided, or that they all agree."""
    known = deciding_terms(guard)
    truths = {str(one.truth).lower() for one in known}
    if len(truths) == 1 and len(known) > 1:
        return f"all {truths.pop()}"
    if len(guard.terms) == 1 and known and not condition(guard).startswith("not "):
        # The line shows the beginning of the condition: a value that stands further on is worth repeating.
        return f"{truths.pop()}{seen_value(known[0], known[0].expression[:24])}"
    return "; ".join(f"{one.expression}: {str(one.truth).lower()}{seen_value(one, one.expression)}" for one in known)


def _guard_class(guard: Guard) -> str:
    came_out = outcome(guard)
    return "" if came_out is None else "held" if came_out else "failed"


def _earlier(found: Assignment) -> str:
    return f"<b>{escape(show_value(found.value))}</b> {_place(found.site)} {_code(shorten(found.site.source, 100))}"


def _roads(could: list[Assignment]) -> Iterator[str]:
    """The lines that were nearest to being reached; the others fold away."""
    near, far = could[:MOST_NEAR], could[MOST_NEAR:]
    if near:
        yield "<h3>Lines that were not reached</h3>" + _list(_not_reached(one) for one in near)
    if far:
        others = _list(_not_reached(one) for one in far)
        yield f'<details class="far"><summary>{len(far)} more</summary>{others}</details>'


def _not_reached(could: Assignment) -> str:
    stopped = stopping(could)
    if stopped is None:
        conditions = " and ".join(condition(guard) for guard in could.guards)
        reason = f"under {shorten(conditions, 160)}" if conditions else ""
    else:
        reason = f"stopped at line {stopped[0].site.line}: {terms_text(stopped[1])}"
    return f"{_place(could.site)} {_code(shorten(could.site.source, 100))} <small>{_quoted(reason)}</small>"


def _defaults(trace: Trace) -> Iterator[str]:
    found = [one for one in trace.decisions if one.how == "default"]
    if found:
        items = [f"{escape(one.field)} <b>{escape(show_value(one.value))}</b>" for one in found]
        yield '<h2>At their defaults</h2>\n<ul class="plain">' + "".join(f"<li>{one}</li>" for one in items) + "</ul>"


def _log(trace: Trace) -> Iterator[str]:
    lines = dict.fromkeys(trace.log)
    if lines:
        rows = [
            f"<tr><th>{_place(one.site)}</th><td>{escape(one.level.lower())}</td><td>{escape(one.text)}</td></tr>"
            for one in lines
        ]
        yield f'<h2>What it would print</h2>\n<table class="log">{"".join(rows)}</table>'


def _facts(trace: Trace) -> Iterator[str]:
    facts = [escape(note) for note in trace.notes]
    if trace.stubs:
        facts.append(f"Stand-ins took the place of {escape(', '.join(trace.stubs))}.")
    if trace.pins:
        pins = ", ".join(f"{name} {version}" for name, version in sorted(trace.pins.items()))
        facts.append(f"Really installed: {escape(pins)}.")
    if facts:
        yield "<h2>What this rests on</h2>\n" + _list(facts)


def _list(items: Iterator[str] | list[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _place(site: Site) -> str:
    return f'<span class="place">{escape(str(site))}</span>'


def _quoted(text: str) -> str:
    """Escaped, with what stands in backquotes as code."""
    return _QUOTED.sub(r"<code>\1</code>", escape(text))


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"

"""Compares two traces: only what differs, and the first condition where the paths part. Called by `pellucid trace`.

The two may differ in the model, its architecture's name, the GPU, the flags, the engine's version, or the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pellucid.tracer.conditions import condition, deciding_terms, telling_terms, tells
from pellucid.tracer.record import Assignment, Decision, Evidence, Guard, Site, Term, Trace
from pellucid.tracer.static import is_written_out
from pellucid.tracer.text import (
    INDENT,
    MARK,
    counted,
    refusal_text,
    seen_value,
    short_site,
    shorten,
    show_apart,
    show_value,
    table,
    terms_text,
    title,
)

Key = tuple[str, ...]
Operands = Mapping[Key, list[Term]]

_PLAIN_CALL = re.compile(r"\w+\(\)")
_WORD = re.compile(r"\w+")

SAME_CHOICE: Mapping[str, str] = {
    "attention_layer_backend": "attention_backend",
    "moe_backend": "moe_runner_backend",
    "moe_layer_backend": "moe_layer_runner",
    "cache_dtype": "kv_cache_dtype",
    "block_size": "page_size",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_cudagraph_capture_size": "cuda_graph_max_bs",
    "cudagraph_capture_sizes": "cuda_graph_bs",
    "tensor_parallel_size": "tp_size",
}
"""Fields of one engine that answer what the other calls by another name; a layer's choice goes before the asked one."""


@dataclass(frozen=True, slots=True)
class Parting:
    """A condition that came out otherwise in the two runs; `left` and `right` are its operand as each saw it."""

    site: Site
    condition: str
    left: Term
    right: Term

    @property
    def evidence(self) -> Evidence:
        return self.left.evidence


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that the two decide differently. `follows` names another differing field that its condition reads."""

    field: str
    left: Decision | None
    right: Decision | None
    parting: Parting | None = None
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """What differs, causes before what follows from them. `same` counts the fields on which both agree."""

    left: Trace
    right: Trace
    differences: tuple[Difference, ...]
    same: int

    @property
    def axes(self) -> tuple[str, ...]:
        """What the two were asked about differently: some of engine, version, model, architecture, gpu, flags."""
        names = ("engine", "version", "model", "architecture", "gpu", "flags")
        return tuple(name for name in names if getattr(self.left, name) != getattr(self.right, name))

    @property
    def by_name_alone(self) -> bool:
        """The same config under another architecture's name: whatever differs was decided by the name."""
        return self.axes == ("architecture",)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for side in ("left", "right"):
            values[side] = {name: values[side][name] for name in ("engine", "version", "model", "architecture", "gpu")}
        return {**values, "axes": self.axes, "by_name_alone": self.by_name_alone}


def diff(left: Trace, right: Trace) -> TraceDiff:
    """The fields whose values differ, each with where the paths part. Static answers without a value are left out."""
    across = left.engine != right.engine
    names = SAME_CHOICE if across else {}
    lefts, rights = _by_field(left, names), _by_field(right, names)
    fields = list(dict.fromkeys([*lefts, *rights]))
    if across:
        fields = [field for field in fields if field in lefts and field in rights]
    # Of a side that refused to start, what was not settled by then says nothing.
    fields = [one for one in fields if not _unsettled(left, lefts.get(one)) and not _unsettled(right, rights.get(one))]
    changed = [field for field in fields if not _equal(lefts.get(field), rights.get(field))]
    seen = (_operands(left), _operands(right))
    found = []
    for field in changed:
        mine, other = lefts.get(field), rights.get(field)
        parting = None if across else first_parting(field, mine, other, *seen)
        found.append(Difference(field, mine, other, parting, _follows(field, parting, changed)))
    return TraceDiff(left, right, tuple(_causes_first(found)), len(fields) - len(changed))


def first_parting(
    field: str, mine: Decision | None, other: Decision | None, left: Operands, right: Operands
) -> Parting | None:
    """The first condition on the way to either decision whose operand the two runs saw differently.

    `left` and `right` are all operands of each run. The same line is looked for first, on the left decision's way and
    then on the right one's; then the same text in a function of that name; then the same question to the machine. That
    the field was set before is no reason for what set it. None where the runs share no such condition.
    """
    lefts, rights = _paths_from_parting(mine, other)
    for same in (_same_line, _same_text, _same_question):
        for path, there, own_is_left in ((lefts, right, True), (rights, left, False)):
            for guard, term in _operands_of(path):
                outcomes = there.get(same(guard, term), ()) if field not in words_of(term) else ()
                if outcomes and all(one.truth != term.truth for one in outcomes):
                    pair = (term, outcomes[0]) if own_is_left else (outcomes[0], term)
                    return Parting(guard.site, condition(guard), *pair)
    return _registered_apart(lefts, rights, left, right)


def _registered_apart(
    lefts: Iterable[Assignment], rights: Iterable[Assignment], left: Operands, right: Operands
) -> Parting | None:
    """A function that is registered for names, by a decorator, and was called in one of the two runs only."""
    for path, there, own_is_left in ((lefts, right, True), (rights, left, False)):
        for guard, term in _operands_of(path):
            # The other run knows the line, among those that it did not reach.
            if term.expression.startswith("@") and there.get(_same_line(guard, term)) == []:
                uncalled = replace(term, value=None, truth=None)
                pair = (term, uncalled) if own_is_left else (uncalled, term)
                return Parting(guard.site, condition(guard), *pair)
    return None


def render_diff(found: TraceDiff) -> str:
    """What differs, as text; one block a field, without a trailing newline."""
    left, right = found.left, found.right
    lines = [f"left   {title(left)}", f"right  {title(right)}"]
    for side, trace in (("left", left), ("right", right)):
        if trace.refusal is not None:
            what = "is where the tracer stopped, not the engine" if trace.refusal.ours else "refuses to start"
            lines.append(f"{side} {what}: {refusal_text(trace.refusal)}")
    if not found.differences:
        return "\n".join([*lines, "", f"nothing differs in {counted(found.same, 'field')}"])
    lines.append("")
    if found.by_name_alone:
        lines.append("the two have one config.json: what follows is decided by the architecture's name alone")
    rows = [(one.field, *_both_shown(one), _why(one, found)) for one in found.differences]
    lines += table([("field", "left", "right", "because of"), *rows])
    for one in found.differences:
        lines += ["", one.field, *_paths(one, left, right)]
    lines += ["", f"equal: {counted(found.same, 'other field')}"]
    return "\n".join(lines)


def _follows(field: str, parting: Parting | None, changed: list[str]) -> str | None:
    """Another field that differs and that the operand reads: that one is the cause."""
    words = words_of(parting.left) if parting else frozenset()
    return next((name for name in changed if name != field and name in words), None)


def words_of(term: Term) -> frozenset[str]:
    """The identifiers and words in an operand's text."""
    return frozenset(_WORD.findall(term.expression))


def _causes_first(found: list[Difference]) -> list[Difference]:
    return sorted(found, key=lambda one: one.follows is not None)


def _by_field(trace: Trace, names: Mapping[str, str]) -> dict[str, Decision]:
    return {names.get(one.field, one.field): one for one in trace.decisions}


def _unsettled(trace: Trace, decision: Decision | None) -> bool:
    return trace.refusal is not None and (decision is None or decision.how == "unknown")


def _equal(left: Decision | None, right: Decision | None) -> bool:
    if left is None or right is None:
        # A field that one version lacks is a difference only where the other was told or forced to a value.
        only = left or right
        return only is None or only.how in ("default", "unknown")
    if "unknown" in (left.how, right.how):
        return left.how == right.how
    return bool(left.value == right.value)


def _paths_from_parting(
    left: Decision | None, right: Decision | None
) -> tuple[tuple[Assignment, ...], tuple[Assignment, ...]]:
    """The values that each was given, from the first that they do not share."""
    lefts, rights = (one.history if one is not None else () for one in (left, right))
    shared = 0
    for mine, other in zip(lefts, rights, strict=False):
        if (mine.site, mine.value) != (other.site, other.value):
            break
        shared += 1
    return lefts[shared:], rights[shared:]


def _operands_of(path: Iterable[Assignment]) -> Iterator[tuple[Guard, Term]]:
    for assignment in path:
        for guard in assignment.guards:
            for term in deciding_terms(guard):
                yield guard, term


def _operands(trace: Trace) -> Operands:
    """Every operand on the way to any decision, or to a line that was not reached, each time that it was evaluated."""
    found: dict[Key, list[Term]] = {}
    for decision in trace.decisions:
        for assignment in (*decision.history, *decision.could):
            for guard in assignment.guards:
                for term in guard.terms:
                    evaluated = [term] if term.truth is not None else []
                    for same in (_same_line, _same_text, _same_question):
                        found.setdefault(same(guard, term), []).extend(evaluated)
    return found


def _same_line(guard: Guard, term: Term) -> Key:
    return guard.site.file, str(guard.site.line), term.expression


def _same_text(guard: Guard, term: Term) -> Key:
    """As in another version, which has moved the line."""
    return guard.site.function, term.expression


def _same_question(guard: Guard, term: Term) -> Key:
    """A call without arguments asks for a fact of the machine, wherever it stands."""
    return (term.expression,) if _PLAIN_CALL.fullmatch(term.expression) else _same_text(guard, term)


def _both_shown(one: Difference) -> tuple[str, str]:
    known = [side for side in (one.left, one.right) if side is not None and side.how != "unknown"]
    if len(known) == 2:
        texts = show_apart(known[0].value, known[1].value, limit=36)
        return _marked(one.left, texts[0]), _marked(one.right, texts[1])
    left, right = (
        "(no such field)" if side is None else "?" if side.how == "unknown" else show_value(side.value, limit=36)
        for side in (one.left, one.right)
    )
    return _marked(one.left, left), _marked(one.right, right)


def _marked(decision: Decision | None, text: str) -> str:
    return f"{text} {MARK}" if decision is not None and decision.tainted else text


def _why(one: Difference, found: TraceDiff) -> str:
    if one.follows is not None:
        return one.follows
    if one.parting is not None and one.parting.evidence != "other":
        return one.parting.evidence
    if found.by_name_alone:
        return "name"
    if one.parting is not None:
        return shorten(one.parting.left.expression, 40)
    sides = [side for side in (one.left, one.right) if side is not None and side.history]
    handed_on = any(not is_written_out(side.history[-1], side.field) for side in sides)
    return "computed values" if handed_on else ""


def _paths(one: Difference, left: Trace, right: Trace) -> Iterator[str]:
    if one.parting is not None:
        seen = f"left {_seen(one.parting.left)}, right {_seen(one.parting.right)}"
        yield f"{INDENT}parts  {short_site(one.parting.site)}  {shorten(one.parting.left.expression, 70)}: {seen}"
    paths = [_one_path(decision, trace, one.parting) for decision, trace in ((one.left, left), (one.right, right))]
    sides = (("both", paths[0]),) if paths[0] == paths[1] else (("left", paths[0]), ("right", paths[1]))
    for side, path in sides:
        yield f"{INDENT}{side:5}  {path}"
    earlier = None if one.parting else _first_other_value(one)
    if earlier is not None:
        mine, other = earlier
        yield f"{INDENT}from   {short_site(mine.site)}  {' and '.join(show_apart(mine.value, other.value))}"


def _first_other_value(one: Difference) -> tuple[Assignment, Assignment] | None:
    """Where one line gave both an earlier value, unequal since its numbers were: the difference comes from there."""
    lefts, rights = _paths_from_parting(one.left, one.right)
    if len(lefts) > 1 and len(rights) > 1 and lefts[0].site == rights[0].site:
        return lefts[0], rights[0]
    return None


def _seen(term: Term) -> str:
    """`false`, with the value that was compared where it says more: `false (97887.0)`."""
    if term.truth is None:
        return "not called"
    return f"{str(term.truth).lower()}{seen_value(term, term.expression)}"


def _one_path(decision: Decision | None, trace: Trace, parting: Parting | None) -> str:
    if decision is None:
        return f"{trace.engine} {trace.version} has no such field"
    if not decision.history:
        said = "no recorded line gave it" if decision.how == "forced" else f"no line set it ({decision.how})"
        return f"{show_value(decision.value)}: {said}"
    last = decision.history[-1]
    line = f"{short_site(last.site)}  {shorten(last.site.source, 60)}"
    telling = [guard for guard in last.guards if tells(guard)]
    if parting is None and telling:
        return f"{line}  since {terms_text(telling_terms(telling[-1])[:2])}"
    return line

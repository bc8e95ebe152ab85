"""Reads a recorded condition: its text, how it came out, and which of its operands decided that.

Used by `render`, `diff`, `why` and `html`. A condition is read from its source text and the truth of its operands;
nothing of an engine is evaluated here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pellucid.tracer.record import Assignment, Decision, Guard, Term


def condition(guard: Guard) -> str:
    """The condition alone, on one line, without the keyword and the brackets that hold its lines together."""
    text = " ".join(guard.site.source.split()).removesuffix(":")
    for keyword in ("elif ", "if ", "while "):
        text = text.removeprefix(keyword)
    if text.startswith("( ") and text.endswith(" )") and _parse(text[2:-2]) is not None:
        text = text[2:-2]
    return text.replace("( ", "(").replace(" )", ")")


def outcome(guard: Guard) -> bool | None:
    """Whether the condition held in the run; None where that can't be told from the operands that were evaluated."""
    tree = _tree_of(guard)
    if tree is None:
        return guard.terms[0].truth if len(guard.terms) == 1 else None
    return _truth(tree, {id(leaf): term for leaf, term in zip(_leaves(tree), guard.terms, strict=True)})


def deciding_terms(guard: Guard) -> tuple[Term, ...]:
    """The operands that made the condition come out as it did: of an `and` that failed, the first that is false."""
    tree, came_out = _tree_of(guard), outcome(guard)
    if tree is None or came_out is None:
        return tuple(term for term in guard.terms if term.truth is not None)
    terms = {id(leaf): term for leaf, term in zip(_leaves(tree), guard.terms, strict=True)}
    return tuple(_responsible(tree, came_out, terms))


def telling_terms(guard: Guard) -> tuple[Term, ...]:
    """The deciding operands that look at more than flags; all of them where none does."""
    known = deciding_terms(guard)
    return tuple(term for term in known if term.evidence not in ("flag", "other")) or known


def tells(guard: Guard) -> bool:
    """Whether a condition looks at the model, the machine or the software, and not at flags alone."""
    return any(term.evidence not in ("flag", "other") for term in deciding_terms(guard))


def stopping(could: Assignment) -> tuple[Guard, tuple[Term, ...]] | None:
    """The first condition that kept a line from being reached in the run, with its deciding operands."""
    for guard in could.guards:
        came_out = outcome(guard)
        if came_out is not None and came_out != guard.taken:
            return guard, deciding_terms(guard)
    return None


def not_reached(decision: Decision) -> list[Assignment]:
    """The lines that could have set the field, each once, those first of whose conditions most held before one did not.

    A line that called the function which returned the value was reached.
    """
    reached = {(place.file, place.line) for one in decision.history for place in one.stack}
    lines = {(one.site, str(one.value)): one for one in decision.could if (one.site.file, one.site.line) not in reached}
    return sorted(lines.values(), key=lambda one: -steps(one))


def steps(could: Assignment) -> int:
    """How many conditions held on the way; less than none where the first was not even asked."""
    for step, guard in enumerate(could.guards):
        came_out = outcome(guard)
        if came_out is None:
            return step - 1
        if came_out != guard.taken:
            return step
    return len(could.guards)


def was_evaluated(could: Assignment) -> bool:
    """Whether the run came by any of the line's conditions."""
    return any(term.truth is not None for guard in could.guards for term in guard.terms)


def _parse(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _tree_of(guard: Guard) -> ast.expr | None:
    """The condition's tree, if its leaves are the operands that were recorded."""
    tree = _parse(condition(guard))
    return tree if tree is not None and len(list(_leaves(tree))) == len(guard.terms) else None


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _leaves(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _leaves(node.operand)
    else:
        yield node


def _truth(node: ast.expr, terms: dict[int, Term]) -> bool | None:
    """Three-valued: an operand that was not evaluated is unknown, and may not matter."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _truth(node.operand, terms)
        return None if inner is None else not inner
    if not isinstance(node, ast.BoolOp):
        return terms[id(node)].truth
    settles = isinstance(node.op, ast.Or)
    found = [_truth(value, terms) for value in node.values]
    if settles in found:
        return settles
    return None if None in found else not settles


def _responsible(node: ast.expr, came_out: bool, terms: dict[int, Term]) -> Iterator[Term]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _responsible(node.operand, not came_out, terms)
    elif not isinstance(node, ast.BoolOp):
        yield terms[id(node)]
    elif came_out == isinstance(node.op, ast.Or):
        first = next(value for value in node.values if _truth(value, terms) == came_out)
        yield from _responsible(first, came_out, terms)
    else:
        for value in node.values:
            yield from _responsible(value, came_out, terms)

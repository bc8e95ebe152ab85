"""Every line that could give a field its value, with the conditions around it, read without running any of it.

The same pass as in the child (`tracer.child.rewrite`), so that both name equal lines. Conditions are not evaluated, and
no guess is made about them. Used by `tracer.run`; needs neither torch nor anything that the engine requires.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pellucid.core import PellucidError
from pellucid.tracer.child.recorder import GuardNode, Place, Recorder, SiteNode, TermNode
from pellucid.tracer.child.rewrite import Rules, rewrite
from pellucid.tracer.evidence import Evidencing
from pellucid.tracer.record import Assignment, Evidence, Guard, Site, Term
from pellucid.tracer.sources import SourceTree

Classify = Callable[[TermNode], Evidence]
Sites = Mapping[str, tuple[Assignment, ...]]
"""Field -> the lines that set it, in the order of files and lines; `value` is the source text of the value."""


def sites(tree: SourceTree, rewrites: Callable[[str], bool], rules: Rules) -> Sites:
    """Every assignment to a field of `rules` in the modules that `rewrites` accepts (their dotted names).

    A ternary is two lines, one under its condition and one under the opposite. What an operand
    looks at is told by its words alone.

    Raises:
        PellucidError: no module is accepted, or one is not Python of this version.
    """
    recorder = Recorder(str(tree.root))
    modules = list(_modules(tree, rewrites))
    if not modules:
        raise PellucidError(f"{tree} has none of the modules that decide in the versions known; its code has moved")
    for path in modules:
        try:
            rewrite(path.read_text(encoding="utf-8"), str(path), recorder, rules)
        except (SyntaxError, ValueError) as error:
            raise PellucidError(f"{path} can't be read by this Python ({error}); trace with a newer one") from None
    nodes = [node for node in recorder.sites if node.field is not None]
    reader = _Reader(recorder, _by_words(node.field for node in nodes))
    found: dict[str, list[Assignment]] = {}
    for node in nodes:
        found.setdefault(str(node.field), []).extend(reader.assignments(node))
    return {field: tuple(_in_order(lines)) for field, lines in found.items()}


def _by_words(fields: Iterable[str | None]) -> Classify:
    evidencing = Evidencing(frozenset(field for field in fields if field), frozenset())
    return lambda node: evidencing.classify({"names": node.names, "strings": node.strings, "stubs": ()})


def _modules(tree: SourceTree, rewrites: Callable[[str], bool]) -> Iterator[Path]:
    package = tree.root / tree.engine
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(tree.root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if rewrites(name):
            yield path


def _in_order(lines: list[Assignment]) -> list[Assignment]:
    return sorted(lines, key=lambda line: (line.site.file, line.site.line))


@dataclass(frozen=True, slots=True)
class _Reader:
    recorder: Recorder
    classify: Classify

    def assignments(self, node: SiteNode) -> Iterator[Assignment]:
        around = tuple(self._guard(index, branch) for index, branch in node.branches if branch is not None)
        inside = [self.recorder.guards[index] for index, branch in node.branches if branch is None]
        value = value_of(node.place.source, node.field)
        if value is None:
            yield Assignment(node.place.source.partition("=")[2].strip(), _site(node.place), around)
            return
        for branches, leaf in _leaves(value):
            guards = tuple(
                self._read(guard, taken) for test, taken in branches if (guard := _same(inside, test)) is not None
            )
            yield Assignment(ast.unparse(leaf), _site(node.place), (*around, *guards))

    def _guard(self, index: int, taken: bool) -> Guard:
        return self._read(self.recorder.guards[index], taken)

    def _read(self, guard: GuardNode, taken: bool) -> Guard:
        nodes = (self.recorder.terms[index] for index in guard.terms)
        terms = tuple(Term(node.expression, None, None, self.classify(node)) for node in nodes)
        return Guard(_site(guard.place), taken, terms)


def _site(place: Place) -> Site:
    return Site(place.file, place.line, place.source, place.function)


def is_written_out(line: Assignment, field: str) -> bool:
    """Whether the line itself says the value: a literal, a member of an enumeration, a class that it makes.

    Otherwise it hands on what other lines computed, and the conditions around it do not tell what decided.
    """
    value = value_of(line.site.source, field)
    return value is not None and all(_says(leaf) for _, leaf in _leaves(value))


def _says(value: ast.expr) -> bool:
    match value:
        case ast.Constant() | ast.UnaryOp(operand=ast.Constant()):
            return True
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return all(map(_says, parts))
        case ast.Dict(values=parts):
            return all(map(_says, parts))
        case ast.Attribute(value=ast.Name(id=name)) | ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name[0].isupper()
    return False


def value_of(text: str, field: str | None) -> ast.expr | None:
    """The expression of a field's value in a statement's text; None where the text was cut short."""
    if text.startswith(f"{field!r}: "):
        text = f"_ = {text.removeprefix(f'{field!r}: ')}"
    try:
        statement = ast.parse(text).body[0]
    except SyntaxError:
        return None
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            return next((value for target, value in zip(targets, values, strict=True) if _sets(target, field)), None)
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.Return(value=value):
            return value
        case ast.AugAssign(target=target, op=operator, value=value):
            return ast.BinOp(target, operator, value)
        case ast.Expr(value=ast.Call(keywords=keywords)):
            return next((keyword.value for keyword in keywords if keyword.arg == field), None)
    return None


def _sets(target: ast.expr, field: str | None) -> bool:
    match target:
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)):
            return name == field
    return False


def _leaves(value: ast.expr) -> Iterator[tuple[tuple[tuple[ast.expr, bool], ...], ast.expr]]:
    """The values that a chain of ternaries can have, each with the tests that lead to it."""
    if not isinstance(value, ast.IfExp):
        yield (), value
        return
    for branch, taken in ((value.body, True), (value.orelse, False)):
        for tests, leaf in _leaves(branch):
            yield ((value.test, taken), *tests), leaf


def _same(guards: list[GuardNode], test: ast.expr) -> GuardNode | None:
    text = ast.unparse(test)
    return next((guard for guard in guards if _normalised(guard.place.source) == text), None)


def _normalised(source: str) -> str:
    try:
        return ast.unparse(ast.parse(source, mode="eval"))
    except SyntaxError:
        return source

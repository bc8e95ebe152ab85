"""Every line that could give a field its value, with the conditions around it, read without running any of it.

The same pass as in the child (`tracer.child.rewrite`), so that both name equal lines. Conditions are not evaluated, and
no guess is made about them. Used by `tracer.run`; needs neither torch nor anything that the engine requires.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def sites(tree: SourceTree, rewrites: Callable[[str], bool], rules: Rules, classify: Classify | None = None) -> Sites:
    """Every assignment to a field of `rules` in the modules that `rewrites` accepts (their dotted names).

    A ternary is two lines, one under its condition and one under the opposite. `classify` says what an operand looks
    at; by default its words alone tell.

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
    reader = _Reader(recorder, classify or _by_words(node.field for node in nodes))
    found: dict[str, list[Assignment]] = {}
    for node in nodes:
        found.setdefault(str(node.field), []).extend(reader.assignments(node))
    return {field: tuple(_in_order(lines)) for field, lines in found.items()}


def declarations(tree: SourceTree, files: Sequence[str], fields: Sequence[str]) -> dict[str, Assignment]:
    """The lines that declare fields of classes with a default (`page_size: int | None = None`), by field.

    `files` are patterns below the root; the first declaration of a field counts. Where a call declares the default, as
    `field(default=1)`, the value is that call's text.
    """
    found: dict[str, Assignment] = {}
    for path in sorted(path for pattern in files for path in tree.root.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for owner in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            for node in owner.body:
                name = node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""
                if isinstance(node, ast.AnnAssign) and node.value is not None and name in fields:
                    file = path.relative_to(tree.root).as_posix()
                    site = Site(file, node.lineno, lines[node.lineno - 1].strip(), owner.name)
                    found.setdefault(name, Assignment(ast.unparse(node.value), site))
    return found


@dataclass(frozen=True, slots=True)
class NameGuarded:
    """Of the `lines` that could set a field, those that stand under a test of a model's name."""

    field: str
    lines: int
    by_name: tuple[Assignment, ...]


def name_guarded(found: Sites) -> tuple[NameGuarded, ...]:
    """How much of each field hangs on names, by field."""
    return tuple(
        NameGuarded(field, len(lines), tuple(line for line in lines if _tests_a_name(line)))
        for field, lines in found.items()
    )


def _by_words(fields: Iterable[str | None]) -> Classify:
    evidencing = Evidencing(frozenset(field for field in fields if field), frozenset())
    return lambda node: evidencing.classify({"names": node.names, "strings": node.strings, "stubs": ()})


def _tests_a_name(line: Assignment) -> bool:
    return any(term.evidence == "name" for guard in line.guards for term in guard.terms)


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
        value = _value_of(node)
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


def _value_of(node: SiteNode) -> ast.expr | None:
    """The expression of the value in the statement's text; None where the text was cut short."""
    text = node.place.source
    if text.startswith(f"{node.field!r}: "):
        text = f"_ = {text.removeprefix(f'{node.field!r}: ')}"
    try:
        statement = ast.parse(text).body[0]
    except SyntaxError:
        return None
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            return next(
                (value for target, value in zip(targets, values, strict=True) if _sets(target, node.field)), None
            )
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.Return(value=value):
            return value
        case ast.AugAssign(target=target, op=operator, value=value):
            return ast.BinOp(target, operator, value)
        case ast.Expr(value=ast.Call(keywords=keywords)):
            return next((keyword.value for keyword in keywords if keyword.arg == node.field), None)
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

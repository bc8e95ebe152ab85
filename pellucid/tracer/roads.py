"""Roads not taken: the lines that set a field too and were not reached, with what their conditions came to in the run.

Read from the source by `static`, joined with the conditions that the child evaluated. Used by `run`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pellucid.core import PellucidError
from pellucid.tracer.child.engines import ENGINES
from pellucid.tracer.evidence import Evidencing
from pellucid.tracer.record import Assignment, Decision, Guard, Site, Term
from pellucid.tracer.sources import SourceTree
from pellucid.tracer.static import Sites, sites

_Key = tuple[str, int, str]
"""File, line and text of a condition."""


def add_roads(
    decisions: Iterable[Decision], tree: SourceTree, outcome: Mapping[str, Any], evidencing: Evidencing
) -> tuple[tuple[Decision, ...], tuple[str, ...]]:
    """The decisions of the configuration, each with the lines that could have set it, and notes.

    A field at an unset default is unknown where a line that sets it is in a function that no code that ran leads to.
    """
    try:
        found = _lines(_Tree(tree))
    except PellucidError:
        # The decisions stand without them: the child has run code that this Python can't parse.
        return tuple(decisions), ()
    conditions = outcome.get("conditions", ())
    evaluated = {_key(one["site"]): [evidencing.term(term) for term in one["terms"]] for one in conditions}
    stubbed = {_key(one["site"]): {stub for term in one["terms"] for stub in term["stubs"]} for one in conditions}
    owners = frozenset(outcome.get("owners", ()))
    done: list[Decision] = []
    notes: list[str] = []
    hidden = _out_of_sight(_Tree(tree), found, frozenset(outcome.get("entered", ())))
    for one in decisions:
        if one.level != "layers":
            could = _roads(one, tree, found, evaluated, owners)
            # A line that was not reached because a stub answered may be reached where the package is installed.
            tainted = {stub for line in could for guard in line.guards for stub in stubbed.get(_key_of(guard), ())}
            one = replace(one, could=could, tainted=tuple(sorted({*one.tainted, *tainted})))
            unseen = []
            if one.how == "default" and one.value in _UNSET:
                unseen = [
                    line for line in could if _function_of(line) in hidden and not _imported(_Tree(tree), line.site)
                ]
            if unseen:
                line = unseen[0].site
                notes.append(
                    f"{one.field}: left unset, but {line} sets it in {line.function}, which nothing that was run "
                    "calls: whether the engine calls it later is unknown"
                )
                one = replace(one, value=None, how="unknown")
        done.append(one)
    return tuple(done), tuple(notes)


_UNSET = (None, "auto")


def _function_of(line: Assignment) -> str:
    return f"{line.site.file}:{line.site.function}"


def unread(tree: SourceTree) -> tuple[tuple[Decision, ...], tuple[str, ...]]:
    """For an engine that could not be run: every field that a line of the tree sets, unknown, with those lines.

    Raises:
        PellucidError: the tree has none of the modules that decide, or can't be parsed.
    """
    found = _lines(_Tree(tree))
    decisions, missing = [], []
    for field in ENGINES[tree.engine].shown:
        could = _roads(Decision(field, None, "unknown", "static"), tree, found, {}, frozenset())
        if could:
            decisions.append(Decision(field, None, "unknown", "static", could=could))
        else:
            missing.append(field)
    notes = [f"no line of the modules that were read sets {', '.join(missing)}"] if missing else []
    return tuple(decisions), tuple(notes)


class _Tree:
    """A tree as a key of the cache: one version is read once."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree

    def __hash__(self) -> int:
        return hash((self.tree.root, self.tree.version))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tree) and (self.tree.root, self.tree.version) == (other.tree.root, other.tree.version)


@lru_cache(maxsize=4)
def _lines(key: _Tree) -> Sites:
    engine = ENGINES[key.tree.engine]
    return sites(key.tree, lambda module: engine.rewrites(module, False), engine.rules(str(key.tree.root)))


@dataclass(frozen=True, slots=True)
class _Function:
    """What leads to a function: its own name. `mentions` are identifiers and strings in it; `registered` ones, which
    have a decorator that is called, are found by other means."""

    name: str
    mentions: frozenset[str]
    registered: bool


@lru_cache(maxsize=4)
def _functions(key: _Tree, files: tuple[str, ...]) -> Mapping[str, _Function]:
    """`file:Class.method` -> that function; `file:` alone is the module's own code."""
    found: dict[str, _Function] = {}

    def add(node: ast.AST, file: str, scopes: tuple[str, ...]) -> None:
        mentions: set[str] = set()
        waiting = list(ast.iter_child_nodes(node))
        while waiting:
            one = waiting.pop()
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                add(one, file, (*scopes, one.name))
                waiting += one.decorator_list
                continue
            if isinstance(one, ast.ClassDef):
                add(one, file, (*scopes, one.name))
                continue
            if isinstance(one, ast.Name | ast.Attribute):
                mentions.add(one.id if isinstance(one, ast.Name) else one.attr)
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                mentions.add(one.value)
            waiting += ast.iter_child_nodes(one)
        registered = any(isinstance(one, ast.Call) for one in getattr(node, "decorator_list", ()))
        name = scopes[-1] if scopes else ""
        found[f"{file}:{'.'.join(scopes)}"] = _Function(name, frozenset(mentions), registered or not _runs(node))

    for file in files:
        add(ast.parse(Path(key.tree.root, file).read_text(encoding="utf-8")), file, ())
    return found


def _runs(node: ast.AST) -> bool:
    """Whether it runs only when called: the code of modules and classes runs when they are imported."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _out_of_sight(key: _Tree, found: Sites, entered: frozenset[str]) -> frozenset[str]:
    """Functions that set a field, did not run, and are not mentioned by any code that did: no condition declined them.

    What code that ran mentions may mention others in turn.
    """
    if not entered:
        return frozenset()
    functions = _functions(key, tuple(sorted({line.site.file for lines in found.values() for line in lines})))
    reached = {name for name, one in functions.items() if name in entered or one.registered}
    mentioned: set[str] = set()
    waiting = list(reached)
    while waiting:
        mentioned |= functions[waiting.pop()].mentions
        if not waiting:
            waiting = [name for name, one in functions.items() if name not in reached and one.name in mentioned]
            reached |= {*waiting}
    return frozenset(functions) - reached


def _imported(key: _Tree, site: Site) -> bool:
    """Whether another module, perhaps one that was not read, imports the function of the module that has this line."""
    return "." not in site.function and _mentioned_elsewhere(key, site.file, site.function)


@lru_cache(maxsize=64)
def _mentioned_elsewhere(key: _Tree, file: str, name: str) -> bool:
    plain = name.encode()
    word = re.compile(rb"\b" + re.escape(plain) + rb"\b")
    own = Path(key.tree.root, file)
    contents = (path.read_bytes() for path in Path(key.tree.root, key.tree.engine).rglob("*.py") if path != own)
    # Thousands of files: the plain search is many times as fast as the pattern, and seldom finds anything.
    return any(plain in content and word.search(content) for content in contents)


def _roads(
    decision: Decision, tree: SourceTree, found: Sites, evaluated: Mapping[_Key, list[Term]], owners: frozenset[str]
) -> tuple[Assignment, ...]:
    taken = {(one.site.file, one.site.line) for one in decision.history}
    names = sorted(ENGINES[tree.engine].attributes_of(decision.field))
    lines = [line for name in names for line in found.get(name, ())]
    return tuple(
        replace(line, guards=tuple(_with_values(guard, evaluated) for guard in line.guards))
        for line in lines
        if (line.site.file, line.site.line) not in taken and _may_set(line, owners)
    )


def _may_set(line: Assignment, owners: frozenset[str]) -> bool:
    """Neither part of the command line, nor another class's own attribute: `self.field = ` in a method of it."""
    first = line.site.function.partition(".")[0]
    if line.site.function.endswith("add_cli_args"):
        return False
    return not owners or not line.site.source.startswith("self.") or first in owners or not first[:1].isupper()


def _with_values(guard: Guard, evaluated: Mapping[_Key, list[Term]]) -> Guard:
    terms = evaluated.get(_key_of(guard))
    return replace(guard, terms=tuple(terms)) if terms is not None and len(terms) == len(guard.terms) else guard


def _key_of(guard: Guard) -> _Key:
    return guard.site.file, guard.site.line, guard.site.source


def _key(site: Mapping[str, Any]) -> _Key:
    return site["file"], site["line"], site["source"]

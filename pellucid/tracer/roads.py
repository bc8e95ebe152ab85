"""Roads not taken: the lines that set a field too and were not reached, with what their conditions came to in the run.

Read from the source by `static`, joined with the conditions that the child evaluated. Used by `run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pellucid.core import PellucidError
from pellucid.tracer.child.engines import ENGINES
from pellucid.tracer.evidence import Evidencing
from pellucid.tracer.record import Assignment, Decision, Guard, Term
from pellucid.tracer.sources import SourceTree
from pellucid.tracer.static import Sites, sites

_Key = tuple[str, int, str]
"""File, line and text of a condition."""


def add_roads(
    decisions: Iterable[Decision], tree: SourceTree, outcome: Mapping[str, Any], evidencing: Evidencing
) -> tuple[Decision, ...]:
    """The decisions of the configuration, each with the lines that could have set it."""
    try:
        found = _lines(_Tree(tree))
    except PellucidError:
        # The decisions stand without them: the child has run code that this Python can't parse.
        return tuple(decisions)
    conditions = outcome.get("conditions", ())
    evaluated = {_key(one["site"]): [evidencing.term(term) for term in one["terms"]] for one in conditions}
    stubbed = {_key(one["site"]): {stub for term in one["terms"] for stub in term["stubs"]} for one in conditions}
    owners = frozenset(outcome.get("owners", ()))
    done = []
    for one in decisions:
        if one.level != "layers":
            could = _roads(one, tree, found, evaluated, owners)
            # A line that was not reached because a stub answered may be reached where the package is installed.
            tainted = {stub for line in could for guard in line.guards for stub in stubbed.get(_key_of(guard), ())}
            one = replace(one, could=could, tainted=tuple(sorted({*one.tainted, *tainted})))
        done.append(one)
    return tuple(done)


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
    notes = [f"no line of this version sets {', '.join(missing)}"] if missing else []
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

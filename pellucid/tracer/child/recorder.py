"""What rewritten engine code calls while it runs: operands of conditions, values given to fields, returns.

Made by `instrument`, which fills the tables of nodes; read by the engine files once a run is over. Every activation of
a function keeps its own `seen`: the operands that were evaluated in it, so that no call answers for another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from .values import brief, holds, plain, source_line, stub_in, truth_of, type_name

SEEN = "__seen__"
"""The local variable of rewritten functions that holds the operands of this activation."""

Seen = dict[Any, Any]
"""Operand's index -> (value, truth, stubs); `~index` of a guard -> truth of a ternary's test."""

_DEPTH = 3
"""Of calls that are followed to learn what a condition rests on."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the engine, with the text of the statement."""

    file: str
    line: int
    source: str
    function: str

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "source": self.source, "function": self.function}


@dataclass(frozen=True, slots=True)
class TermNode:
    """An operand of a condition: its text, and the identifiers and strings in it; a decorator's `holds` always."""

    expression: str
    names: tuple[str, ...]
    strings: tuple[str, ...]
    holds: bool


@dataclass(frozen=True, slots=True)
class GuardNode:
    """A condition; `taken` of a branch is known from its place, of a ternary or an operator from `seen`."""

    place: Place
    terms: tuple[int, ...]


Mark = tuple[int, int]
"""How many stubs had answered, and how many functions had returned."""

Flow = dict[tuple[int, bool], Seen]
"""Conditions that a value came by: the guard's index and the branch -> its operands as they were then."""

_MOST_FLOW = 64

Branches = tuple[tuple[int, bool | None], ...]
"""Conditions around a line, outermost first: the guard's index and the branch; None: look in `seen`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: the function that is called for it, or the local variable that holds it."""

    name: str
    is_local: bool


@dataclass(frozen=True, slots=True)
class Reads:
    """What flows into a value: local variables, attributes (of these the fields count), and called functions."""

    variables: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


NO_READS = Reads()


@dataclass(frozen=True, slots=True)
class SiteNode:
    """A line that gives `field` a value (or returns one: `field` is None). `owner` are the attributes between the
    variable and the field, of an assignment to an attribute: ("a",) for `self.a.field`."""

    place: Place
    branches: Branches
    field: str | None
    origin: Origin | None
    owner: tuple[str, ...] | None
    reads: Reads = NO_READS


@dataclass(slots=True)
class _Returned:
    value: Any
    node: SiteNode
    seen: Seen
    inner: _Returned | None


@dataclass(slots=True)
class Recorder:
    """Tables of the rewritten code, and what happened while it ran.

    `reads` has what each function's returned values depend on: identifiers and strings. `stubs` is the log that the
    stub finder appends to, a package for each question that its stub answered; `stubbed_functions` the engine's
    functions that asked, since they may have kept the answer.
    """

    root: str
    terms: list[TermNode] = field(default_factory=list)
    guards: list[GuardNode] = field(default_factory=list)
    sites: list[SiteNode] = field(default_factory=list)
    lines: dict[str, dict[int, Branches]] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)
    stubs: list[str] = field(default_factory=list)
    stubbed_functions: dict[str, set[str]] = field(default_factory=dict)
    assignments: list[dict[str, Any]] = field(default_factory=list)
    entered: set[str] = field(default_factory=set)
    on: bool = False
    _last: _Returned | None = None
    _returns: int = 0
    _returned: dict[str, tuple[int, Any, Flow]] = field(default_factory=dict)
    _given: dict[str, tuple[Any, Flow]] = field(default_factory=dict)
    _evaluated: Seen = field(default_factory=dict)
    _through: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def start(self) -> None:
        """Forget the assignments so far and record those that follow."""
        self.assignments.clear()
        self._evaluated.clear()
        self.entered.clear()
        self._returned.clear()
        self._given.clear()
        self._last, self.on = None, True

    def conditions(self) -> list[dict[str, Any]]:
        """Every condition that was evaluated since the start, with the last values of its operands."""
        return [
            {"site": node.place.to_json(), "terms": [self._term_json(index, self._evaluated) for index in node.terms]}
            for node in self.guards
            if any(index in self._evaluated for index in node.terms)
        ]

    def enter(self, function: str) -> Seen:
        """A function (`file:Class.method`) begins: what this activation will have seen."""
        self.entered.add(function)
        return {}

    def mark(self) -> Mark:
        return len(self.stubs), self._returns

    def term(self, seen: Seen, index: int, mark: Mark, value: Any) -> Any:
        """An operand was evaluated to `value`; stubs asked since `mark` have answered in it."""
        truth = truth_of(value)
        asked = set(self.stubs[mark[0] :])
        for name in self.terms[index].names:
            asked |= self.stubbed_functions.get(name, set())
        operand = seen.pop(_operand(index), None)
        seen[index] = (brief(value) if operand is None else operand, truth, tuple(sorted(asked)))
        if self.on:
            self._evaluated[index] = seen[index]
        return value

    def operand(self, seen: Seen, index: int, value: Any) -> Any:
        """The left side of a comparison: what a reader wants to see instead of its truth."""
        seen[_operand(index)] = brief(value)
        return value

    def test(self, seen: Seen, index: int, value: Any) -> Any:
        """A ternary's whole test, or the outcome of an operator in an assigned value."""
        seen[~index] = truth_of(value)
        return value

    def returned(self, seen: Seen, index: int, mark: Mark, value: Any) -> Any:
        node = self.sites[index]
        self._last = _Returned(value, node, seen, self._inner(node.origin, seen, value))
        if self.on:
            flow = self._flow(node, seen, mark, value)
            self._returns += 1
            self._returned[node.place.function.rpartition(".")[2]] = (self._returns, value, flow)
            if node.field is not None:
                self._append(node, seen, value, None, None, sys._getframe(1), flow)
        return value

    def assign(self, seen: Seen, index: int, mark: Mark, value: Any, owner: Any = None) -> Any:
        """A field is given `value`; `owner` is the object that the statement's target starts with."""
        if self.on:
            node = self.sites[index]
            inner = self._inner(node.origin, seen, value)
            flow = self._flow(node, seen, mark, value)
            self._given[str(node.field)] = value, flow
            name, stubs = type_name(owner, node.owner), self.stubs[mark[0] :]
            self._append(node, seen, value, name, inner, sys._getframe(1), flow, stubs)
        return value

    def set_attribute(self, seen: Seen, index: int, mark: Mark, owner: Any, name: Any, value: Any) -> None:
        """`setattr(owner, name, value)`: a field whose name is known only now."""
        setattr(owner, name, value)
        if self.on and isinstance(name, str):
            node = self.sites[index]
            named = SiteNode(node.place, node.branches, name, node.origin, (), node.reads)
            inner = self._inner(node.origin, seen, value)
            flow = self._flow(named, seen, mark, value)
            self._given[name] = value, flow
            stubs = self.stubs[mark[0] :]
            self._append(named, seen, value, type(owner).__name__, inner, sys._getframe(1), flow, stubs)
            self.assignments[-1]["carried"] = inner is None

    def local(self, seen: Seen, name: str, callee: str, value: Any) -> Any:
        """A local variable is given what a function returned."""
        seen[f"local {name}"] = self._inner(Origin(callee, is_local=False), seen, value)
        return value

    def kept(self, seen: Seen, index: int, mark: Mark, names: tuple[str, ...], value: Any) -> Any:
        """Local variables are given `value`: what decided it flows on into the values that they are read for."""
        if self.on:
            flow = self._flow(self.sites[index], seen, mark, value)
            seen.update({_flow_of(name): (value, flow) for name in names})
        return value

    def grown(self, seen: Seen, index: int, mark: Mark, name: str, value: Any) -> Any:
        """A local collection is given `value` too: what decided that joins what decided the others."""
        if self.on:
            flow = self._flow(self.sites[index], seen, mark, value)
            whole, before = seen.get(_flow_of(name), (_NOT_KNOWN, {}))
            seen[_flow_of(name)] = whole, {**flow, **before}
        return value

    def _flow(self, node: SiteNode, seen: Seen, mark: Mark, value: Any) -> Flow:
        """The conditions around a line, and those of what flows into its value since `mark`.

        Where the value is one of those that are read, as in `min(a, b)`, only that one counts.
        """
        flow: Flow = {}
        for index, branch in node.branches:
            taken = seen.get(~index) if branch is None else branch
            if taken is not None:
                flow[index, bool(taken)] = {one: seen[one] for one in self.guards[index].terms if one in seen}
        unknown: tuple[Any, Flow] = (_NOT_KNOWN, {})
        sources = [seen.get(_flow_of(name), unknown) for name in node.reads.variables]
        sources += [self._given.get(name, unknown) for name in node.reads.attributes]
        chosen = [source for one, source in sources if _is(one, value)]
        found = chosen or [source for _, source in sources]
        returned = [self._returned[name] for name in node.reads.calls if name in self._returned]
        # A function that keeps its answers has returned this very object before.
        found += [source for count, one, source in returned if count > mark[1] or _is_object(one, value)]
        for source in found:
            for key, operands in source.items():
                if len(flow) < _MOST_FLOW:
                    flow.setdefault(key, operands)
        return flow

    def _inner(self, origin: Origin | None, seen: Seen, value: Any) -> _Returned | None:
        """The `return` that a value came from, if that was seen."""
        if origin is None:
            return None
        last = seen.get(f"local {origin.name}") if origin.is_local else self._last
        if last is None or not (last.value is value or (origin.is_local and holds(last.value, value))):
            return None
        return last if origin.is_local or last.node.place.function.rpartition(".")[2] == origin.name else None

    def _append(
        self,
        node: SiteNode,
        seen: Seen,
        value: Any,
        owner: str | None,
        inner: _Returned | None,
        frame: FrameType,
        flow: Flow,
        stubs: Iterable[str] = (),
    ) -> None:
        stack, outer = self._callers(frame.f_back)
        guards = [*outer, *self.branches(node.branches, seen)]
        places, shown = [node.place], [*node.branches]
        while inner is not None:
            places.append(inner.node.place)
            guards += self.branches(inner.node.branches, inner.seen)
            shown += inner.node.branches
            inner = inner.inner
        around = {index for index, _ in shown}
        for (index, taken), operands in flow.items():
            if index not in around:
                guards += self.branches(((index, taken),), operands)
        *outer_places, place = places
        self.assignments.append(
            {
                "field": node.field,
                "owner": owner,
                "value": plain(value),
                "site": place.to_json(),
                "guards": guards,
                "stack": [one.to_json() for one in reversed(outer_places)] + stack,
                "stubs": sorted({*stubs, *stub_in(value)}),
                "level": "configuration",
                "carried": False,
            }
        )

    def branches(self, branches: Branches, seen: Seen) -> list[dict[str, Any]]:
        """The conditions with the values that their operands had in `seen`; ternaries not reached are left out."""
        found = []
        for index, branch in branches:
            taken = seen.get(~index) if branch is None else branch
            if taken is None:
                continue
            node = self.guards[index]
            terms = [self._term_json(one, seen) for one in node.terms]
            found.append({"site": node.place.to_json(), "taken": bool(taken), "terms": terms})
        return found

    def _term_json(self, index: int, seen: Seen) -> dict[str, Any]:
        node = self.terms[index]
        value, truth, stubs = seen.get(index, (None, node.holds or None, ()))
        return {
            "expression": node.expression,
            "value": value,
            "truth": truth,
            "names": node.names,
            "strings": node.strings,
            "through": sorted(self._reads_through(node.names, _DEPTH) - {*node.names}),
            "stubs": stubs,
        }

    def _reads_through(self, names: Iterable[str], depth: int) -> set[str]:
        """What the functions and properties among these names read, and what those read."""
        found: set[str] = set()
        for name in names:
            if depth and name in self.reads and (name, depth) not in self._through:
                # Set before the recursion: functions may call each other.
                self._through[name, depth] = set()
                read = self.reads[name]
                self._through[name, depth] = read | self._reads_through(read, depth - 1)
            found |= self._through.get((name, depth), set())
        return found

    def _callers(self, frame: FrameType | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The engine's lines that led here, innermost first, and the conditions around them, outermost first."""
        stack: list[dict[str, Any]] = []
        guards: list[dict[str, Any]] = []
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self.root):
                line, name = frame.f_lineno, frame.f_code.co_name
                source = source_line(file, line)
                stack.append(Place(self.relative(file), line, source, name).to_json())
                branches = self.lines.get(file, {}).get(line, ())
                seen = frame.f_locals.get(SEEN)
                if branches and isinstance(seen, dict):
                    guards = self.branches(branches, seen) + guards
            frame = frame.f_back
        return stack, guards

    def relative(self, file: str) -> str:
        return os.path.relpath(file, self.root).replace(os.sep, "/")


_NOT_KNOWN = object()


def _is(one: Any, value: Any) -> bool:
    return one is value or (type(one) is type(value) and isinstance(one, int | float | str) and bool(one == value))


def _is_object(one: Any, value: Any) -> bool:
    return one is value and isinstance(one, list | dict | set)


def _flow_of(name: str) -> str:
    return f"flow {name}"


def _operand(index: int) -> str:
    return f"operand {index}"

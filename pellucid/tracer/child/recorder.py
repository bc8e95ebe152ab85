"""What rewritten engine code calls while it runs: operands of conditions, values given to fields, returns.

Made by `instrument`, which fills the tables of nodes; read by the engine files once a run is over. Every activation of
a function keeps its own `seen`: the operands that were evaluated in it, so that no call answers for another.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

SEEN = "__seen__"
"""The local variable of rewritten functions that holds the operands of this activation."""

Seen = dict[Any, Any]
"""Operand's index -> (value, truth, stubs); `~index` of a guard -> truth of a ternary's test."""

_LONGEST = 160
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


Branches = tuple[tuple[int, bool | None], ...]
"""Conditions around a line, outermost first: the guard's index and the branch; None: look in `seen`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: the function that is called for it, or the local variable that holds it."""

    name: str
    is_local: bool


@dataclass(frozen=True, slots=True)
class SiteNode:
    """A line that gives `field` a value (or returns one: `field` is None). `owner` are the attributes between the
    variable and the field, of an assignment to an attribute: ("a",) for `self.a.field`."""

    place: Place
    branches: Branches
    field: str | None
    origin: Origin | None
    owner: tuple[str, ...] | None


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
    on: bool = False
    _last: _Returned | None = None
    _evaluated: Seen = field(default_factory=dict)
    _through: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def start(self) -> None:
        """Forget the assignments so far and record those that follow."""
        self.assignments.clear()
        self._evaluated.clear()
        self._last, self.on = None, True

    def conditions(self) -> list[dict[str, Any]]:
        """Every condition that was evaluated since the start, with the last values of its operands."""
        return [
            {"site": node.place.to_json(), "terms": [self._term_json(index, self._evaluated) for index in node.terms]}
            for node in self.guards
            if any(index in self._evaluated for index in node.terms)
        ]

    def mark(self) -> int:
        return len(self.stubs)

    def term(self, seen: Seen, index: int, mark: int, value: Any) -> Any:
        """An operand was evaluated to `value`; stubs asked since `mark` have answered in it."""
        truth = _truth(value)
        asked = set(self.stubs[mark:])
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
        seen[~index] = _truth(value)
        return value

    def returned(self, seen: Seen, index: int, value: Any) -> Any:
        node = self.sites[index]
        self._last = _Returned(value, node, seen, self._inner(node.origin, seen, value))
        if node.field is not None and self.on:
            self._append(node, seen, value, None, None, sys._getframe(1))
        return value

    def assign(self, seen: Seen, index: int, mark: int, value: Any, owner: Any = None) -> Any:
        """A field is given `value`; `owner` is the object that the statement's target starts with."""
        if self.on:
            node = self.sites[index]
            inner = self._inner(node.origin, seen, value)
            self._append(node, seen, value, _type_name(owner, node.owner), inner, sys._getframe(1), self.stubs[mark:])
        return value

    def set_attribute(self, seen: Seen, index: int, mark: int, owner: Any, name: Any, value: Any) -> None:
        """`setattr(owner, name, value)`: a field whose name is known only now."""
        setattr(owner, name, value)
        if self.on and isinstance(name, str):
            node = self.sites[index]
            named = SiteNode(node.place, node.branches, name, node.origin, ())
            inner = self._inner(node.origin, seen, value)
            self._append(named, seen, value, type(owner).__name__, inner, sys._getframe(1), self.stubs[mark:])
            self.assignments[-1]["carried"] = inner is None

    def local(self, seen: Seen, name: str, callee: str, value: Any) -> Any:
        """A local variable is given what a function returned."""
        seen[f"local {name}"] = self._inner(Origin(callee, is_local=False), seen, value)
        return value

    def _inner(self, origin: Origin | None, seen: Seen, value: Any) -> _Returned | None:
        """The `return` that a value came from, if that was seen."""
        if origin is None:
            return None
        last = seen.get(f"local {origin.name}") if origin.is_local else self._last
        if last is None or not (last.value is value or (origin.is_local and _holds(last.value, value))):
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
        stubs: Iterable[str] = (),
    ) -> None:
        stack, outer = self._callers(frame.f_back)
        guards = [*outer, *self.branches(node.branches, seen)]
        places = [node.place]
        while inner is not None:
            places.append(inner.node.place)
            guards += self.branches(inner.node.branches, inner.seen)
            inner = inner.inner
        *outer_places, place = places
        self.assignments.append(
            {
                "field": node.field,
                "owner": owner,
                "value": plain(value),
                "site": place.to_json(),
                "guards": guards,
                "stack": [one.to_json() for one in reversed(outer_places)] + stack,
                "stubs": sorted({*stubs, *_stub_in(value)}),
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
                source = _source_line(file, line)
                stack.append(Place(self.relative(file), line, source, name).to_json())
                branches = self.lines.get(file, {}).get(line, ())
                seen = frame.f_locals.get(SEEN)
                if branches and isinstance(seen, dict):
                    guards = self.branches(branches, seen) + guards
            frame = frame.f_back
        return stack, guards

    def relative(self, file: str) -> str:
        return os.path.relpath(file, self.root).replace(os.sep, "/")


def _holds(unpacked: Any, value: Any) -> bool:
    return isinstance(unpacked, tuple) and any(one is value for one in unpacked)


def _stub_in(value: Any) -> tuple[str, ...]:
    """The package of a value that is a stub itself."""
    name = vars(value if isinstance(value, type) else type(value)).get("_stub_name")
    return (str(name).partition(".")[0],) if name else ()


def _operand(index: int) -> str:
    return f"operand {index}"


def _truth(value: Any) -> bool | None:
    # Not `hasattr`: a stub has every attribute. The truth of an array is not asked, it may have none.
    if any("shape" in vars(one) for one in type(value).__mro__):
        return None
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _type_name(owner: Any, attributes: tuple[str, ...] | None) -> str | None:
    """The class of the object whose attribute is set: `owner.a.b.field` has `attributes` ("a", "b")."""
    if attributes is None:
        return None
    for name in attributes:
        owner = getattr(owner, name, None)
    return type(owner).__name__


def _source_line(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def brief(value: Any) -> str:
    """One short line for a value; objects are shown by their type, so that no code of theirs runs."""
    if value is None or isinstance(value, bool | int | float):
        text = repr(value)
    elif isinstance(value, str):
        text = repr(str(value)) if not isinstance(value, Enum) else f"{type(value).__name__}.{value.name}"
    elif isinstance(value, Enum):
        text = f"{type(value).__name__}.{value.name}"
    elif isinstance(value, list | tuple | set | frozenset):
        few = ", ".join(brief(one) for one in list(value)[:8]) + (", ..." if len(value) > 8 else "")
        text = f"({few})" if isinstance(value, tuple) else f"[{few}]" if isinstance(value, list) else f"{{{few}}}"
    elif isinstance(value, dict):
        few = ", ".join(f"{brief(key)}: {brief(one)}" for key, one in list(value.items())[:6])
        text = f"{{{few}}}" if len(value) <= 6 else f"{{{few}, ...}}"
    elif isinstance(value, type):
        text = value.__qualname__
    elif type(value).__module__ == "torch":
        text = str(value)
    else:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def plain(value: Any, depth: int = 4) -> Any:
    """The value as JSON can hold it: enums and dtypes by name, records as dictionaries, other objects by type."""
    if isinstance(value, Enum) and not isinstance(value, str):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if isinstance(value, Enum) else value
    if depth == 0:
        return brief(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one, depth - 1) for key, one in value.items()}
    names = getattr(type(value), "__dataclass_fields__", None) or getattr(type(value), "__struct_fields__", None)
    if names:
        return {name: plain(getattr(value, name, None), depth - 1) for name in names}
    return brief(value)

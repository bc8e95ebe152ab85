"""What a wheel requires: versions, specifiers and environment markers of PEP 440 and 508, as far as engines use them.

Used by `sources` and `environment`. The `packaging` library is no dependency of Pellucid, and this much suffices.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from dataclasses import dataclass

MARKERS = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
    "python_full_version": ".".join(map(str, sys.version_info[:3])),
    "extra": "",
}
"""Where the engine is taken to run: on Linux x86-64, with the running Python, without its extras."""

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:\.?(a|b|c|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?")
_SYMBOLS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}

VersionKey = tuple[tuple[int, ...], tuple[int, int], int, float]
"""Release without trailing zeros; stage before it and its number; post-release or -1; development one or infinity."""

_FINAL = (3, 0)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package and the versions that are allowed: `name` is normalised, `specifier` as in `>=1.2,<2`, or empty."""

    name: str
    specifier: str = ""

    @property
    def pin(self) -> str | None:
        """The version asked for exactly, else the least."""
        for symbol in ("==", "~=", ">="):
            if found := re.search(rf"(?<!=){symbol}\s*(\d[^,\s*]*)", self.specifier):
                return found[1].rstrip(".")
        return None

    def allows(self, version: str) -> bool:
        """Does `version` meet every clause? A clause that can't be read (as `===`) is not met."""
        return all(_meets(version, clause.strip()) for clause in self.specifier.split(",") if clause.strip())

    def __str__(self) -> str:
        return self.name + self.specifier


def normalised(name: str) -> str:
    """The name of a package as indexes compare it: `Flashinfer_Python` is `flashinfer-python`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_requirement(text: str) -> Requirement | None:
    """A `Requires-Dist` line without its extras; None where its marker does not hold, or it can't be read."""
    head, _, marker = text.partition(";")
    found = re.fullmatch(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^()@]*)\)?\s*", head)
    if found is None or not marker_holds(marker.strip()):
        return None
    return Requirement(normalised(found[1]), found[2].replace(" ", ""))


def marker_holds(marker: str) -> bool:
    """An environment marker, whose grammar is Python's. One that can't be read is taken to hold."""
    if not marker:
        return True
    try:
        return bool(_evaluate(ast.parse(marker, mode="eval").body))
    except (SyntaxError, KeyError, TypeError):
        return True


def version_key(version: str) -> VersionKey:
    """Orders versions as PEP 440 does, save epochs and local parts: `1.0.dev1 < 1.0a1 < 1.0rc1 < 1.0 < 1.0.post1`."""
    found = _VERSION.match(version.lower())
    if found is None:
        return (), (0, 0), 0, 0
    release, stage, number, post, dev = found.groups()
    numbers = [int(part) for part in release.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    if stage is not None:
        before = ("a", "b", "c").index("c" if stage == "rc" else stage), int(number)
    else:
        # A development version of the release itself comes before its candidates.
        before = (-1, 0) if post is None and dev is not None else _FINAL
    return tuple(numbers), before, -1 if post is None else int(post), math.inf if dev is None else int(dev)


def _meets(version: str, clause: str) -> bool:
    found = re.fullmatch(r"(==|!=|~=|>=|<=|>|<)(\d[\w.+]*)(\.\*)?", clause)
    if found is None:
        return False
    symbol, asked, wildcard = found.groups()
    if wildcard:
        return _begins(version, asked) == (symbol == "==")
    have, want = version_key(version), version_key(asked)
    match symbol:
        case "~=":
            return have >= want and _begins(version, asked.rpartition(".")[0])
        case "==" | "!=":
            same = version == asked if "+" in asked else have == want
            return same == (symbol == "==")
        case ">=":
            return have >= want
        case "<=":
            return have <= want
        case "<":
            # Not the candidates of the very release that is excluded.
            return have < want and (have[0] != want[0] or want[1] != _FINAL)
        case _:
            return have > want and (have[0] != want[0] or want[2] >= 0 or want[1] != _FINAL)


def _begins(version: str, release: str) -> bool:
    """`1.2.3` begins with the release `1.2`, and so does `1.2`; a missing number is 0."""
    have, want = ([int(part) for part in _release(text).split(".")] for text in (version, release))
    return (have + [0] * len(want))[: len(want)] == want


def _release(version: str) -> str:
    found = _VERSION.match(version)
    return "0" if found is None else found[1]


def _evaluate(node: ast.expr) -> bool | str:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_evaluate(part) for part in parts)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _compare(str(_evaluate(left)), operator, str(_evaluate(right)))
        case ast.Name(id=name):
            return MARKERS[name]
        case ast.Constant(value=str(text)):
            return text
    raise TypeError(ast.dump(node))


def _compare(left: str, operator: ast.cmpop, right: str) -> bool:
    if isinstance(operator, ast.In | ast.NotIn):
        return (left in right) == isinstance(operator, ast.In)
    symbol = _SYMBOLS[type(operator)]
    if left[:1].isdigit() and right[:1].isdigit():
        return _meets(left, symbol + right)
    if symbol not in ("==", "!="):
        raise TypeError(f"{left!r} and {right!r} have no order")
    return (left == right) == (symbol == "==")

"""What a trace is: decisions of another engine, each with the line that made it and the conditions that led there.

Made by `tracer.run` from what the child process recorded; read by everything that shows or compares traces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pellucid.core import PellucidError

Evidence = Literal["name", "trait", "hardware", "package", "environment", "flag", "stub", "other"]
"""What an operand of a condition looks at: an architecture's or model type's name, a number of the config, the GPU, an
installed package, an environment variable, a flag of the user, or a package that only a stub stands for."""

How = Literal["flag", "default", "forced", "unknown"]
"""The user's own flag; the field's declared default, untouched; set by a line under the guards; not evaluated."""

Level = Literal["static", "configuration", "layers"]
"""Lines that could set a field, not run; the engine's argument resolution, run; its model class built on `meta`."""


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the engine: `file` is relative to the tree's root."""

    file: str
    line: int
    source: str
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Term:
    """One operand of a condition with the value that it had; `truth` is None where it was not evaluated."""

    expression: str
    value: str | None
    truth: bool | None
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition around a line, and whether its body (True) or what follows it (False) was taken."""

    site: Site
    taken: bool
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value given to a field on one line; `stack` are the calls that led there, innermost first."""

    value: Any
    site: Site
    guards: tuple[Guard, ...] = ()
    stack: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The last value of a field; `history` holds every assignment in order, the deciding one last.

    `tainted` names the stubbed packages that answered on the way: the value may differ where they are installed.
    `could` are lines that set the field too and were not reached, with their conditions (static).
    """

    field: str
    value: Any
    how: How
    level: Level
    history: tuple[Assignment, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    tainted: tuple[str, ...] = ()
    could: tuple[Assignment, ...] = ()

    @property
    def site(self) -> Site | None:
        return self.history[-1].site if self.history else None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that the engine would print."""

    level: str
    text: str
    site: Site


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine's own reason not to start; `ours` when it is a limit of the tracer instead."""

    message: str
    site: Site | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """What `engine` `version` decides for a model on a GPU with these flags, in the order of the decisions."""

    engine: str
    version: str
    model: str
    architecture: str
    gpu: str
    flags: tuple[str, ...]
    decisions: tuple[Decision, ...]
    log: tuple[LogLine, ...] = ()
    refusal: Refusal | None = None
    pins: Mapping[str, str] | None = None
    """Packages that were really installed for the child, with their versions."""
    stubs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was assumed, not run, or is decided at run time only."""
    seconds: Mapping[str, float] | None = None

    def decision(self, field: str) -> Decision:
        """Raises PellucidError where the engine has no such field, naming those that it has."""
        for one in self.decisions:
            if one.field == field:
                return one
        known = ", ".join(one.field for one in self.decisions)
        raise PellucidError(f"{self.engine} {self.version} decides no field {field!r}; it decides {known}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def trace_from_json(values: Mapping[str, Any]) -> Trace:
    """The trace that `to_json` wrote. Raises PellucidError for anything else."""
    try:
        return Trace(
            **{
                **values,
                "flags": tuple(values["flags"]),
                "decisions": tuple(_decision(one) for one in values["decisions"]),
                "log": tuple(LogLine(one["level"], one["text"], Site(**one["site"])) for one in values.get("log", ())),
                "refusal": _refusal(values.get("refusal")),
                "stubs": tuple(values.get("stubs", ())),
                "notes": tuple(values.get("notes", ())),
            }
        )
    except (KeyError, TypeError) as error:
        raise PellucidError(f"this is no trace that `pellucid trace --json` wrote: {error}") from None


def _decision(values: Mapping[str, Any]) -> Decision:
    tuples = {name: tuple(values.get(name, ())) for name in ("evidence", "tainted")}
    histories = {name: tuple(_assignment(one) for one in values.get(name, ())) for name in ("history", "could")}
    return Decision(**{**values, **tuples, **histories})


def _assignment(values: Mapping[str, Any]) -> Assignment:
    guards = tuple(
        Guard(Site(**one["site"]), one["taken"], tuple(Term(**term) for term in one.get("terms", ())))
        for one in values.get("guards", ())
    )
    return Assignment(
        values["value"], Site(**values["site"]), guards, tuple(Site(**one) for one in values.get("stack", ()))
    )


def _refusal(values: Mapping[str, Any] | None) -> Refusal | None:
    if values is None:
        return None
    site = values.get("site")
    return Refusal(values["message"], None if site is None else Site(**site), values.get("ours", False))

"""Where two plans differ: the fact that caused it first, then each decision with its reason on both sides.

Called by `pellucid explain --diff`. Of two models or machines, causes are found by trying them (`selection.facts`); of
stored plans the descriptions are compared, and what follows from other decisions is told apart (`consequences`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pellucid.selection.consequences import followed
from pellucid.selection.explain import INDENT, memory_rows
from pellucid.selection.facts import (
    Effects,
    Fact,
    Key,
    Subject,
    differing_facts,
    effects,
    fit_key,
    outcomes,
    prevented,
)
from pellucid.selection.plan import Decision, ExecutionPlan
from pellucid.selection.view import show_value, title
from pellucid.traits.misfit import Misfit

FOLLOWS = "follows from"
"""How the cause of a decision begins that others brought about."""


@dataclass(frozen=True, slots=True)
class FactDiff:
    """A fact that differs, and what it changes alone (`attention.decode@1..256`, `fit of flashmla`) or with others."""

    name: str
    a: str
    b: str
    alone: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()

    @property
    def effect(self) -> str:
        """Both in words; empty for a fact that changes nothing."""
        parts = [f"changes {', '.join(self.alone)}"] if self.alone else []
        return "; ".join([*parts, f"has a part in {', '.join(self.partly)}"] if self.partly else parts)


@dataclass(frozen=True, slots=True)
class SideOfDecision:
    """A decision on one side: its value, how it came, why, and what stood against the other side's value there."""

    value: str
    how: str
    because: str
    against_other: str


@dataclass(frozen=True, slots=True)
class DecisionDiff:
    """A decision that differs, over neighbouring buckets where it does so alike. A side is None when it has no such op.

    `cause` says which fact changes it alone, or which do together; where that was not tried, from which other
    decisions that differ it follows: empty when from none.
    """

    title: str
    a: SideOfDecision | None
    b: SideOfDecision | None
    cause: str


@dataclass(frozen=True, slots=True)
class FitDiff:
    """A candidate against which something stands on one side alone, and what it is there."""

    ops: tuple[str, ...]
    candidate: str
    a: str
    b: str
    cause: str


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All that differs between two plans. `traced` says whether causes were tried."""

    a: str
    b: str
    traced: bool
    facts: tuple[FactDiff, ...]
    decisions: tuple[DecisionDiff, ...]
    fits: tuple[FitDiff, ...]
    memory: tuple[tuple[str, str, str], ...]
    blockers: tuple[tuple[str, ...], tuple[str, ...]]
    compared: int

    @property
    def equal(self) -> bool:
        """Whether both sides would run the same: facts that differ and change nothing do not count."""
        return not (self.decisions or self.fits or self.memory or any(self.blockers))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "equal": self.equal}


def diff_subjects(names: tuple[str, str], a: Subject, b: Subject) -> PlanDiff:
    """Two models, or one on two machines. Raises PlanError where one of them can't be planned."""
    facts = differing_facts(a, b)
    return _diff(names, a.plan(), b.plan(), facts, effects(a, b, facts))


def diff_plans(names: tuple[str, str], a: ExecutionPlan, b: ExecutionPlan) -> PlanDiff:
    """Two plans of which at least one was stored: what they were made for is known by its description only."""
    return _diff(names, a, b, None, {})


def _diff(
    names: tuple[str, str],
    a: ExecutionPlan,
    b: ExecutionPlan,
    facts: Sequence[Fact] | None,
    tried: Mapping[str, Effects],
) -> PlanDiff:
    left, right = outcomes(a), outcomes(b)
    decisions = _by_key(a), _by_key(b)
    compared = {**decisions[0], **decisions[1]}
    # Of an op that one side lacks, the candidates are no news.
    shared = {key for key in left if key in right} | compared.keys()
    differ = [key for key in dict.fromkeys([*left, *right]) if key in shared and left.get(key) != right.get(key)]
    own = [key for key in differ if key in compared]

    def cause(key: Key) -> str:
        return _cause([key], tried) or _follows(followed(key, a, b, own))

    found = [_fact_diff(f, tried[f.name], differ) for f in facts or ()]
    # What changes most comes first.
    found.sort(key=lambda f: (-len(f.alone), -len(f.partly)))
    return PlanDiff(
        *names,
        traced=facts is not None,
        facts=tuple(found) if facts is not None else tuple(_described(a, b)),
        # What stands for itself comes before what follows from it.
        decisions=tuple(sorted(_decision_diffs(*decisions, own, cause), key=lambda d: d.cause.startswith(FOLLOWS))),
        fits=tuple(_fit_diffs(*decisions, tried)),
        memory=tuple(_memory_diffs(a, b)),
        blockers=(_only(a, b), _only(b, a)),
        compared=len(compared),
    )


def _by_key(plan: ExecutionPlan) -> dict[Key, Decision]:
    return {(d.op, d.bucket): d for d in plan.decisions}


def _only(plan: ExecutionPlan, other: ExecutionPlan) -> tuple[str, ...]:
    """Blockers that the other plan has not."""
    return tuple(str(blocker) for blocker in plan.blockers if blocker not in other.blockers)


def _fact_diff(fact: Fact, found: Effects, differ: Sequence[Key]) -> FactDiff:
    alone, partly = (tuple(_titles([key for key in differ if key in keys])) for keys in (found.alone, found.partly))
    return FactDiff(fact.name, fact.a, fact.b, alone, partly)


def _cause(keys: Sequence[Key], tried: Mapping[str, Effects]) -> str:
    """The facts that change all of `keys` alone; else those that do together."""
    alone = [name for name, found in tried.items() if found.alone.issuperset(keys)]
    if alone or not tried:
        return f"by {', or by '.join(alone)}" if alone else ""
    parts = [name for name, found in tried.items() if (found.alone | found.partly).intersection(keys)]
    return f"by several together: {', '.join(parts)}" if parts else "by several together"


def _follows(keys: Sequence[Key]) -> str:
    return f"{FOLLOWS} {', '.join(_titles(keys))}" if keys else ""


def _titles(keys: Sequence[Key]) -> Iterator[str]:
    """Keys in words: neighbouring buckets of an op as one, and a candidate once for all ops."""
    runs: list[list[Key]] = []
    for key in keys:
        if ": " in key[0]:
            continue
        if runs and _are_neighbours(runs[-1][-1], key):
            runs[-1].append(key)
        else:
            runs.append([key])
    for run in runs:
        (op, first), (_, last) = run[0], run[-1]
        yield op if first is None else f"{op}@{first}" + (f"..{last}" if run[1:] else "")
    for candidate in dict.fromkeys(op.partition(": ")[2] for op, _ in keys if ": " in op):
        yield f"the fit of {candidate}"


def _are_neighbours(key: Key, following: Key) -> bool:
    """Whether the buckets of one op follow each other: each is twice the one before."""
    return key[0] == following[0] and key[1] is not None and following[1] == 2 * key[1]


def _described(a: ExecutionPlan, b: ExecutionPlan) -> Iterator[FactDiff]:
    """Lines of the descriptions that differ, matched by their subject."""
    for name, left, right in (("model", a.model, b.model), ("machine", a.hardware, b.hardware)):
        lines = {_subject(line): line for line in left}, {_subject(line): line for line in right}
        for subject in dict.fromkeys([*lines[0], *lines[1]]):
            pair = lines[0].get(subject, "none"), lines[1].get(subject, "none")
            if pair[0] != pair[1]:
                yield FactDiff(f"{name}: {subject}", *_without_common(*pair))


def _subject(line: str) -> str:
    """What a line of a description is about: the words before its first figure or colon."""
    head = line.partition(":")[0] if ":" in line else line
    words = [word for word in head.split() if not any(c.isdigit() for c in word)]
    return " ".join(words[:3]).rstrip(",")


def _without_common(a: str, b: str) -> tuple[str, str]:
    """Both lines less the parts between commas that they share."""
    parts = a.split(", "), b.split(", ")
    left = [p for p in parts[0] if p not in parts[1]]
    right = [p for p in parts[1] if p not in parts[0]]
    return ", ".join(left) or "none", ", ".join(right) or "none"


def _decision_diffs(
    left: Mapping[Key, Decision], right: Mapping[Key, Decision], differ: Sequence[Key], cause: Callable[[Key], str]
) -> Iterator[DecisionDiff]:
    groups: list[tuple[tuple[object, ...], list[Key]]] = []
    for key in differ:
        a, b = left.get(key), right.get(key)
        identity = (key[0], a and (a.value, a.how), b and (b.value, b.how), cause(key))
        if groups and groups[-1][0] == identity and _are_neighbours(groups[-1][1][-1], key):
            groups[-1][1].append(key)
        else:
            groups.append((identity, [key]))
    for _, keys in groups:
        a, b = left.get(keys[0]), right.get(keys[0])
        some = left if a is not None else right
        yield DecisionDiff(title([some[key] for key in keys]), _side(a, b), _side(b, a), cause(keys[0]))


def _side(own: Decision | None, other: Decision | None) -> SideOfDecision | None:
    if own is None:
        return None
    # The first reason of a kernel describes the op, which the facts say already; the second is the verdict.
    because = own.because[1] if own.bucket is not None and own.because[1:] else own.because[0]
    against = ""
    if other is not None and other.value is not None:
        lost = next((r for r in own.rejected if r.candidate == other.value), None)
        against = "" if lost is None else f"{lost.candidate}: {_reasons(lost.misfits)}"
    return SideOfDecision(show_value(own.value), own.how, because, against)


def _fit_diffs(
    left: Mapping[Key, Decision], right: Mapping[Key, Decision], tried: Mapping[str, Effects]
) -> Iterator[FitDiff]:
    """Candidates that one side alone has a reason against, once for all ops where the reasons are the same."""
    ops: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for key in [key for key in left if key in right]:
        a, b = prevented(left[key]), prevented(right[key])
        for candidate in [name for name in a if name in b]:
            kinds = {m.kind for m in a[candidate]}, {m.kind for m in b[candidate]}
            if kinds[0] == kinds[1]:
                continue
            here = _reasons([m for m in a[candidate] if m.kind not in kinds[1]]) or "nothing more against it"
            there = _reasons([m for m in b[candidate] if m.kind not in kinds[0]]) or "nothing more against it"
            cause = _cause([fit_key(key[0], candidate)], tried)
            ops.setdefault((candidate, here, there, cause), {})[key[0]] = None
    for (candidate, here, there, cause), names in ops.items():
        yield FitDiff(tuple(names), candidate, here, there, cause)


def _reasons(misfits: Sequence[Misfit]) -> str:
    return "; ".join(m.reason + (f" (remedy: {m.remedy})" if m.remedy else "") for m in misfits)


def _memory_diffs(a: ExecutionPlan, b: ExecutionPlan) -> Iterator[tuple[str, str, str]]:
    left, right = ({name: size for name, size, _ in memory_rows(plan.memory)} for plan in (a, b))
    for name in dict.fromkeys([*left, *right]):
        if left.get(name) != right.get(name):
            yield name, left.get(name, "none"), right.get(name, "none")


# --- as text ------------------------------------------------------------------------------------


def render_diff(diff: PlanDiff) -> str:
    """The difference for people, without a trailing newline; one line when there is none."""
    if diff.equal:
        idle = "; ".join(f"{f.name} {f.a} | {f.b}" for f in diff.facts)
        rest = f"; what differs changes nothing: {idle}" if idle else ""
        return (
            f"equal plans: {diff.compared} decisions and the memory bill are the same for {diff.a} and {diff.b}{rest}"
        )
    lines = [f"A  {diff.a}", f"B  {diff.b}"]
    for heading, facts in fact_sections(diff):
        lines += [heading, *_columns([(f.name, f.a, f.b, f.effect) for f in facts])]
    if diff.decisions:
        lines.append(f"decisions that differ ({diff.compared} compared)")
        for one in diff.decisions:
            lines += [INDENT + line for line in _decision_lines(one)]
    if diff.fits:
        lines.append("candidates that fit otherwise")
        for fit in diff.fits:
            lines.append(f"{INDENT}{fit.candidate} for {', '.join(fit.ops)}{_bracketed(fit.cause)}")
            lines += [f"{INDENT * 2}A {fit.a}", f"{INDENT * 2}B {fit.b}"]
    if diff.memory:
        lines += ["memory of one rank", *_columns(diff.memory)]
    for side, found in zip("AB", diff.blockers, strict=True):
        if found:
            lines += [f"keeps {side} alone from starting", *(INDENT + line for line in found)]
    return "\n".join(lines)


def fact_sections(diff: PlanDiff) -> Iterator[tuple[str, tuple[FactDiff, ...]]]:
    """The facts under their headings: those that change something first."""
    causing = tuple(f for f in diff.facts if f.effect)
    idle = tuple(f for f in diff.facts if not f.effect)
    if causing:
        yield "what differs, and what it changes", causing
    if idle:
        yield "what differs and changes nothing alone" if diff.traced else "what they were made for", idle


def _decision_lines(one: DecisionDiff) -> list[str]:
    lines = [one.title + _bracketed(one.cause)]
    for name, side in (("A", one.a), ("B", one.b)):
        if side is None:
            lines.append(f"{INDENT}{name} has no such decision")
            continue
        lines.append(f"{INDENT}{name} {side.value}  {side.how}: {side.because}")
        if side.against_other:
            lines.append(f"{INDENT * 3}not {side.against_other}")
    return lines


def _bracketed(cause: str) -> str:
    return f"  ({cause})" if cause else ""


def _columns(found: Sequence[tuple[str, ...]]) -> list[str]:
    """Name, A and B in columns, with what follows behind; a long value takes the room that it needs."""
    widths = [max(min(len(row[i]), 40) for row in found) for i in range(3)]
    return [
        (INDENT + f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}} | {row[2]:{widths[2]}}  {'  '.join(row[3:])}").rstrip()
        for row in found
    ]

"""`Check`, `KernelFigures` and `Report`: what `pellucid doctor` found as values, and its rendering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pellucid.selection.explain import table_lines
from pellucid.selection.plan import Decision
from pellucid.selection.view import TABLE_LEGEND, rows

Status = Literal["ok", "warn", "fail", "not checked"]
"""`warn`: it starts, and something is worse than it need be. `fail`: it would not start."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line. `found` is the fact, `remedy` what to do about it: every `warn` and `fail` has one."""

    group: str
    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not self.remedy:
            raise ValueError(f"{self.group}, {self.name}: {self.status} needs a remedy")


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """What was found of one op at one bucket. `decision` has the figures; its value is what they choose.

    `candidates` are all that fit, `right` those that passed the numeric gate; `why` says why some have no verdict or
    no time.
    """

    decision: Decision
    candidates: tuple[str, ...]
    right: tuple[str, ...]
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `right` is null where a candidate has no verdict, `seconds` where it has no time."""
        found = {m.candidate: m for m in self.decision.measured}
        candidates = []
        for name in self.candidates:
            m = found.get(name)
            timed = m is not None and m.seconds is not None
            candidates.append({
                "name": name,
                "chosen": name == self.decision.value,
                "right": True if name in self.right else None if m is None else m.right,
                "seconds": m.seconds if m is not None else None,
                "error": m.error if m is not None and timed else None,
                "detail": m.detail if m is not None else "",
            })  # fmt: skip
        return {
            "op": self.decision.op,
            "bucket": self.decision.bucket,
            "chosen": self.decision.value,
            "how": self.decision.how,
            "candidates": candidates,
            "why_not_run": self.why,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Every check, in the order of reading, and what `--kernels` found. `subject`: of a model on a machine."""

    subject: str
    checks: tuple[Check, ...]
    kernels: tuple[KernelFigures, ...] = ()

    @property
    def starts(self) -> bool:
        """Whether `serve` would start, as far as can be known before weights are read."""
        return all(check.status != "fail" for check in self.checks)

    @property
    def exit_code(self) -> int:
        return 0 if self.starts else 1

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "starts": self.starts,
            "checks": [asdict(check) for check in self.checks],
            "kernels": [figures.to_json() for figures in self.kernels],
        }


def render_report(report: Report) -> str:
    """The report for people, without a trailing newline; the verdict is the last line."""
    shown = list(_merged(report.checks))
    width = max((len(check.name) for check in shown if check.status != "not checked"), default=0)
    lines = [report.subject]
    for group in dict.fromkeys(check.group for check in shown):
        lines.append(group)
        for check in shown:
            if check.group != group:
                continue
            if check.status == "not checked":
                lines.append(f"  not checked: {check.name} ({check.found})")
                continue
            lines.append(f"  {check.status:4}  {check.name:{width}}  {check.found}".rstrip())
            lines += [f"  {'':4}  {'':{width}}  remedy: {check.remedy}"] if check.remedy else []
    return "\n".join([*lines, *_tables(report.kernels), _verdict(report.checks)])


def _tables(kernels: Iterable[KernelFigures]) -> Iterator[str]:
    """What each candidate takes, as `pellucid tune` prints it, under the buckets that were looked at."""
    shown = [row for row in rows([one.decision for one in kernels]) if row.table is not None]
    for row in shown:
        buckets = ",".join(str(decision.bucket) for decision in row.decisions)
        yield f"  {row.op}@{buckets}  {row.value}"
        yield from (f"    {line}" for line in table_lines(row.table))
    if shown:
        yield f"  {TABLE_LEGEND}"


def _merged(checks: Iterable[Check]) -> Iterator[Check]:
    """What was not checked for one reason on one line."""
    held: Check | None = None
    for check in checks:
        same = held is not None and (check.group, check.status, check.found) == (held.group, held.status, held.found)
        if held is not None and same and check.status == "not checked":
            held = replace(held, name=f"{held.name}, {check.name}")
            continue
        if held is not None:
            yield held
        held = check
    if held is not None:
        yield held


def _verdict(checks: Iterable[Check]) -> str:
    failed = [check.name for check in checks if check.status == "fail"]
    warned = sum(check.status == "warn" for check in checks)
    warnings = f"{warned} warning{'s' if warned > 1 else ''}" if warned else "no warnings"
    if failed:
        return f"would not start: {', '.join(dict.fromkeys(failed))}"
    return f"would start; {warnings}"

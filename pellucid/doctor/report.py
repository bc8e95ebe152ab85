"""`Check` and `Report`: the lines of `pellucid doctor` as values, and their rendering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

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
class Report:
    """Every check, in the order of reading. `subject` says of what: a model on a machine."""

    subject: str
    checks: tuple[Check, ...]

    @property
    def starts(self) -> bool:
        """Whether `serve` would start, as far as can be known before weights are read."""
        return all(check.status != "fail" for check in self.checks)

    @property
    def exit_code(self) -> int:
        return 0 if self.starts else 1

    def to_json(self) -> dict[str, Any]:
        return {"subject": self.subject, "starts": self.starts, "checks": [asdict(check) for check in self.checks]}


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
    return "\n".join([*lines, _verdict(report.checks)])


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

"""Says before anything is downloaded or started whether the engine would refuse, in its own words.

Called by `pellucid trace preflight`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pellucid.tracer.record import Refusal, Trace
from pellucid.tracer.text import MARK, refusal_text, title

Verdict = Literal["starts", "refuses", "unknown"]

EXIT_CODES: dict[Verdict, int] = {"starts": 0, "refuses": 1, "unknown": 3}


@dataclass(frozen=True, slots=True)
class Preflight:
    """`refuses`: the engine's own words and line; `unknown`: the tracer could not follow it to the end.

    `starts` means as far as choices go: memory, drivers and weights are not tried. `doubts` names the stand-ins that
    answered on the way, `notes` say what was assumed.
    """

    asked: str
    verdict: Verdict
    refusal: Refusal | None = None
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": self.exit_code}


def preflight(trace: Trace) -> Preflight:
    """What starting the engine would come to, with the warnings that it would print."""
    warnings = tuple(dict.fromkeys(line.text for line in trace.log if line.level.lower() in ("warning", "error")))
    doubts = tuple(sorted({name for one in trace.decisions for name in one.tainted}))
    return Preflight(title(trace), _verdict(trace), trace.refusal, warnings, doubts, trace.notes)


def render_preflight(found: Preflight) -> str:
    """A line for the verdict, the engine's reason with its line, and its warnings; no trailing newline."""
    lines = [found.asked]
    if found.verdict == "starts":
        lines.append("starts, as far as its choices go; memory, drivers and weights were not tried")
    elif found.refusal is not None:
        who = "refuses" if found.verdict == "refuses" else "could not be told: the tracer stopped"
        lines.append(f"{who}: {refusal_text(found.refusal)}")
    else:
        lines.append("could not be told: nothing of the engine was run, its source was only read")
    lines += [f"  it would warn: {' '.join(text.split())}" for text in found.warnings]
    lines += [f"  note: {text}" for text in found.notes]
    if found.doubts:
        lines.append(f"  {MARK} stand-ins answered for {', '.join(found.doubts)}")
    return "\n".join(lines)


def _verdict(trace: Trace) -> Verdict:
    if trace.refusal is not None:
        return "unknown" if trace.refusal.ours else "refuses"
    # A trace that is read from the source alone has run nothing that could have refused.
    ran = any(one.level != "static" for one in trace.decisions)
    return "starts" if ran else "unknown"

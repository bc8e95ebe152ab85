"""Compares a trace with the start-up log of a real server, field by field and line by line.

Called by `pellucid trace verify`. Only what the log states is compared; what it does not mention proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pellucid.core import PellucidError
from pellucid.tracer.record import Decision, LogLine, Trace
from pellucid.tracer.startup_log import Message, Setting, StartupLog, read_startup_log
from pellucid.tracer.text import INDENT, MARK, counted, short_site, shorten, show_value, table, title

Verdict = Literal["equal", "differs"]

LOGGED_AS: Mapping[str, tuple[str, ...]] = {
    "cache_dtype": ("kv_cache_dtype",),
    "kv_cache_dtype": ("cache_dtype",),
    "tp_size": ("tensor_parallel_size",),
    "max_model_len": ("max_seq_len",),
    "enable_chunked_prefill": ("chunked_prefill_enabled",),
    "compilation_mode": ("compilation_config.mode",),
}
"""Other names under which a server states a field."""

ROUNDING = 2e-3
"""Servers print fractions of memory with three digits."""

MOST_DIFFERING_WORDS = 2
FEWEST_WORDS = 5


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """A traced field beside what the server stated in line `number` of its log."""

    field: str
    traced: Any
    logged: Any
    verdict: Verdict
    number: int
    tainted: bool = False


@dataclass(frozen=True, slots=True)
class LineCheck:
    """A line that the trace foresaw beside the one that the server printed in its place."""

    traced: LogLine
    logged: str
    verdict: Verdict
    number: int


@dataclass(frozen=True, slots=True)
class Verification:
    """What could be compared. `warnings` say where the log is of another engine, version or request than the trace."""

    asked: str
    fields: tuple[FieldCheck, ...]
    lines: tuple[LineCheck, ...]
    unseen: int
    warnings: tuple[str, ...] = ()

    @property
    def differing(self) -> int:
        verdicts = [*(one.verdict for one in self.fields), *(one.verdict for one in self.lines)]
        return verdicts.count("differs")

    @property
    def exit_code(self) -> int:
        """0 where all that could be compared is equal, 1 where something differs, 3 where nothing could be compared."""
        if not self.fields and not self.lines:
            return 3
        return 1 if self.differing else 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "differing": self.differing, "exit_code": self.exit_code}


def verify(trace: Trace, log: str) -> Verification:
    """Compare with the text of a log. Raises PellucidError where it is no log of the traced engine."""
    found = read_startup_log(log)
    if found.engine != trace.engine:
        raise PellucidError(f"this is a log of {found.engine}, the trace is of {trace.engine}: trace {found.engine}")
    fields = tuple(check for one in trace.decisions if (check := _check_field(one, found)) is not None)
    foreseen = list({line.text: line for line in trace.log}.values())
    lines = tuple(same for line in foreseen if (same := _check_line(line, found.messages)) is not None)
    return Verification(title(trace), fields, lines, len(foreseen) - len(lines), tuple(_warnings(trace, found)))


def render_verification(found: Verification) -> str:
    """Differences first, then what is equal in one line; no trailing newline."""
    lines = [found.asked, *(f"warning: {text}" for text in found.warnings)]
    if found.exit_code == 3:
        return "\n".join([*lines, "nothing in this log could be compared: it states none of the traced fields"])
    wrong = [one for one in found.fields if one.verdict == "differs"]
    if wrong:
        rows = [("field", "traced", "the server said", "log line")]
        rows += [(one.field, _traced(one), show_value(one.logged), str(one.number)) for one in wrong]
        lines += ["", *table(rows)]
    for line in found.lines:
        if line.verdict == "differs":
            lines += ["", f"{short_site(line.traced.site)} would print  {shorten(line.traced.text, 90)}"]
            lines.append(f"{INDENT}line {line.number} of the log:  {shorten(line.logged, 90)}")
    equal = [one.field for one in found.fields if one.verdict == "equal"]
    printed = sum(line.verdict == "equal" for line in found.lines)
    lines += ["", f"equal: {', '.join(equal) or 'no field'}; {counted(printed, 'line')} printed as traced"]
    if found.unseen:
        lines.append(f"not in the log, which may be cut or filtered: {counted(found.unseen, 'foreseen line')}")
    return "\n".join(lines)


def _traced(one: FieldCheck) -> str:
    return f"{show_value(one.traced)} {MARK}" if one.tainted else show_value(one.traced)


def _check_field(decision: Decision, log: StartupLog) -> FieldCheck | None:
    if decision.how == "unknown":
        return None
    for name in (decision.field, *LOGGED_AS.get(decision.field, ())):
        setting = log.setting(name)
        if setting is not None:
            return _compare(decision, setting)
    return None


def _compare(decision: Decision, setting: Setting) -> FieldCheck:
    verdict: Verdict = "equal" if equal_values(decision.value, setting.value) else "differs"
    tainted = bool(decision.tainted)
    return FieldCheck(decision.field, decision.value, setting.value, verdict, setting.number, tainted)


def equal_values(traced: Any, logged: Any) -> bool:
    """Equal as a log can tell: fractions as rounded, enum members and dtypes by their last name, lists as tuples."""
    if isinstance(traced, bool) or isinstance(logged, bool):
        return traced is logged
    if isinstance(traced, int | float) and isinstance(logged, int | float):
        return math.isclose(traced, logged, rel_tol=ROUNDING)
    if isinstance(traced, str) and isinstance(logged, str):
        return _last_name(traced) == _last_name(logged)
    if isinstance(traced, list | tuple) and isinstance(logged, list | tuple):
        return len(traced) == len(logged) and all(map(equal_values, traced, logged))
    if isinstance(traced, dict) and isinstance(logged, dict):
        return traced.keys() == logged.keys() and all(equal_values(traced[key], logged[key]) for key in traced)
    return bool(traced == logged)


def _last_name(text: str) -> str:
    """`bfloat16` of `torch.bfloat16`; other text as it is."""
    return text.rpartition(".")[2] if text.replace(".", "").replace("_", "").isalnum() else text


def _check_line(foreseen: LogLine, messages: Sequence[Message]) -> LineCheck | None:
    """The message that the foreseen line became: the same text, else one of the same line of code, else a like one."""
    words = foreseen.text.split()
    same = next((one for one in messages if one.text.split() == words), None)
    if same is not None:
        return LineCheck(foreseen, same.text, "equal", same.number)
    name, line = foreseen.site.file.rpartition("/")[2], foreseen.site.line
    other = next((one for one in messages if (one.file, one.line) == (name, line)), None)
    if other is None:
        other = next((one for one in messages if one.file in (None, name) and _alike(words, one.text.split())), None)
    return None if other is None else LineCheck(foreseen, other.text, "differs", other.number)


def _alike(words: list[str], others: list[str]) -> bool:
    """Whether two messages are one sentence with other values in it."""
    if len(words) != len(others) or len(words) < FEWEST_WORDS:
        return False
    return sum(mine != other for mine, other in zip(words, others, strict=True)) <= MOST_DIFFERING_WORDS


def _warnings(trace: Trace, log: StartupLog) -> list[str]:
    found = []
    if log.version is not None and log.version != trace.version:
        found.append(f"the log is of {log.engine} {log.version}, the trace of {trace.version}")
    model = log.setting("model_path") or log.setting("model")
    if model is not None and str(model.value).rstrip("/").rpartition("/")[2].lower() != trace.model.lower():
        found.append(f"the server ran {model.value}, the trace is of {trace.model}: compare their config.json")
    return found

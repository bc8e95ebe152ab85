"""From what a child recorded to decisions: for each field its value, how it came about, and the line. Used by `run`.

A value is the one that the engine's finished configuration holds. A line is called the deciding one only if it gave
that very value; where the two disagree the field is unknown, or its line is, and a note says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.tracer.evidence import Evidencing, evidence_of
from pellucid.tracer.record import Assignment, Decision, How, Level

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An assignment, the stubbed packages that answered on the way to it, and what was being made.

    `carried` values come from elsewhere: a loop that sets attributes by name decides nothing itself.
    """

    made: Assignment
    taint: tuple[str, ...]
    level: Level
    carried: bool
    order: int


def decide(
    outcome: Raw, evidencing: Evidencing, flags: Sequence[str] = ()
) -> tuple[tuple[Decision, ...], tuple[str, ...]]:
    """The decisions of one run in the order in which they are shown, and notes on what is not certain.

    `flags` are the user's, as words: a line that gives a field what its own flag says has decided nothing.
    """
    values, defaults = outcome.get("values", {}), outcome.get("defaults", {})
    owners = {*outcome.get("owners", ()), None}
    histories: dict[str, list[_Recorded]] = defaultdict(list)
    recorded: dict[str, list[_Recorded]] = defaultdict(list)
    for order, raw in enumerate(outcome.get("assignments", ())):
        is_field = raw["owner"] in owners
        # Names that are no fields (`attention_arch`) are recorded for what rests on them.
        made = evidencing.assignment(raw, is_field or raw["field"] not in evidencing.fields)
        one = _Recorded(made, evidencing.tainting(raw), raw["level"], raw["carried"], order)
        recorded[raw["field"]].append(one)
        if is_field:
            histories[raw["field"]].append(one)
    if not values:
        return _unfinished(histories, [name for name in histories if name in defaults]), ()
    unset = [name for name in outcome.get("always_set", ()) if name in values and values[name] is None]
    if unset or not histories:
        what = f"{unset[0]} is still unset" if unset else "no line was seen to set a field"
        note = f"{what} in the finished configuration: this version resolves it where the tracer does not reach"
        return _unfinished(histories, values), (note,)
    found = [_decision(name, value, histories.get(name, ()), outcome, flags) for name, value in values.items()]
    decisions = [decision for decision, _ in found]
    return (*decisions, *_layers(outcome, recorded)), tuple(note for _, note in found if note is not None)


def _decision(
    name: str, value: Any, history: Sequence[_Recorded], outcome: Raw, flags: Sequence[str]
) -> tuple[Decision, str | None]:
    unsettled = outcome.get("unsettled", {}).get(name)
    if unsettled is not None:
        note = f"{name}: it was {value!r} so far; {unsettled}"
        return Decision(name, None, "unknown", "configuration", tuple(one.made for one in history)), note
    # Some versions' parsers hand on a flag in a way of their own; its spelling is the field's.
    given = name in outcome["given"] or f"--{name.replace('_', '-')}" in {word.partition("=")[0] for word in flags}
    default = outcome["defaults"].get(name)
    giving = [index for index, one in enumerate(history) if one.made.value == value]
    if giving:
        last = max((index for index in giving if not history[index].carried), default=giving[-1])
        kept = tuple(one.made for index, one in enumerate(history[: last + 1]) if index == last or not one.carried)
        deciding = history[last]
        how: How = "flag" if given and _says(value, flags) else "forced"
        return Decision(name, value, how, deciding.level, kept, evidence_of(deciding.made), deciding.taint), None
    if (given and _says(value, flags)) or (not history and (given or value == default)):
        return Decision(name, value, "flag" if given else "default", "configuration"), None
    if history and value == default and not given:
        lines = ", ".join(str(one.made.site) for one in history[-2:])
        note = f"{name}: set at {lines}, but the finished configuration has its default: which one holds is unknown"
        return Decision(name, None, "unknown", "configuration", tuple(one.made for one in history)), note
    note = f"{name}: the value is the engine's own, but no recorded line gave it"
    return Decision(name, value, "forced", "configuration"), note


def _says(value: Any, flags: Sequence[str]) -> bool:
    """Whether one of the user's words is this value: `TRITON_MLA` is `AttentionBackendEnum.TRITON_MLA`."""
    return str(value).rpartition(".")[2].lower() in {word.rpartition("=")[2].lower() for word in flags}


def _unfinished(histories: Mapping[str, Sequence[_Recorded]], names: Iterable[str]) -> tuple[Decision, ...]:
    """The engine stopped, or did not resolve: what it had set until then is history, no value is final."""
    return tuple(
        Decision(name, None, "unknown", "configuration", tuple(one.made for one in histories.get(name, ())))
        for name in names
    )


_LAYER_FIELDS = (
    ("method", ("quant_method",)),
    ("scheme", ("scheme",)),
    ("runner", ("runner",)),
    ("backend", ("backend", "attn_backend")),
    ("kernel", ("kernel", "fp8_linear")),
)
"""What a layer's constructor chose, and the attributes that hold it; engines name backends `fp8_backend` and so on."""


def _layers(outcome: Raw, recorded: Mapping[str, Sequence[_Recorded]]) -> tuple[Decision, ...]:
    """One decision for each thing that the constructors of one kind of layer chose, all values where they differ."""
    decisions = []
    by_kind: dict[str, list[Raw]] = defaultdict(list)
    for one in outcome.get("layers", ()):
        by_kind[one["kind"]].append(one)
    for kind in ("attention", "moe", "linear"):
        for part, fields in _LAYER_FIELDS:
            chosen = dict.fromkeys(str(one[part]) for one in by_kind[kind] if one.get(part) not in _NOTHING)
            if chosen:
                classes = {one.get(f"{part}_class", one[part]) for one in by_kind[kind] if one.get(part)}
                history = _layer_history(recorded, fields, {*chosen, *(f"<{name}>" for name in classes), *classes})
                value = next(iter(chosen)) if len(chosen) == 1 else list(chosen)
                kinds, taint = (evidence_of(history[-1].made), history[-1].taint) if history else ((), ())
                kept = tuple(one.made for one in history)
                decisions.append(Decision(f"{kind}_layer_{part}", value, "forced", "layers", kept, kinds, taint))
    return tuple(decisions)


_NOTHING = (None, "", "None", "NoneType")


def _layer_history(
    recorded: Mapping[str, Sequence[_Recorded]], fields: tuple[str, ...], values: set[str]
) -> list[_Recorded]:
    """The lines that gave one of these values until one chose it, in order, each line and value once."""
    found: dict[tuple[str, str], _Recorded] = {}
    for name, history in recorded.items():
        if name in fields or (fields[0] == "backend" and name.endswith("_backend")):
            for one in history:
                # A backend may be given by its dotted path.
                text = str(one.made.value)
                if {text, text.rpartition(".")[2]} & values:
                    found.setdefault((str(one.made.site), text), one)
    if not found:
        return []
    # A line that gives the path chose; those that give the class, or its name, have only looked it up.
    chose = max(reversed(found.values()), key=lambda one: min(str(one.made.value).count("."), 2))
    return sorted((one for one in found.values() if one.order <= chose.order), key=lambda one: one.order)

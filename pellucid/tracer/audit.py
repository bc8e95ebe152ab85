"""Finds models that an engine treats unlike their siblings: equal traits, other choices. For `pellucid trace audit`.

Siblings are models that no kernel can tell apart; what still differs between them was decided by a name, or by a number
that lies outside of those traits. Choices against a kernel's known limits are reported beside.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pellucid.core import CheckpointError, PellucidError, UnsupportedModelError
from pellucid.hardware.facts import Hardware
from pellucid.tracer.diff import Parting, diff
from pellucid.tracer.misfits import KnownMisfit, known_misfits
from pellucid.tracer.record import Decision, Refusal, Trace
from pellucid.tracer.text import (
    INDENT,
    WIDTH,
    refusal_text,
    short_site,
    shorten,
    show_apart,
    show_value,
    table,
    wrapped,
)
from pellucid.traits.config import TraitReport, read_traits
from pellucid.traits.model import MLATraits, ModelTraits

UNVERIFIED = "chosen against a limit that was read in the kernel's source or documents, not tried"


@dataclass(frozen=True, slots=True)
class AuditCase:
    """A model's traits and what the engine decided for it. Without traits, `unread` says why there are none."""

    traits: TraitReport | None
    trace: Trace
    unread: str = ""


@dataclass(frozen=True, slots=True)
class Asymmetry:
    """A field that siblings get unequally. `values`: each value with its models, the most frequent first.

    `parting` is the first condition that tells the first two values' models apart; `follows` another field that it
    reads and that differs too.
    """

    field: str
    values: tuple[tuple[Any, tuple[str, ...]], ...]
    parting: Parting | None
    follows: str | None = None

    @property
    def by_name(self) -> bool:
        return self.follows is None and self.parting is not None and self.parting.evidence == "name"


@dataclass(frozen=True, slots=True)
class Siblings:
    """Models with equal kernel traits. `identical` says whether every trait is equal, not only those.

    `started` are the models that were compared, `compared` the number of fields that two of them have a value of.
    """

    traits: tuple[str, ...]
    models: tuple[str, ...]
    identical: bool
    asymmetries: tuple[Asymmetry, ...]
    started: tuple[str, ...]
    compared: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """One engine on one machine over many models.

    `stopped`: the engine refused, or the tracer could not go on. `unread`: models without readable traits, and why.
    """

    engine: str
    version: str
    gpu: str
    groups: tuple[Siblings, ...]
    misfits: tuple[KnownMisfit, ...]
    stopped: tuple[tuple[str, Refusal], ...]
    unread: tuple[tuple[str, str], ...] = ()

    @property
    def by_name(self) -> tuple[tuple[Siblings, Asymmetry], ...]:
        return tuple((group, one) for group in self.groups for one in group.asymmetries if one.by_name)


def read_case(folder: Path, trace: Trace) -> AuditCase:
    """The case of a model's folder. Raises PellucidError where its config.json can't be read."""
    config, separate = _read_json(folder / "config.json"), folder / "hf_quant_config.json"
    try:
        return AuditCase(read_traits(config, None, _read_json(separate) if separate.exists() else None), trace)
    except (CheckpointError, UnsupportedModelError) as error:
        return AuditCase(None, trace, str(error))


def audit(cases: Sequence[AuditCase], hardware: Hardware, tensor_parallel_size: int) -> AuditReport:
    """Group the models by kernel traits and compare within each group.

    Raises PellucidError for no case, or traces of more than one engine, version or GPU.
    """
    asked = {(case.trace.engine, case.trace.version, case.trace.gpu) for case in cases}
    if len(asked) != 1:
        raise PellucidError(f"an audit compares models on one engine and GPU, got {len(asked)} of them")
    groups: dict[tuple[str, ...], list[tuple[ModelTraits, Trace]]] = {}
    misfits: list[KnownMisfit] = []
    for case in cases:
        if case.traits is not None:
            traits = case.traits.traits
            groups.setdefault(kernel_traits(case.traits), []).append((traits, case.trace))
            misfits += known_misfits(case.trace, case.traits, hardware, tensor_parallel_size)
    stopped = [(case.trace.model, case.trace.refusal) for case in cases if case.trace.refusal is not None]
    unread = [(case.trace.model, case.unread) for case in cases if case.traits is None]
    siblings = tuple(_siblings(traits, members) for traits, members in groups.items())
    return AuditReport(*asked.pop(), siblings, tuple(misfits), tuple(stopped), tuple(unread))


def kernel_traits(report: TraitReport) -> tuple[str, ...]:
    """What a kernel of the model can depend on apart from sizes: attention, storage of weights, special parts."""
    traits = report.traits
    attention = traits.attention
    if isinstance(attention, MLATraits):
        widths = f"{attention.kv_lora_rank}+{attention.qk_rope_head_dim}"
        kind = f"MLA {widths}, keys {attention.qk_nope_head_dim}, values {attention.v_head_dim}"
    else:
        kind = f"GQA of width {attention.head_dim}"
    experts = f"experts {traits.weights.routed_experts}" if traits.moe is not None else "no experts"
    return (kind, experts, f"attention {traits.weights.attention}", *(one.trait for one in report.missing))


def render_audit(report: AuditReport, *, width: int = WIDTH) -> str:
    """Groups that are treated unequally first, then misfits and refusals; no trailing newline."""
    models = sum(len(group.models) for group in report.groups)
    compared = [group for group in report.groups if len(group.models) > 1]
    named = len({group.traits for group, _ in report.by_name})
    counts = f"{models} models of {len(report.groups)} kinds, {len(compared)} with siblings, {named} told apart by name"
    lines = [f"{report.engine} {report.version} on {report.gpu}: {counts}"]
    for group in compared:
        lines += ["", *wrapped("", "; ".join(group.traits), width)]
        same = "every trait equal" if group.identical else "other sizes"
        lines += wrapped(INDENT, f"{', '.join(group.models)}  ({same})", width)
        lines += _asymmetry_lines(group, width)
    for verified, heading in ((True, "chosen against a limit of the kernel"), (False, UNVERIFIED)):
        found = [one for one in report.misfits if one.verified is verified]
        if found:
            rows = [(one.model, f"{one.field} {one.value}", one.reason) for one in found]
            lines += ["", heading, *table(rows)]
    if report.stopped:
        lines += ["", "not started"]
        lines += table([(model, ("tracer: " if why.ours else "") + refusal_text(why)) for model, why in report.stopped])
    for model, reason in report.unread:
        lines += ["", *wrapped("", f"not compared: {model}: {reason}", width)]
    alone = [model for group in report.groups if len(group.models) == 1 for model in group.models]
    if alone:
        lines += ["", *wrapped("without siblings here: ", ", ".join(alone), width)]
    return "\n".join(lines)


def _siblings(kernel: tuple[str, ...], members: Sequence[tuple[ModelTraits, Trace]]) -> Siblings:
    identical = len({_without_tokens(traits) for traits, _ in members}) == 1
    started = [trace for _, trace in members if trace.refusal is None]
    names = tuple(trace.model for _, trace in members)
    known = Counter(one.field for trace in started for one in trace.decisions if one.how != "unknown")
    compared = sum(times > 1 for times in known.values())
    return Siblings(
        kernel, names, identical, tuple(_asymmetries(started)), tuple(trace.model for trace in started), compared
    )


def _asymmetries(traces: Sequence[Trace]) -> Iterator[Asymmetry]:
    """Fields with more than one value, by name first. Values are compared as they are written in JSON."""
    fields = dict.fromkeys(one.field for trace in traces for one in trace.decisions)
    found = []
    for field in fields:
        by_value: dict[str, list[Trace]] = {}
        for trace in traces:
            decision = _decision(trace, field)
            if decision is not None and decision.how != "unknown":
                by_value.setdefault(json.dumps(decision.value, default=str, sort_keys=True), []).append(trace)
        if len(by_value) > 1:
            ordered = sorted(by_value.values(), key=len, reverse=True)
            values = tuple((group[0].decision(field).value, tuple(one.model for one in group)) for group in ordered)
            differences = diff(ordered[0][0], ordered[1][0]).differences
            apart = next((one for one in differences if one.field == field), None)
            found.append(Asymmetry(field, values, apart.parting if apart else None, apart.follows if apart else None))
    yield from sorted(found, key=lambda one: (not one.by_name, one.follows is not None))


def _decision(trace: Trace, field: str) -> Decision | None:
    return next((one for one in trace.decisions if one.field == field), None)


def _without_tokens(traits: ModelTraits) -> ModelTraits:
    return replace(traits, bos_token_id=None, eos_token_ids=())


def _asymmetry_lines(group: Siblings, width: int) -> Iterator[str]:
    """A table for each way in which the models are told apart, and below it the conditions that do."""
    if not group.asymmetries:
        yield f"{INDENT}{_alike(group)}"
    ways: dict[tuple[tuple[str, ...], ...], list[Asymmetry]] = {}
    for one in group.asymmetries:
        ways.setdefault(tuple(models for _, models in one.values), []).append(one)
    for sides, found in ways.items():
        yield from wrapped(INDENT, " | ".join(", ".join(models) for models in sides), width)
        yield from (INDENT + line for line in table([_asymmetry_row(one) for one in found]))
        told = {short_site(one.parting.site): one.parting.left for one in found if one.by_name and one.parting}
        for place, term in told.items():
            yield f"{INDENT * 2}{place}  {shorten(term.expression, 84)}"


def _alike(group: Siblings) -> str:
    """What is known of siblings between which no difference was found."""
    if len(group.started) < 2:
        return "not compared: fewer than two of them start"
    if not group.compared:
        return "not compared: no field has a known value in two of them"
    return "treated alike" if group.started == group.models else "those that start are treated alike"


def _asymmetry_row(one: Asymmetry) -> tuple[str, str, str, str]:
    values = [value for value, _ in one.values]
    shown = [*show_apart(values[0], values[1], limit=30), *(show_value(value, limit=30) for value in values[2:])]
    if one.parting is None:
        return one.field, " | ".join(shown), "", "no condition that both came by"
    kind = "another condition" if one.parting.evidence == "other" else one.parting.evidence
    reason = f"follows {one.follows}" if one.follows else f"by {kind}"
    return one.field, " | ".join(shown), reason, short_site(one.parting.site)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PellucidError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise PellucidError(f"{path}: expected an object")
    return values

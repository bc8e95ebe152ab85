"""What `explain` can read: a model on a machine, or a plan that was stored. Used by `pellucid explain` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.targets import local_path
from pellucid.core import PellucidError
from pellucid.selection.args import EngineArgs

if TYPE_CHECKING:
    from pellucid.selection.facts import Subject
    from pellucid.selection.plan import ExecutionPlan


@dataclass(frozen=True, slots=True)
class Source:
    """A plan with what it was made from. `subject` is None of a stored plan: nothing can be tried on it."""

    label: str
    plan: ExecutionPlan
    notes: tuple[str, ...]
    conflicts: tuple[str, ...]
    subject: Subject | None


def open_source(args: EngineArgs, hardware: str) -> Source:
    """The plan of `args.model` on the machine called `hardware`; or the one that the file of that name holds.

    Raises:
        PellucidError: no such model, machine or file, or a flag that does not fit.
    """
    values = _json_of(args.model)
    if values is not None and _is_plan(values):
        return _stored(args.model, values)
    from pellucid.hardware import load_hardware
    from pellucid.models.checkpoint import Checkpoint
    from pellucid.selection.facts import Subject
    from pellucid.selection.memory import stored_bytes
    from pellucid.selection.resolve import resolve

    checkpoint = Checkpoint.open(local_path(args.model))
    report = checkpoint.report()
    report.require_supported()
    machine = load_hardware(hardware)
    stored = stored_bytes(checkpoint.tensors, report.traits.num_layers)
    subject = Subject(args, report.traits, machine, stored)
    plan = subject.plan()
    if hardware != "this":
        return Source(f"{_short(args.model)} on {hardware}", plan, report.notes, report.conflicts, subject)
    notes = report.notes
    if not plan.blockers:
        # What was measured here before is part of the plan that a start would make; nothing is measured now.
        from pellucid.tuning.start import tune_plan

        resolver = partial(resolve, args, report.traits, machine, stored_bytes=stored)
        tuned = tune_plan(args, report.traits, machine, resolver, checkpoint.tensors, measure=False)
        plan, notes = tuned.plan, (*notes, *tuned.notes)
        subject = replace(subject, evidence=tuned.evidence)
    return Source(f"{_short(args.model)} on this machine", plan, notes, report.conflicts, subject)


def open_other(source: Source, args: EngineArgs, hardware: str, other: str) -> Source:
    """What `--diff OTHER` names: a stored plan, a machine for the same model, or a model on the same machine.

    Raises:
        PellucidError: it is none of them.
    """
    from pellucid.hardware import fixture_names

    values = _json_of(other)
    machine = other in ("this", *fixture_names()) or (values is not None and "cpu" in values)
    if not machine:
        try:
            return open_source(replace(args, model=other), hardware)
        except PellucidError as error:
            if Path(other).exists():
                raise
            known = ", ".join(("this", *fixture_names()))
            raise PellucidError(f"--diff {other}: {error}; nor is it a machine: {known}") from None
    if source.subject is None:
        raise PellucidError(f"--diff {other}: {source.label} is a stored plan; give another, or a model")
    return open_source(args, other)


def _stored(path: str, values: Mapping[str, Any]) -> Source:
    from pellucid.selection.plan import ExecutionPlan

    # As `explain --json` prints it, or as the server's /plan answers.
    plan = values.get("plan", values)
    try:
        found = ExecutionPlan.from_json(plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PellucidError(f"{path}: not a plan of this version: {error}; store it again with --json") from None
    return Source(_short(path), found, tuple(values.get("notes", ())), tuple(values.get("conflicts", ())), None)


def _is_plan(values: Mapping[str, Any]) -> bool:
    plan = values.get("plan", values)
    return isinstance(plan, dict) and "decisions" in plan and "memory" in plan


def _json_of(name: str) -> dict[str, Any] | None:
    """The object in a .json file; None for anything else, which its reader then refuses by name."""
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _short(name: str) -> str:
    """The part of a path that tells models apart: config.json is called after its folder."""
    path = Path(name)
    return path.resolve().parent.name if path.name == "config.json" else path.name

"""Chooses one backend for one op and bucket, and records why each other candidate was not. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pellucid.selection.evidence import Evidence, Measurement, fastest, is_tie
from pellucid.selection.misfits import Need, misfits, notes
from pellucid.selection.plan import Decision, How, Measured, Rejection
from pellucid.traits.backend import BackendTraits, Op
from pellucid.traits.misfit import Misfit


@dataclass(frozen=True, slots=True)
class Slot:
    """One thing that needs a backend: an op, the buckets it is decided for, and the traits that define it.

    `flag` is the field of `EngineArgs` that names its backend; `asked` what the user gave there, when this
    backend serves the slot; `aside` says why it was not applied here when it does not.
    """

    name: str
    op: Op
    flag: str
    need: Need
    buckets: tuple[int, ...]
    traits: str
    asked: str | None = None
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend of the slot's op with everything that keeps it from running there."""

    backend: BackendTraits
    misfits: tuple[Misfit, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def nearness(self) -> tuple[bool, int, int]:
        """Sorts the candidate that needs least to run first."""
        return (not self.backend.built_in, len(self.misfits), -self.backend.priority)


def assess(slot: Slot, backends: Sequence[BackendTraits]) -> tuple[Candidate, ...]:
    """Every backend of the op, in the order given (the fixed one), with its misfits."""
    return tuple(Candidate(b, misfits(b, slot.need), notes(b, slot.need)) for b in backends if b.op == slot.op)


def pick(slot: Slot, bucket: int, fitting: Sequence[str], evidence: Evidence) -> str | None:
    """The name to take among those that fit, in the fixed order: asked, else fastest, else first."""
    if slot.asked is not None:
        return slot.asked if slot.asked in fitting else None
    measured = _counting(_measured(slot, bucket, fitting, evidence))
    right = [name for name in fitting if name not in measured or measured[name].right]
    return fastest(right, measured) or (right[0] if right else None)


def decide(slot: Slot, bucket: int, candidates: Sequence[Candidate], evidence: Evidence) -> Decision:
    """The decision for one bucket. Its value is None when no candidate runs."""
    fitting = [c.name for c in candidates if c.fits]
    taken = pick(slot, bucket, fitting, evidence)
    measured = _measured(slot, bucket, fitting, evidence)
    results = tuple(Measured.of(name, measured[name]) for name in fitting if name in measured)
    if taken is None:
        nearest = min(candidates, key=lambda c: c.nearness, default=None)
        wrong = next((f"{name} {m.detail}" for name, m in measured.items() if not m.right), "")
        verdict = "this version has nothing for it"
        if fitting:
            verdict = f"whatever fits failed the numeric gate here: {wrong}"
        elif nearest is not None:
            misfits = "; ".join(map(str, nearest.misfits))
            verdict = f"nothing in this version runs it; nearest is {nearest.name}: {misfits}"
        rejected = tuple(Rejection(c.name, c.misfits, c.notes) for c in candidates)
        return Decision(slot.name, bucket, None, "forced by traits", (slot.traits, verdict), rejected, results)
    how, verdict = _verdict(slot, taken, fitting, measured)
    chosen = next(c for c in candidates if c.name == taken)
    because = tuple(line for line in (slot.traits, verdict, slot.aside, *chosen.notes) if line)
    rejected = tuple(
        Rejection(c.name, c.misfits or (_lost(slot, c.name, taken, fitting, measured),), c.notes)
        for c in candidates
        if c.name != taken
    )
    return Decision(slot.name, bucket, taken, how, because, rejected, results)


def _verdict(slot: Slot, taken: str, fitting: Sequence[str], found: dict[str, Measurement]) -> tuple[How, str]:
    if slot.asked is not None:
        return "asked", f"{slot.asked} was asked for, and fits"
    if len(fitting) == 1:
        return "forced by traits", "the only candidate that runs here"
    default, measured = fitting[0], _counting(found)
    right = {name: m for name, m in measured.items() if m.right}
    if default in measured and not measured[default].right:
        wrong = f"{default} failed the numeric gate"
        return "measured", f"{wrong}; measured {right[taken]}" if taken in right else wrong
    if taken not in right or len(right) < 2:
        gap = f" ({default} itself was not measured, so nothing was compared)" if right else ""
        back = next((m.taken_back for m in found.values() if m.taken_back), "")
        known = f"measured, but taken back: {back}" if back else f"not measured{gap}"
        return "default", f"first in the fixed order of {len(fitting)} that fit; {known}"
    best = min(right, key=lambda name: right[name].seconds)
    if best != taken:
        tie = f"{best} at {right[best]} is a tie with {right[taken]}, the fixed order decides"
        return "measured", f"measured {right[taken]}; {tie}"
    second = min((m.seconds, name) for name, m in right.items() if name != taken)[1]
    return "measured", f"measured {right[taken]}, {second} {right[second]}"


def _lost(slot: Slot, name: str, taken: str, fitting: Sequence[str], found: dict[str, Measurement]) -> Misfit:
    """Why a candidate that fits was not taken."""
    measured = _counting(found)
    force = f"--{slot.flag.replace('_', '-')} {name}"
    if slot.asked is not None:
        return Misfit(f"fits; {slot.asked} was asked for", force, "not_asked")
    if name in measured and not measured[name].right:
        return Misfit(f"fails the numeric gate: {measured[name].detail}", "", "numerics")
    if name in measured and taken in measured and not is_tie(measured[name], measured[taken]):
        return Misfit(f"fits; measured {measured[name]} against {measured[taken]}", force, "slower")
    tie = "; measured as a tie" if name in measured and taken in measured else ""
    place = f"{'after' if fitting.index(name) > fitting.index(taken) else 'before'} {taken} in the fixed order"
    return Misfit(f"fits; {place}{tie}", force, "order")


def _counting(found: dict[str, Measurement]) -> dict[str, Measurement]:
    """Without figures that were taken back."""
    return {name: m for name, m in found.items() if not m.taken_back}


def _measured(slot: Slot, bucket: int, names: Sequence[str], evidence: Evidence) -> dict[str, Measurement]:
    return {name: evidence[slot.name, bucket, name] for name in names if (slot.name, bucket, name) in evidence}

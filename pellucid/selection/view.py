"""A plan's decisions as rows for people: equal neighbouring buckets merged, measured tables, candidates not taken.

`explain` prints the rows as text, `plan_html` as a page, and a server logs them in short, so that all say the same.
Computes no choice anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pellucid.selection.evidence import Measurement, is_tie, tie_share
from pellucid.selection.plan import Decision, How, MemoryBill, Rejection, Value
from pellucid.traits.misfit import Misfit, MisfitKind

FAR_OFF: dict[MisfitKind, str] = {
    "attention": "for another kind of attention",
    "device": "for another kind of device",
    "phase": "for the other phase",
}
"""Reasons that an overview states once for all candidates that have them; `--why` states every reason."""

TABLE_LEGEND = (
    "* taken, = a tie with it (within the combined 95 % error, or 2 %; of a step 0.5 %), ! faster, but taken back, "
    "± half of the 95 % interval"
)

_BY_BUCKET: dict[MisfitKind, str] = {
    "numerics": "fails the numeric gate",
    "slower": "fits; measured slower",
    "order": "fits; a tie or not measured, and later in the fixed order",
}
"""What a reason that rests on measurement says, where its figures differ from bucket to bucket."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One result of a measured table. `mark` is `*`, `=`, `!` or empty; a wrong result says so instead of a time."""

    text: str
    mark: str
    right: bool


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times: one row a bucket, one column a candidate. A cell is None where nothing was measured."""

    candidates: tuple[str, ...]
    rows: tuple[tuple[int, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Loser:
    """A candidate that was not taken. `far` is set when one short reason puts it out of the question."""

    name: str
    misfits: tuple[Misfit, ...]
    standing: str
    notes: tuple[str, ...]
    far: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One decision, or one that is the same at several neighbouring buckets."""

    decisions: tuple[Decision, ...]
    because: tuple[str, ...]
    losers: tuple[Loser, ...]
    table: Table | None

    @property
    def op(self) -> str:
        return self.decisions[0].op

    @property
    def title(self) -> str:
        return title(self.decisions)

    @property
    def value(self) -> str:
        return show_value(self.decisions[0].value)

    @property
    def how(self) -> How:
        return self.decisions[0].how


def rows(decisions: Sequence[Decision]) -> tuple[Row, ...]:
    """The decisions in their order, neighbouring buckets merged where nothing but measured figures differs."""
    return tuple(_row(group) for group in _groups(decisions))


def op_lines(decisions: Sequence[Decision]) -> Iterator[str]:
    """One line an op: `moe=triton_fused (default)`, `attention.decode=triton_mla (default) at 1..8, ... tokens`.

    Every run of buckets with one value and provenance is named; where there is one alone, its buckets are not.
    """
    for op, own in groupby(rows(decisions), lambda row: row.op):
        runs = [list(run) for _, run in groupby(own, lambda row: (row.value, row.how))]
        told = [f"{run[0].value} ({run[0].how})" for run in runs]
        if len(runs) > 1:
            spans = [_span([d.bucket for row in run for d in row.decisions]) for run in runs]
            told = [f"{one} at {span}" for one, span in zip(told, spans, strict=True)]
        yield f"{op}={', '.join(told)}{' tokens' if len(runs) > 1 else ''}"


def title(group: Sequence[Decision]) -> str:
    """`attention.decode@1..256`, `moe@1`, `kv.page_size`."""
    first, last = group[0], group[-1]
    return first.key if first is last else f"{first.op}@{first.bucket}..{last.bucket}"


def show_value(value: Value) -> str:
    """A decision's value in words: `nothing`, `on`, `off`, or itself."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def tokens_that_fit(bill: MemoryBill) -> int:
    """Tokens of KV that the rest of the budget holds; none when a token costs nothing that is known."""
    return max(0, bill.kv_budget_bytes) // bill.kv_bytes_per_token if bill.kv_bytes_per_token else 0


def _groups(decisions: Sequence[Decision]) -> Iterator[list[Decision]]:
    group: list[Decision] = []
    for decision in decisions:
        if group and _identity(decision) != _identity(group[0]):
            yield group
            group = []
        group.append(decision)
    if group:
        yield group


def _identity(decision: Decision) -> tuple[object, ...]:
    """All of a decision but the bucket and what was measured there."""
    return (
        decision.op,
        decision.value,
        decision.how,
        _standing_reasons(decision),
        bool(decision.measured),
        tuple((r.candidate, _lasting(r), r.notes) for r in decision.rejected),
    )


def _standing_reasons(decision: Decision) -> tuple[str, ...]:
    """The reasons without the verdict, which carries figures where something was measured."""
    because = decision.because
    return because[:1] + because[2:] if decision.measured else because


def _lasting(rejection: Rejection) -> tuple[Misfit, ...]:
    return tuple(m for m in rejection.misfits if m.kind not in _BY_BUCKET)


def _row(group: Sequence[Decision]) -> Row:
    first = group[0]
    same = all(d.because == first.because for d in group)
    because = first.because if same else (*_standing_reasons(first), *_taken_back(group))
    losers = tuple(_loser([d.rejected[i] for d in group], group) for i in range(len(first.rejected)))
    return Row(tuple(group), because, losers, _table(group))


def _taken_back(group: Sequence[Decision]) -> Iterator[str]:
    """Where figures of a row decide nothing, and why at the first such bucket."""
    why = {d.bucket: m.taken_back for d in group for m in d.measured if m.taken_back}
    if why:
        where = ", ".join(_runs(list(why), [d.bucket for d in group]))
        yield f"measured, but taken back at {where}: {next(iter(why.values()))}"


def _loser(found: Sequence[Rejection], group: Sequence[Decision]) -> Loser:
    """One candidate over the buckets of a row."""
    first = found[0]
    misfits = first.misfits
    if any(r.misfits != misfits for r in found):
        misfits = (*_lasting(first), *_by_bucket(found, group))
    far = next((text for kind, text in FAR_OFF.items() if kind in {m.kind for m in misfits}), None)
    standing = "apart from this it fits" if first.only_not_built else ""
    return Loser(first.candidate, misfits, standing, first.notes, far)


def _by_bucket(found: Sequence[Rejection], group: Sequence[Decision]) -> Iterator[Misfit]:
    """One reason for each kind that rests on measurement, with the buckets where it holds."""
    for kind, text in _BY_BUCKET.items():
        places = {d.bucket: m.remedy for d, r in zip(group, found, strict=True) for m in r.misfits if m.kind == kind}
        if places:
            where = ", ".join(_runs(list(places), [d.bucket for d in group]))
            yield Misfit(f"{text} at {where}", next(iter(places.values())), kind)


def _runs(chosen: Sequence[int | None], every: Sequence[int | None]) -> Iterator[str]:
    """`1..8` for neighbours of `every` that are all chosen, `32` for one alone."""
    run: list[int | None] = []
    for bucket in (*every, None):
        if bucket in chosen and bucket is not None:
            run.append(bucket)
        elif run:
            yield _span(run)
            run = []


def _span(run: Sequence[int | None]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}"


def _table(group: Sequence[Decision]) -> Table | None:
    names = tuple(dict.fromkeys(m.candidate for d in group for m in d.measured))
    if not names:
        return None
    return Table(names, tuple((d.bucket or 0, _cells(d, names)) for d in group))


def _cells(decision: Decision, names: Sequence[str]) -> tuple[Cell | None, ...]:
    results = {m.candidate: m.result for m in decision.measured}
    taken = results.get(str(decision.value))
    share = tie_share(decision.op)
    return tuple(
        _cell(results[name], name == decision.value, taken, share) if name in results else None for name in names
    )


def _cell(result: Measurement, is_taken: bool, taken: Measurement | None, share: float) -> Cell:
    if not result.right:
        return Cell(f"wrong: {result.detail}" if result.detail else "wrong", "*" if is_taken else "", False)
    text = f"{result.seconds * 1e6:.1f} ± {result.error * 1e6:.1f} us"
    if is_taken or taken is None or not taken.right:
        return Cell(text, "*" if is_taken else "", True)
    if is_tie(result, taken, share):
        return Cell(text, "=", True)
    return Cell(text, "!" if result.taken_back and result.seconds < taken.seconds else "", True)

"""From the choices that a plan leaves to the fixed order, to measured ones. Called by engine start-up and `tune`.

    questions (op, bucket, candidates) -> gate -> compare -> Evidence -> plan -> its steps against the default's

Every answer goes through the store, skipped ones too, so that a second start asks nothing and comes to the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from pellucid.selection.decode_path import FUSED
from pellucid.selection.evidence import Evidence, Measurement, is_tie, tie_share
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.tuning.gate import Bench, GatedTrial, gate
from pellucid.tuning.measure import Budget, CannotMeasureError, Question, compare, turn
from pellucid.tuning.step_choices import (
    DEFAULT,
    MEASURED,
    ONE_FORM,
    STEP_OPS,
    Tiles,
    concerns,
    share_weights,
    steps,
    traits_of,
)
from pellucid.tuning.store import EvidenceStore, Found, Provenance, Record

Mode = Literal["cached", "full"]

FAMILIES = ("attention", "moe", "linear")

OPS_SHARE, TILES_SHARE = 0.4, 0.75
"""Of the budget: for backends, and for decode steps with them and tiles after that. The rest is for confirming all."""

OUT_OF_TIME = "the seconds to measure were spent (--measure-seconds)"

Resolve = Callable[[Evidence], ExecutionPlan]

CheckAll = Callable[[Sequence[tuple[Question, str]], Callable[[], bool]], dict[tuple[Question, str], str]]
"""As `pool.ProbePool.check_all`."""


@dataclass(slots=True)
class Session:
    """One window of measuring, before serving. Without a bench it only looks up what earlier ones found.

    `cached`: what the store has is taken, stale or skipped as it may be, and only the rest is measured. `full`: all is
    measured anew. `check_all` takes many candidates through the gate at once. `before` is called once, when something
    is to be measured, and may raise CannotMeasureError; its time does not count. A session of few seconds, one that is
    not `thorough`, leaves out candidates that nvcc compiles on first use, and takes it that earlier ones had no time
    for a question; a thorough one asks both.
    """

    store: EvidenceStore
    bench: Bench | None
    budget: Budget
    mode: Mode = "cached"
    on_progress: Callable[[str], None] | None = None
    check_all: CheckAll | None = None
    before: Callable[[], None] | None = None
    thorough: bool = True
    measured: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    stale: set[str] = field(default_factory=set)
    share: float = 1.0
    _answers: dict[Question, Mapping[str, Measurement]] = field(default_factory=dict)
    _verdicts: dict[tuple[Question, str], str] = field(default_factory=dict)

    def answer(self, question: Question) -> Mapping[str, Measurement]:
        """Figures of the candidates; of the failed alone, or none, where time was up or nothing may be measured."""
        if question not in self._answers:
            self._answers[question] = self._find(question)
        return self._answers[question]

    def gate_ahead(self, questions: Sequence[Question]) -> None:
        """These will be asked next: their candidates are compiled and gated now, many at a time."""
        if self.bench is None or self.check_all is None:
            return
        new = [q for q in questions if q not in self._answers and (self.mode == "full" or not self._known(q))]
        budget = self.budget.part(self.share)
        if not new or budget.left <= 0:
            return
        self._prepare()
        budget = self.budget.part(self.share)
        if self.on_progress is not None:
            self.on_progress(f"gate of {len(new)} choices from {new[0].key} on ({self.budget.used:.0f} s)")
        begin = budget.clock()
        self._verdicts |= self.check_all([(q, q.order[0]) for q in new], lambda: True)
        # What the defaults take to be compiled, the engine would pay a moment later.
        self.budget.excuse(budget.clock() - begin)
        budget = self.budget.part(self.share)
        self._verdicts |= self.check_all(
            [(q, name) for q in new for name in q.order[1:]], lambda: budget.left > 0
        )  # fmt: skip

    def _known(self, question: Question) -> Found | None:
        """What the store has, unless an earlier session left out what this one asks."""
        found = self.store.find(question)
        if found is None or self.bench is None or not self.thorough:
            return found
        if found.record.skipped:
            return None
        left_out = slow_to_compile() - found.record.results.keys()
        return None if left_out & set(question.order[1:]) else found

    def _prepare(self) -> None:
        if self.before is not None:
            begin, before, self.before = self.budget.clock(), self.before, None
            before()
            self.budget.excuse(self.budget.clock() - begin)

    def _find(self, question: Question) -> Mapping[str, Measurement]:
        found = self._known(question) if self.mode == "cached" or self.bench is None else None
        if found is not None:
            if found.stale:
                self.stale.add(found.stale)
            return found.record.results
        if self.bench is None:
            return {}
        try:
            return self._measure(self.bench, question)
        except CannotMeasureError as error:
            return self._keep(question, {}, {}, skipped=str(error))

    def _measure(self, bench: Bench, question: Question) -> Mapping[str, Measurement]:
        budget = self.budget.part(self.share)
        if budget.left <= 0:
            return self._keep(question, {}, {}, skipped=OUT_OF_TIME)
        if self.on_progress is not None:
            self.on_progress(f"{question.key} ({self.measured} measured, {self.budget.used:.0f} s)")
        failed: dict[str, Measurement] = {}
        trials = []
        try:
            self._prepare()
            bench.start()
        except CannotMeasureError as error:
            # Not kept: the next start may fare better. This one does not try again.
            self.bench = None
            self.skipped[str(error)] += 1
            return {}
        budget = self.budget.part(self.share)
        for name in question.order:
            if not self.thorough and name != question.order[0] and name in slow_to_compile():
                continue
            if budget.left <= 0:
                return self._keep(question, failed, {}, skipped=OUT_OF_TIME)
            begin = budget.clock()
            reason = self._verdicts.pop((question, name), None)
            if reason is None:
                reason = gate(bench, question, name)
            if name == question.order[0]:
                # What the default takes to be compiled, the engine would pay a moment later.
                self.budget.excuse(budget.clock() - begin)
                budget = self.budget.part(self.share)
            if reason:
                failed[name] = Measurement(float("inf"), 0.0, False, reason)
            else:
                trials.append(GatedTrial(bench, question, name))
        compared = compare(trials, budget, tie_share(question.op))
        results = {**failed, **compared.results}
        return self._keep(question, results, compared.samples, skipped=OUT_OF_TIME if compared.out_of_time else "")

    def _keep(
        self,
        question: Question,
        results: Mapping[str, Measurement],
        samples: Mapping[str, Sequence[float]],
        skipped: str,
    ) -> Mapping[str, Measurement]:
        self.skipped += Counter([skipped] if skipped else [])
        self.measured += not skipped
        counts = {name: len(values) for name, values in samples.items()}
        spread = {name: _quartiles(values) for name, values in samples.items()}
        record = Record(question, self.store.fingerprint, results, Provenance.now(counts, spread), skipped)
        self.store.add(record)
        return results

    @property
    def may_answer(self) -> bool:
        """Whether it looks up what is known, or has seconds left of its share."""
        return self.bench is None or self.budget.part(self.share).left > 0

    def notes(self) -> tuple[str, ...]:
        """What is worth knowing of how the figures came about."""
        notes = [f"figures of older versions are used ({changed}); --measure full measures again" for changed in
                 sorted(self.stale)]  # fmt: skip
        for reason, count in self.skipped.items():
            notes.append(f"{count} choices keep their default: {reason}; `pellucid tune` asks again")
        return (*notes, *self.store.notes)


@cache
def slow_to_compile() -> frozenset[str]:
    """Names of backends whose first use takes minutes of nvcc."""
    return frozenset(backend.name for backend in discover() if backend.needs_compiler == "nvcc")


@dataclass(frozen=True, slots=True)
class Tuned:
    """A frozen plan, the evidence that it rests on, and what happened on the way, in lines."""

    plan: ExecutionPlan
    evidence: Evidence
    notes: tuple[str, ...]


def undecided(plan: ExecutionPlan) -> tuple[Question, ...]:
    """What the plan of no evidence leaves to the fixed order, the buckets far apart first: time may be up early."""
    found = []
    for decision in plan.decisions:
        family = decision.op.partition(".")[0]
        if family not in FAMILIES or decision.bucket is None or decision.how != "default":
            continue
        order = (str(decision.value), *(r.candidate for r in decision.rejected if r.runs))
        if len(order) > 1:
            found.append(Question(decision.op, decision.bucket, order, traits_of(plan, family)))
    return tuple(sorted(found, key=lambda q: turn(q.bucket)))


def tune(
    resolve: Resolve,
    session: Session,
    tiles: Callable[[ExecutionPlan], Tiles] | None = None,
    measurable: Callable[[Question], bool] | None = None,
) -> Tuned:
    """The plan of what is measured. It is never slower than that of the defaults, step by step, or falls back to it.

    `tiles`: measured projections of a plan, none where its decode path has none. `measurable`: whether the bench has
    what a question needs; all, when not given.
    """
    evidence: dict[tuple[str, int, str], Measurement] = {}
    session.share = OPS_SHARE
    questions = [q for q in undecided(resolve({})) if measurable is None or measurable(q)]
    for question in questions:
        for name, m in session.answer(question).items():
            evidence[question.op, question.bucket, name] = m
    evidence, notes = settle(resolve, evidence)
    session.share = TILES_SHARE
    # What attention gains alone may be lost in the step, and no tile should be measured beside it then.
    if session.may_answer:
        evidence, _, more = confirm(resolve, session, evidence, Tiles(), final=False)
        notes += more
    chosen = tiles(resolve(evidence)) if tiles is not None else Tiles()
    session.share = 1.0
    evidence, chosen, more = confirm(resolve, session, evidence, chosen)
    notes += more
    plan = resolve(evidence)
    frozen = replace(plan, decisions=(*plan.decisions, *chosen.decisions()))
    # A step that is refused in several rounds has one note of each.
    return Tuned(frozen, evidence, (*dict.fromkeys(notes), *session.notes()))


def confirm(
    resolve: Resolve,
    session: Session,
    evidence: dict[tuple[str, int, str], Measurement],
    chosen: Tiles,
    final: bool = True,
) -> tuple[dict[tuple[str, int, str], Measurement], Tiles, list[str]]:
    """Evidence and tiles under which no kind of step is slower than the default's; a note for each that was refused.

    Not `final`: only decode steps, and only those whose figures say so; what is not known yet may be asked later.
    """
    refuses, notes = _refused if final else _loses, list[str]()
    while True:
        plan, default = resolve(evidence), resolve(verdicts(evidence))
        if plan.decode_path != FUSED:
            chosen = Tiles()
        asked = [step for step in steps(plan, default, chosen) if final or step.op == "step.decode"]
        refused = [step for step in asked if refuses(session.answer(step))]
        if not refused:
            return evidence, chosen, notes
        before = evidence, chosen
        why = {step: f"{step.key}: the default stays: {_refusal(session.answer(step))}" for step in refused}
        for step in refused:
            notes.append(why[step])
            # Tiles first: what they were measured beside may be right without them.
            if step.op == "step.decode" and step.bucket in chosen.buckets():
                chosen = chosen.without(step.bucket)
            else:
                evidence = _withdraw(evidence, STEP_OPS[step.op], step.bucket, why[step])
        if (evidence, chosen) == before:
            # What differs is not of the step's own bucket: a page size, or the decode path, for another bucket's sake.
            for step in refused:
                for bucket in plan.buckets(STEP_OPS[step.op][0]):
                    evidence = _withdraw(evidence, STEP_OPS[step.op], bucket, why[step])
        if (evidence, chosen) == before:
            evidence, chosen = verdicts(evidence), Tiles()
        evidence, more = settle(resolve, evidence)
        notes += more


def settle(
    resolve: Resolve, evidence: Mapping[tuple[str, int, str], Measurement]
) -> tuple[dict[tuple[str, int, str], Measurement], list[str]]:
    """Evidence under which ops with one form of weights have one choice, and a note where that costs a faster one.

    What is wrong at one bucket is wrong at all; where buckets would choose differently, the default stays, unless the
    weights of all have one form (`BackendTraits.weight_form`).
    """
    settled, notes = dict(evidence), []
    plan = resolve(settled)
    ops = [op for op in dict.fromkeys(d.op for d in plan.decisions) if op.partition(".")[0] in ONE_FORM]
    for op in ops:
        wrong = {name: m for (o, _, name), m in settled.items() if o == op and not m.right}
        settled |= {(op, bucket, name): m for name, m in wrong.items() for bucket in plan.buckets(op)}
    plan = resolve(settled)
    for op in ops:
        if len(plan.backends(op)) > 1 and not share_weights(op, plan.backends(op)):
            names = " and ".join(sorted(plan.backends(op)))
            why = f"{op}: {names} win some buckets each, but their weights lie differently: the default stays"
            notes.append(why)
            for bucket in plan.buckets(op):
                settled = _withdraw(settled, (op,), bucket, why)
    return settled, notes


def verdicts(evidence: Evidence) -> dict[tuple[str, int, str], Measurement]:
    """What the gate found wrong, alone: the plan of the fixed order is made with it."""
    return {key: m for key, m in evidence.items() if not m.right}


def _refused(results: Mapping[str, Measurement]) -> bool:
    """Whether the measured choices are slower beyond the error of both, wrong, or not known to be neither."""
    if DEFAULT in results and not results[DEFAULT].right:
        return MEASURED in results and not results[MEASURED].right
    return not {DEFAULT, MEASURED} <= results.keys() or _loses(results)


def _loses(results: Mapping[str, Measurement]) -> bool:
    mine, default = results.get(MEASURED), results.get(DEFAULT)
    if mine is None or not mine.right:
        return mine is not None
    if default is None or not default.right:
        return False
    return mine.seconds > default.seconds and not is_tie(mine, default, share=0.0)


def _refusal(results: Mapping[str, Measurement]) -> str:
    measured = results.get(MEASURED)
    if measured is not None and not measured.right:
        return f"the step of the measured choices {measured.detail}"
    if measured is None or DEFAULT not in results:
        return "there was no time to confirm the measured choices; a larger --measure-seconds of `pellucid tune` has it"
    return f"with the measured choices its step takes {measured}, by default {results[DEFAULT]}"


def _withdraw(
    evidence: Mapping[tuple[str, int, str], Measurement], families: Sequence[str], bucket: int, why: str
) -> dict[tuple[str, int, str], Measurement]:
    """With the figures of these ops at the bucket taken back. What the gate found stays: a default may be wrong."""
    return {
        (op, at, name): replace(m, taken_back=m.taken_back or why)
        if m.right and at == bucket and concerns(op, families)
        else m
        for (op, at, name), m in evidence.items()
    }


def _quartiles(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4] if ordered else 0.0

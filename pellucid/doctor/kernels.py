"""`doctor --kernels`: every candidate through the numeric gate and timed, at a model's shapes and without its weights.

    every op at a few buckets -> gate in a child -> compare -> the plan of these figures -> lines and tables

Called by `doctor.diagnose`. What is compared goes to the evidence store, where starts look for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pellucid.doctor.in_time import InTime, WholeBudget, ended_with
from pellucid.doctor.report import Check, KernelFigures, Status
from pellucid.hardware.facts import Hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Measurement
from pellucid.selection.plan import ExecutionPlan, Measured
from pellucid.selection.registry import discover
from pellucid.traits.model import ModelTraits
from pellucid.tuning.gate import Bench, GatedTrial, Probe, gate
from pellucid.tuning.measure import LEADER_ROUNDS, Budget, CannotMeasureError, Question, TrialFailedError, conclude
from pellucid.tuning.pool import Pair, ProbePool
from pellucid.tuning.problems import drawable
from pellucid.tuning.session import FAMILIES, OUT_OF_TIME, CheckAll, Mode, Resolve, Session, settle
from pellucid.tuning.start import FULL_SECONDS, OTHERS_MEASURE
from pellucid.tuning.step_choices import traits_of
from pellucid.tuning.store import EvidenceStore, Fingerprint, Found, Record
from pellucid.tuning.workbench import Workbench

GROUP = "kernels"

FEW_TOKENS = (1, 8)
"""Buckets of decode steps that are looked at, beside the largest."""

CHUNK = 512
"""The same of prompts."""

PART_S = 1.0
"""Of a question at least, gated before: with less none would be timed to the end where seconds are few."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found of a question. `right`: what passed the gate; `why`: why some have no verdict or no time."""

    question: Question
    results: Mapping[str, Measurement]
    right: tuple[str, ...]
    why: str = ""


class FiguresStore(EvidenceStore):
    """This machine's store of figures alone: what was skipped, here or by a start, has no answer yet.

    `command` is what its lines say that they come from: the process's own words may hold a server's keys.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        super().__init__(path, fingerprint)
        self.command = ""
        self.skipped: dict[Question, str] = {}
        self.added = 0

    def find(self, question: Question) -> Found | None:
        found = super().find(question)
        return None if found is None or found.record.skipped else found

    def add(self, record: Record) -> None:
        if record.skipped:
            self.skipped[record.question] = record.skipped
        elif record.results and len(record.question.order) > 1:
            super().add(replace(record, provenance=replace(record.provenance, command=self.command)))
            self.added += 1


class Gates:
    """Verdicts of the gate, remembered: also of what there is no time to measure. `check_all` is a session's."""

    def __init__(self, bench: Bench) -> None:
        self.verdicts: dict[Pair, str] = {}
        self._bench = bench

    def ahead(self, check_all: CheckAll, pairs: Sequence[Pair], go_on: Callable[[], bool]) -> None:
        """Many at once. What fails among others may have lacked memory: it is asked again, alone."""
        self.verdicts |= {pair: wrong for pair, wrong in check_all(pairs, go_on).items() if not wrong}

    def check_all(self, pairs: Sequence[Pair], go_on: Callable[[], bool]) -> dict[Pair, str]:
        for pair in pairs:
            if not go_on():
                break
            try:
                if pair not in self.verdicts:
                    self.verdicts[pair] = gate(self._bench, *pair)
            except CannotMeasureError:
                break
        return {pair: self.verdicts[pair] for pair in pairs if pair in self.verdicts}


def run_kernels(
    args: EngineArgs,
    traits: ModelTraits,
    hardware: Hardware,
    resolve: Resolve,
    on_progress: Callable[[str], None] | None = None,
    bench: Bench | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[tuple[KernelFigures, ...], list[Check]]:
    """Figures by op and bucket, and the lines on them. Takes `--measure-seconds`, ten minutes by default, and no more.

    Runs everything anew, unless `--measure cached` lets it take what the store has. With `--measure off` the plan is
    judged as such a start makes it: of the fixed order alone. `bench`, `clock`: as in `tuning.start.tune_plan`.
    """
    plan = resolve({})
    asked = every_question(plan)
    questions = [question for question in asked if drawable(question, traits)]
    lines = [*_undrawable(plan, [question for question in asked if question not in questions])]
    store = FiguresStore.of(hardware, plan.device)
    assert isinstance(store, FiguresStore)
    words = ["pellucid", "doctor", Path(args.model).name, "--kernels", *args.command_line()]
    store.command = " ".join(Path(word).name if "/" in word else word for word in words)
    mode: Mode = "cached" if args.measure == "cached" else "full"
    budget = WholeBudget(args.measure_seconds or FULL_SECONDS, clock)
    with ExitStack() as stack:
        if not stack.enter_context(store.alone()):
            return (), [
                *lines,
                Check(GROUP, "numeric gate, speed", "warn", f"not run: {OTHERS_MEASURE}", "run it again later"),
            ]
        pooled = bench is None and plan.device == "cuda"
        if bench is None:
            bench = probe = stack.enter_context(Probe(Workbench(traits, plan)))
            stack.enter_context(ended_with(budget, [probe]))
        bench = InTime(bench, budget)
        try:
            bench.start()
        except CannotMeasureError as error:
            calls = "import torch; torch.cuda.init()" if plan.device == "cuda" else "import torch"
            remedy = f"see what `python -c '{calls}'` says, and how long it takes"
            if str(error) == OUT_OF_TIME:
                remedy = _longer(budget)
            return (), [*lines, Check(GROUP, "numeric gate, speed", "warn", f"not run: {error}", remedy)]
        gates = Gates(bench)
        session = Session(store, bench, budget, mode, on_progress, gates.check_all)
        if pooled:
            # Most of a gate's time there is a compiler's. The children's memory is given back before anything is timed.
            new = [q for q in questions if mode == "full" or store.find(q) is None]
            if on_progress is not None:
                on_progress(f"gate of {sum(len(q.order) for q in new)} candidates")
            probes: list[Probe] = []

            def make() -> Probe:
                probes.append(Probe(Workbench(traits, plan, keeps=False)))
                return probes[-1]

            memory = min(gpu.memory_bytes for gpu in hardware.gpus)
            with ProbePool(make, hardware.cpu.cores, memory) as pool, ended_with(budget, probes):
                gates.ahead(pool.check_all, [(q, name) for q in new for name in q.order], lambda: budget.left > 0)
        answers: dict[Question, Answer] = {}
        for question in sorted(questions, key=lambda q: q.bucket):
            session.share = 1.0
            session.gate_ahead([question])
            # An equal part of what is left for each: a slow one takes none from those behind it, and is late itself.
            part = max(budget.left / (len(questions) - len(answers)), PART_S)
            session.share = min(1.0, (budget.used + part) / budget.seconds)
            answers[question] = answer(session, store, gates, question)
    found = {(q.op, q.bucket, name): m for q, one in answers.items() for name, m in one.results.items()}
    evidence, notes = settle(resolve, found)
    judged = plan if args.measure == "off" else resolve(evidence)
    figures = tuple(_figures(judged, answers[question]) for question in questions)
    lines = [*_lines(figures, args, budget), *lines, *(Check(GROUP, "note", "ok", note) for note in notes)]
    return figures, [*lines, *_where(session, store)]


def every_question(plan: ExecutionPlan) -> tuple[Question, ...]:
    """Each op at the buckets that are looked at, with all candidates that fit, the plan's own first.

    Of what the plan leaves to the fixed order these are the questions of `tuning.session.undecided`.
    """
    decode = {*FEW_TOKENS, *plan.buckets("attention.decode")[-1:]}
    prefill = {CHUNK, *plan.buckets("attention.prefill")[-1:]}
    sampled = {"attention.decode": decode, "attention.prefill": prefill}
    found = []
    for decision in plan.decisions:
        family = decision.op.partition(".")[0]
        if family not in FAMILIES or decision.bucket is None or decision.value is None:
            continue
        if decision.bucket in sampled.get(decision.op, decode | prefill):
            order = (str(decision.value), *(r.candidate for r in decision.rejected if r.runs))
            found.append(Question(decision.op, decision.bucket, order, traits_of(plan, family)))
    return tuple(found)


def answer(session: Session, store: FiguresStore, gates: Gates, question: Question) -> Answer:
    """Verdicts and times of the candidates; of a lone one that is right too, which nothing compares."""
    results = dict(session.answer(question))
    # A bench that did not start again is none from then on, and its reason is the last.
    gone = next(reversed(session.skipped), "") if session.bench is None else ""
    why = store.skipped.get(question, "") or ("" if results else gone)
    if why:
        known = {name: gates.verdicts.get((question, name)) for name in question.order}
        results |= {name: Measurement(math.inf, 0.0, False, wrong) for name, wrong in known.items() if wrong}
        return Answer(question, results, tuple(name for name, wrong in known.items() if wrong == ""), why)
    right = tuple(name for name in question.order if name not in results or results[name].right)
    if len(right) != 1 or right[0] in results or session.bench is None:
        return Answer(question, results, right)
    try:
        results[right[0]] = time_alone(session.bench, question, right[0])
    except CannotMeasureError as error:
        return Answer(question, results, right, str(error))
    return Answer(question, results, right if results[right[0]].right else ())


def time_alone(bench: Bench, question: Question, name: str) -> Measurement:
    """The median of as many samples as `tuning.measure.compare` takes of its leaders. Raises CannotMeasureError."""
    trial = GatedTrial(bench, question, name)
    try:
        trial.sample()
        return conclude([name], {name: [trial.sample() for _ in range(LEADER_ROUNDS)]})[name]
    except TrialFailedError as error:
        return Measurement(math.inf, 0.0, False, str(error))


def _figures(plan: ExecutionPlan, found: Answer) -> KernelFigures:
    """The plan's decision with all figures: those that it does not rest on too."""
    question = found.question
    measured = tuple(Measured.of(name, found.results[name]) for name in question.order if name in found.results)
    decision = replace(plan.decision(question.op, question.bucket), measured=measured)
    return KernelFigures(decision, question.order, found.right, found.why)


# --- from figures to lines ----------------------------------------------------------------------

Said = tuple[str, int, Status, str, str]
"""Op, bucket, status, fact, remedy."""


def _lines(figures: Sequence[KernelFigures], args: EngineArgs, budget: Budget) -> Iterator[Check]:
    said: list[Said] = []
    for one in figures:
        decision = one.decision
        place = decision.op, decision.bucket or 0
        if decision.value in one.right:
            text = f"{decision.value}  ({decision.how}; right: {', '.join(one.right)})"
            said.append((*place, "ok", text, ""))
        said += [(*place, *_failure(one, m, args)) for m in decision.measured if not m.right]
        if one.why and one.why != OUT_OF_TIME:
            remedy = "end what else holds the device and its memory, and run it again"
            what = "not timed" if _is_gated(one) else "not run to the end"
            said.append((*place, "warn", f"{what}: {one.why}", remedy))
    yield from _merged(said)
    late = [one for one in figures if one.why == OUT_OF_TIME]
    if late:
        unsure = [one for one in late if not _is_gated(one)]
        gap = f"; not gated to the end: {_places(unsure)}" if unsure else ""
        yield Check(GROUP, "not timed", "warn", f"{_places(late)}: {OUT_OF_TIME}{gap}", _longer(budget))


def _is_gated(one: KernelFigures) -> bool:
    """Whether every candidate has a verdict."""
    return {*one.right, *(m.candidate for m in one.decision.measured)}.issuperset(one.candidates)


def _places(figures: Iterable[KernelFigures]) -> str:
    """`attention.decode@8,16, moe@512`."""
    buckets: dict[str, list[str]] = {}
    for one in figures:
        buckets.setdefault(one.decision.op, []).append(str(one.decision.bucket))
    return ", ".join(f"{op}@{','.join(of)}" for op, of in buckets.items())


def _longer(budget: Budget) -> str:
    return f"--measure-seconds above {budget.seconds:g}"


def _failure(one: KernelFigures, wrong: Measured, args: EngineArgs) -> tuple[Status, str, str]:
    """Fatal where the plan runs it all the same, for want of another that is right or because it was told to."""
    decision, name = one.decision, wrong.candidate
    family = decision.op.partition(".")[0]
    text = f"{name} fails the numeric gate: {wrong.detail}"
    if decision.value is not None and decision.value != name:
        tested = [p.install for b in discover() if (b.op, b.name) == (family, name) for p in b.packages if p.tested]
        tell = f"{' and '.join(tested)} is what was tested" if tested else "please report this line"
        return "warn", f"{text}; {decision.value} runs there", f"none needed to start; {tell}"
    flag = f"--{family}-backend"
    if decision.value is None or not one.right:
        return "fail", f"{text}; no other that fits is right", "another --dtype or --device; please report this line"
    cause = f"{flag} {name}" if decision.how == "asked" else f"--measure {args.measure}"
    return "fail", f"{text}; {cause} runs it all the same", f"leave that out, or {flag} {one.right[0]}"


def _undrawable(plan: ExecutionPlan, questions: Iterable[Question]) -> Iterator[Check]:
    said: list[Said] = []
    for question in questions:
        shape = plan.decision(question.op, question.bucket).because[0]
        text = f"weights are drawn here, and only dense ones of at most 4 GiB a layer: {shape}"
        said.append((question.op, question.bucket, "not checked", text, ""))
    return _merged(said)


def _where(session: Session, store: FiguresStore) -> Iterator[Check]:
    done = f"{session.measured} choices measured in {session.budget.used:.0f} s"
    kept = f"; {store.added} kept for later starts in {store.path}" if store.added else ""
    yield Check(GROUP, "figures", "ok", done + kept)
    # What was skipped has lines of its own.
    session.skipped.clear()
    for note in session.notes():
        reason, _, remedy = note.rpartition("; ")
        yield Check(GROUP, "figures", "warn" if reason else "ok", reason or note, remedy if reason else "")


def _merged(said: Iterable[Said]) -> Iterator[Check]:
    """What is the same at several buckets of an op on one line: `moe@1,8,256`."""
    places: dict[tuple[str, Status, str, str], list[int]] = {}
    for op, bucket, status, text, remedy in said:
        places.setdefault((op, status, text, remedy), []).append(bucket)
    for (op, status, text, remedy), buckets in places.items():
        yield Check(GROUP, f"{op}@{','.join(map(str, buckets))}", status, text, remedy)

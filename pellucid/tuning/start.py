"""Measures, or reads, what a plan leaves open, before weights load. Called by `engine.startup` and `pellucid tune`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from pellucid.hardware.facts import Hardware
from pellucid.kernels.device import DeviceLimits
from pellucid.layers.step_tiles import GQA_DECODE, MLA_DECODE, Projection
from pellucid.runner.compile_ahead import CompileAhead, Compilers, TileCandidate, compile_candidates
from pellucid.selection.args import EngineArgs
from pellucid.selection.decode_path import FUSED
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.traits.model import ModelTraits
from pellucid.traits.tensors import TensorIndex
from pellucid.tuning.gate import Bench, Probe
from pellucid.tuning.kernel_tiles import TILE_OPS, other_candidates
from pellucid.tuning.measure import Budget, CannotMeasureError, Question
from pellucid.tuning.problems import REFERENCE, drawable
from pellucid.tuning.projections import decode_buckets, measure_tiles, projections_of, tile_candidates
from pellucid.tuning.session import Mode, Resolve, Session, Tuned, tune
from pellucid.tuning.step_choices import Given, Tiles, differences, traits_of
from pellucid.tuning.store import APART, EvidenceStore
from pellucid.tuning.workbench import Workbench

DEFAULT_SECONDS = 10
"""Of a cold start, that of the child which measures included. With weights drawn for steps and the last candidate's
overrun it stays under 20. What the default's kernels take to compile, in children of their own, is not counted: the
engine needs them too."""

FULL_SECONDS = 600
"""Of `pellucid tune`, which nobody waits for with a server down."""

OTHERS_MEASURE = "another process measures on this machine now, and two would time each other"

INVARIANCE_LOST = (
    "by default a result does not depend on what it is batched with, under the measured choices it may; "
    "--batch-invariant keeps it so"
)

SHORT_PROMPT = 256
"""Tokens. Attention is a small part of a step of so few."""

THOROUGH_SECONDS = 60
"""A session of fewer leaves out candidates that compile themselves with nvcc, which takes minutes, and what an earlier
one had no time for: `tune` asks both."""


def tune_plan(
    args: EngineArgs,
    traits: ModelTraits,
    hardware: Hardware,
    resolve: Resolve,
    tensors: TensorIndex,
    measure: bool,
    on_progress: Callable[[str], None] | None = None,
    bench: Bench | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """The plan of what is known of this machine's speeds, and with `measure` of what can be found out now.

    A start with a GPU measures what is not known, unless `--measure off` forbids it. Without one it measures where
    `--measure` asks for it, since the engine's own kernels come first there anyway. Nor does a start with several
    ranks, whose steps this version does not time.
    `bench`: instead of real backends in a child process, with a `clock` of its own.
    """
    default = resolve({})
    mode: Mode = "full" if args.measure == "full" and measure else "cached"
    wanted = measure and (default.device == "cuda" or args.measure is not None)
    measures = wanted and default.tensor_parallel_size == 1
    if args.measure == "off":
        return Tuned(default, {}, ())
    store = EvidenceStore.of(hardware, default.device)
    if not measures and store.is_empty:
        return Tuned(default, {}, ())
    seconds = args.measure_seconds or DEFAULT_SECONDS
    notes: list[str] = []
    with ExitStack() as stack:
        thorough = seconds >= THOROUGH_SECONDS
        session = Session(store, None, Budget(seconds, clock), mode, on_progress, thorough=thorough)
        beside = TileCompilers(stack)
        if measures:
            # A candidate that hangs may take no more than this; a kernel is compiled in less.
            deadline = max(20.0, min(300.0, seconds / 4))
            own = bench is None
            session.bench = bench or stack.enter_context(
                Probe(Workbench(traits, default, tensors), check_deadline_s=deadline)
            )

            def begin() -> None:
                if not stack.enter_context(store.alone()):
                    raise CannotMeasureError(OTHERS_MEASURE)
                if own and default.decode_path == FUSED:
                    _compile_default(traits, default, hardware, on_progress)
                    beside.start(traits, default, hardware, session)

            session.before = begin
        tuned = tune(
            resolve,
            session,
            partial(_tiles, traits, hardware, session, default, beside),
            partial(_asks, default, traits, session),
        )
        if session.measured:
            compiled = f", besides {session.budget.excused:.0f} s for kernels that the engine needs too"
            done = (
                f"measured {session.measured} choices in {session.budget.used:.0f} s"
                f"{compiled if session.budget.excused >= 1 else ''}, kept in {store.path}"
            )
            notes.append(done)
        if default.batch_invariant and not tuned.plan.batch_invariant:
            notes.append(INVARIANCE_LOST)
        return replace(tuned, notes=(*notes, *tuned.notes))


def _compile_default(
    traits: ModelTraits, plan: ExecutionPlan, hardware: Hardware, on_progress: Callable[[str], None] | None
) -> None:
    """The engine needs these kernels too, and several processes have them sooner than one."""
    if on_progress is not None:
        on_progress("the kernels of the default's steps are compiled")
    with CompileAhead(traits, plan, _limits(hardware), hardware.cpu.cores) as ahead:
        ahead.wait()


@dataclass(slots=True)
class TileCompilers:
    """Processes that compile candidates for tiles beside a session, until no tile is asked any more."""

    stack: ExitStack
    over: bool = False
    _running: Compilers | None = None

    def start(self, traits: ModelTraits, plan: ExecutionPlan, hardware: Hardware, session: Session) -> None:
        if not self.over:
            limits = _limits(hardware)
            candidates = [*_candidates(traits, plan, limits, session)]
            self._running = compile_candidates(traits, plan, limits, hardware.cpu.cores, candidates)
            self.stack.enter_context(self._running)

    def end(self) -> None:
        """What is timed from now on has the cores for itself."""
        self.over = True
        if self._running is not None:
            self._running.end()


def _candidates(
    traits: ModelTraits, plan: ExecutionPlan, limits: DeviceLimits, session: Session
) -> Iterator[TileCandidate]:
    """All that will be asked but the defaults, in the order in which `measure_tiles` asks them."""
    buckets, about = decode_buckets(plan), traits_of(plan, "step")

    def is_open(op: str, rows: int) -> bool:
        return session.mode == "full" or not session.store.known_order(op, rows, about)

    for rows in buckets:
        for projection in projections_of(traits, rows):
            if is_open(APART + projection.op, rows):
                for name in tile_candidates(projection, rows, limits)[1:]:
                    yield TileCandidate(projection.op, rows, name)
    for rows in buckets:
        for op, names in other_candidates(traits, rows, limits, plan.page_size, plan.max_model_len):
            if is_open(op, rows):
                for name in names[1:]:
                    yield TileCandidate(op, rows, name)


def _limits(hardware: Hardware) -> DeviceLimits:
    gpu = hardware.gpus[0]
    return DeviceLimits(gpu.sm, gpu.sm_count, gpu.smem_optin_bytes)


def _asks(default: ExecutionPlan, traits: ModelTraits, session: Session, question: Question) -> bool:
    """Whether to ask. On a GPU a start spends its seconds neither on plain torch as the only rival, nor on attention of
    short prompts, which costs little where their steps are captured; what is known counts."""
    rivals = [name for name in question.order[1:] if name != REFERENCE]
    short = question.op == "attention.prefill" and question.bucket <= min(SHORT_PROMPT, default.prompt_graphs)
    whole = session.mode == "full" or default.device == "cpu"
    worth = whole or (bool(rivals) and not short) or session.store.find(question) is not None
    return worth and drawable(question, traits)


def _tiles(
    traits: ModelTraits,
    hardware: Hardware,
    session: Session,
    default: ExecutionPlan,
    beside: TileCompilers,
    plan: ExecutionPlan,
) -> Tiles:
    """Measured tiles of a plan with a fused decode path; none of another."""
    if plan.decode_path != FUSED:
        beside.end()
        return Tiles()
    limits = _limits(hardware)

    def candidates(projection: Projection, rows: int) -> tuple[str, ...]:
        if session.bench is not None:
            return tile_candidates(projection, rows, limits)
        # Without torch and triton, which a process that measures nothing need not import.
        return session.store.known_order(APART + projection.op, rows, traits_of(plan, "step"))

    def differing(rows: int) -> Given:
        return differences(plan, default, "step.decode", rows)

    inside = {backend.name for backend in discover() if backend.fused_decode == "inside"}

    def others(rows: int) -> Iterator[tuple[str, Sequence[str]]]:
        if session.bench is not None:
            found = other_candidates(traits, rows, limits, plan.page_size, plan.max_model_len)
        else:
            found = ((op, session.store.known_order(op, rows, traits_of(plan, "step"))) for op in TILE_OPS)
        own = plan.backend("attention.decode", rows) in inside
        yield from ((op, names) for op, names in found if own or op not in (MLA_DECODE, GQA_DECODE))

    try:
        return measure_tiles(plan, traits, candidates, session.answer, others, differing)
    finally:
        beside.end()

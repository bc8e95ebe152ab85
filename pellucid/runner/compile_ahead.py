"""Compiles kernels of captured steps in several processes, into Triton's cache on disk, where the engine finds them.

`engine.startup` starts them while weights load, and `GPURunner` waits for them before its first step; `tuning.start`
starts others for candidates, while those ahead of them are measured.

A kernel's compilation takes a second or more of one core, and a bucket of rows has about twenty. What a child does not
come to, or gets wrong, is compiled later as without it: nothing depends on it but time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pellucid.kernels.device import DeviceLimits
from pellucid.runner.prompt_graphs import PromptShape, prompt_shapes
from pellucid.selection.bucket import buckets_up_to
from pellucid.selection.evidence import is_tile_op
from pellucid.selection.plan import ExecutionPlan
from pellucid.traits.model import ModelTraits
from pellucid.utils.cache import cache_dir
from pellucid.utils.process import child_environment, children_for

MOST_CHILDREN = 12
LONGEST_S = 120.0

SAMPLED_ROWS = (1, 2, 16)
"""Prompts are sampled apart: of one row, of several, of a multiple of 16, which are compiled each."""


REACH_KERNELS = frozenset({
    "device", "dtype", "kv.dtype", "kv.layout", "kv.page_size", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len", "attention.decode", "moe", "cuda_graphs", "prompt_graphs",
})  # fmt: skip
"""Decisions that a kernel is compiled for."""

PROMPT_CHILDREN = 2
"""That share the prompts' kernels: neighbours in size have most in common."""

logger = logging.getLogger(__name__)


class TileCandidate(NamedTuple):
    """A tile, by its name, that an op of a decode step of `rows` rows may take."""

    op: str
    rows: int
    tile: str


@dataclass(frozen=True, slots=True)
class CompileJob:
    """What a child compiles: decode steps of buckets, prompts of shapes, and candidates for tiles, in their order.

    `traits` are of the layers that differ, since others launch the same kernels.
    """

    traits: ModelTraits
    plan: ExecutionPlan
    limits: DeviceLimits
    buckets: tuple[int, ...] = ()
    prompts: tuple[PromptShape, ...] = ()
    candidates: tuple[TileCandidate, ...] = ()

    @classmethod
    def of(cls, traits: ModelTraits, plan: ExecutionPlan, limits: DeviceLimits) -> CompileJob:
        """With nothing to compile yet."""
        shown = tuple(dict.fromkeys(traits.moe_layers))
        small = replace(traits, num_layers=len(shown), moe_layers=shown, mtp_layers=0)
        short = replace(plan, decisions=tuple(replace(d, rejected=(), measured=()) for d in plan.decisions))
        return cls(small, short, limits)


class Compilers:
    """Children at work, until they are ended or the context is left."""

    def __init__(self, jobs: Iterable[CompileJob]) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        # What a compiler that is killed leaves behind goes with it.
        self._leavings = tempfile.TemporaryDirectory(prefix="pellucid-compile-", ignore_cleanup_errors=True)
        try:
            for job in jobs:
                self._children.append(_start(job, self._leavings.name))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill those that are left, with the compilers that they have started."""
        for child in self._children:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._leavings.cleanup()


def compile_candidates(
    traits: ModelTraits,
    plan: ExecutionPlan,
    limits: DeviceLimits,
    cores: int,
    candidates: Sequence[TileCandidate],
) -> Compilers:
    """Candidates dealt out in their order: those that are measured first are compiled first."""
    job, count = CompileJob.of(traits, plan, limits), children_for(cores, MOST_CHILDREN)
    shares = (tuple(candidates[start::count]) for start in range(count))
    return Compilers(replace(job, candidates=share) for share in shares if share)


class CompileAhead(Compilers):
    """What an engine of a plan compiles; `wait` for it, or leave the context to end it."""

    def __init__(self, traits: ModelTraits, plan: ExecutionPlan, limits: DeviceLimits, cores: int) -> None:
        """Starts nothing where an engine of this plan has compiled everything here before."""
        self._mark = _mark(traits, plan, limits)
        shapes = prompt_shapes(traits, plan) if plan.cuda_graphs else ()
        job, count = CompileJob.of(traits, plan, limits), children_for(cores, MOST_CHILDREN)
        shares = [] if self._mark.exists() else _shares(buckets_up_to(plan.max_num_seqs), shapes, count)
        super().__init__(replace(job, buckets=buckets, prompts=prompts) for buckets, prompts in shares)

    def wait(self) -> None:
        """Until all have ended, or `LONGEST_S`. If all did their work, the next engine of this plan starts none."""
        deadline, failed = time.monotonic() + LONGEST_S, []
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.returncode:
                failed.append(child.returncode)
        if failed:
            logger.debug("%d of %d processes that compile kernels failed: %s", len(failed), len(self._children), failed)
        elif self._children:
            with suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()


def _shares(
    buckets: Sequence[int], shapes: Sequence[PromptShape], count: int
) -> list[tuple[tuple[int, ...], tuple[PromptShape, ...]]]:
    """Buckets, then runs of neighbouring shapes, dealt out to at most `count` children."""
    length = max(1, -(-len(shapes) // min(PROMPT_CHILDREN, count)))
    runs = [tuple(shapes[start : start + length]) for start in range(0, len(shapes), length)]
    # The first run goes to the child behind that of the last bucket.
    return [
        (tuple(buckets[child::count]), tuple(chain.from_iterable(runs[(child - len(buckets)) % count :: count])))
        for child in range(min(count, len(buckets) + len(runs)))
    ]


def _start(job: CompileJob, folder: str) -> subprocess.Popen[bytes]:
    """In a process group of its own, with `folder` for what is temporary."""
    child = subprocess.Popen(
        [sys.executable, "-m", "pellucid.runner.compile_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment(OMP_NUM_THREADS="1", TMPDIR=folder),
        start_new_session=True,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError), child.stdin:
        pickle.dump(job, child.stdin)
    return child


def _mark(traits: ModelTraits, plan: ExecutionPlan, limits: DeviceLimits) -> Path:
    """A file that says that all was compiled: of these kernels, this Triton, its cache, and what steps are made of."""
    from importlib.metadata import version

    kernels = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in ("kernels/triton", "attention", "layers", "models", "moe", "runner"):
        for path in sorted((package / folder).glob("*.py")):
            kernels.update(path.read_bytes())
    choices = [(d.key, d.value) for d in plan.decisions if d.op in REACH_KERNELS or is_tile_op(d.op)]
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))  # noqa: PTH111 (no error where there is no home)
    where = os.environ.get("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))  # noqa: PTH118
    parts = (kernels.hexdigest(), version("triton"), version("torch"), where, limits, traits, choices)
    return cache_dir("compiled", hashlib.sha256(repr(parts).encode()).hexdigest()[:16])

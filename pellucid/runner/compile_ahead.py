"""Compiles the kernels of fused steps in several processes, while weights load: into Triton's cache on disk, where the
engine finds them. Started by `engine.startup`, waited for by `GPURunner` before its first step.

A kernel's compilation takes a second or more of one core, and a bucket of rows has about twenty. What a child does not
come to, or gets wrong, is compiled later as without it: nothing depends on it but time.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from pellucid.kernels.device import DeviceLimits
from pellucid.selection.bucket import buckets_up_to
from pellucid.selection.plan import ExecutionPlan
from pellucid.traits.model import ModelTraits
from pellucid.utils.cache import cache_dir

MOST_CHILDREN = 12
LONGEST_S = 120.0

SAMPLED_ROWS = (1, 2, 16)
"""Prompts are sampled apart: of one row, of several, of a multiple of 16, which are compiled each."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """What a child compiles: steps of these buckets. `traits` are of the layers that differ."""

    traits: ModelTraits
    plan: ExecutionPlan
    limits: DeviceLimits
    buckets: tuple[int, ...]


class CompileAhead:
    """Children at work; `wait` for them, or leave the context to end them."""

    def __init__(
        self, traits: ModelTraits, plan: ExecutionPlan, limits: DeviceLimits, cores: int | None = None
    ) -> None:
        """Starts nothing where an engine of this plan has compiled everything here before."""
        self._mark = _mark(traits, plan, limits)
        self._children: list[subprocess.Popen[bytes]] = []
        if self._mark.exists():
            return
        kinds = traits.moe_layers
        # A layer of each kind: others launch the same kernels.
        shown = (kinds[:1] + kinds[-1:]) if len(set(kinds)) > 1 else kinds[:1]
        small = replace(traits, num_layers=len(shown), moe_layers=shown, mtp_layers=0)
        short = replace(plan, decisions=tuple(replace(d, rejected=(), measured=()) for d in plan.decisions))
        for buckets in _shares(buckets_up_to(plan.max_num_seqs), _children(cores)):
            self._children.append(_start(CompileJob(small, short, limits, buckets)))

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
            child.wait()

    def wait(self) -> None:
        """Until all have ended, or `LONGEST_S`. If all did their work, the next engine of this plan starts none."""
        codes = []
        for child in self._children:
            try:
                codes.append(child.wait(LONGEST_S))
            except subprocess.TimeoutExpired:
                child.kill()
                codes.append(child.wait())
        if codes and not any(codes):
            with suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()


def _children(cores: int | None) -> int:
    return max(1, min(MOST_CHILDREN, (len(os.sched_getaffinity(0)) if cores is None else cores) - 1))


def _shares(buckets: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Buckets dealt out to at most `count` children."""
    return [share for start in range(count) if (share := tuple(buckets[start::count]))]


def _start(job: CompileJob) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "pellucid.runner.compile_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
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
    for folder in ("kernels/triton", "layers", "models"):
        for path in sorted((package / folder).glob("*.py")):
            kernels.update(path.read_bytes())
    choices = [(d.key, d.value) for d in plan.decisions if d.op not in ("seed", "threads", "load_format")]
    where = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    parts = (kernels.hexdigest(), version("triton"), version("torch"), where, limits, traits, choices)
    return cache_dir("compiled", hashlib.sha256(repr(parts).encode()).hexdigest()[:16])

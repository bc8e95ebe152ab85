"""Backends that do not exist, with times drawn from a seed, and a clock that only they move on."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pellucid.core import PellucidError, PlanError
from pellucid.hardware import Hardware, load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Evidence
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.registry import discover
from pellucid.selection.resolve import resolve
from pellucid.tuning.measure import Question, TrialFailedError
from pellucid.tuning.store import EvidenceStore, Fingerprint
from tests.selection.models import V2_LITE


class Clock:
    """Seconds since it was made, which only `advance` adds to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class SimulatedBench:
    """Median microseconds by candidate (or by `candidate@bucket`), and what is wrong with the others.

    `noise`: standard deviation of a sample as a share of it. `drift`: by how much all get slower with every sample.
    """

    times: Mapping[str, float]
    wrong: Mapping[str, str] = field(default_factory=dict)
    noise: float = 0.0
    drift: float = 0.0
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def start(self) -> None: ...

    def check(self, question: Question, candidate: str) -> str:
        self.clock.advance(0.1)
        return self.wrong.get(candidate, "")

    def sample(self, question: Question, candidate: str) -> float:
        self.asked.append((question.key, candidate))
        if self.wrong.get(f"{candidate} later"):
            raise TrialFailedError(self.wrong[f"{candidate} later"])
        for name in (f"{question.op} {candidate}@{question.bucket}", f"{candidate}@{question.bucket}", candidate):
            if name in self.times:
                seconds = self.times[name] * 1e-6
                break
        else:
            seconds = 50e-6
        seconds *= self._random.lognormvariate(0.0, self.noise) * (1 + self.drift * len(self.asked))
        self.clock.advance(0.002)
        return seconds


@dataclass(frozen=True)
class Misbehaving:
    """What a probe's child runs: each candidate does what its name says."""

    def start(self) -> None: ...

    def check(self, question: Question, candidate: str) -> str:
        match candidate:
            case "crashes":
                os.abort()
            case "leaves":
                os._exit(7)
            case "hangs":
                time.sleep(60)
            case "too large":
                raise MemoryError
            case "no compiler":
                raise PellucidError("no C++ compiler; apt install g++")
            case "no tile":
                raise PlanError("no tile fits")
            case "raises":
                raise ValueError("not for this shape\nand more")
            case "wrong":
                return "row 2 differs by 0.5 of the reference, 0.02 is allowed"
        return ""

    def sample(self, question: Question, candidate: str) -> float:
        if candidate == "hangs later":
            time.sleep(60)
        if candidate == "crashes later":
            os.abort()
        return {"slow": 3e-5, "nan": float("nan")}.get(candidate, 1e-5)


TWO_BUILT = ("triton_mla", "flashinfer_mla", "triton_fused", "flashinfer_cutlass")


def gpu_machine() -> Hardware:
    """One H200 with the packages of `TWO_BUILT`, so that what this version can run besides has none."""
    hardware = load_hardware("h200")
    packages = {p.name: p.tested[-1] if p.tested else "1.0" for b in discover() if b.name in TWO_BUILT
                for p in b.packages}  # fmt: skip
    return replace(hardware, packages={**hardware.packages, **packages})


def resolver(hardware: Hardware | None = None, **flags: object):
    """`resolve` of V2-Lite on a card where other projects' backends are built in too, so that there is a choice."""
    machine = hardware or gpu_machine()
    backends = [replace(b, built_in=True) if b.name in TWO_BUILT else b for b in discover()]
    args = EngineArgs("model", **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **flags})  # type: ignore[arg-type]

    def make(evidence: Evidence) -> ExecutionPlan:
        return resolve(args, V2_LITE, machine, evidence, backends=backends)

    return make


def store_at(path, soft: Mapping[str, str] | None = None, hard: Mapping[str, object] | None = None) -> EvidenceStore:
    fingerprint = Fingerprint({"gpu": "simulated", **(hard or {})}, {"torch": "2.11.0", **(soft or {})})
    return EvidenceStore(path / "evidence.jsonl", fingerprint)


@dataclass(frozen=True)
class DoesNotStart(Misbehaving):
    """A bench whose process ends before it can be asked anything."""

    def start(self) -> None:
        raise SystemExit(4)

"""`doctor --kernels` on a bench whose figures a test gives, and what it says of them. Used by the tests of kernels."""

from __future__ import annotations

import json
from pathlib import Path

from pellucid.doctor.kernels import run_kernels
from pellucid.doctor.report import Report
from pellucid.selection.args import EngineArgs
from tests.selection.models import V2_LITE
from tests.tuning.simulated import SimulatedBench, gpu_machine, resolver

MINE, OTHER = "triton_mla", "flashinfer_mla"
MOE, OTHER_MOE = "triton_fused", "flashinfer_cutlass"

SLOW = {MINE: 100.0, OTHER: 150.0, MOE: 100.0, OTHER_MOE: 150.0, "reference": 900.0}
"""The defaults are fastest."""

TINY = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "4", "--port", "0",
        "--num-kv-pages", "16")  # fmt: skip
TINY_FLAGS = {"device": "cpu", "threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 4, "num_kv_pages": 16}


def bench_of(times=None, wrong=None, **settings) -> SimulatedBench:
    return SimulatedBench({**SLOW, **(times or {})}, wrong or {}, **settings)


def run(bench, make=None, traits=V2_LITE, **flags) -> Report:
    """On a card with two candidates of attention and of experts, beside the reference."""
    args = EngineArgs("model", **flags)
    clock = getattr(bench, "clock", None)
    resolved = make or resolver(**{k: v for k, v in flags.items() if k.endswith("backend")})
    figures, checks = run_kernels(
        args, traits, gpu_machine(), resolved, None, bench, **({"clock": clock} if clock else {})
    )
    return Report("simulated", tuple(checks), figures)


def lines(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.found for check in report.checks if check.status == status}


def kept(cache: Path) -> list[dict]:
    return [json.loads(line) for path in cache.glob("*.jsonl") for line in path.read_text().splitlines()]


def figures_of(report: Report, op: str, bucket: int) -> dict:
    (found,) = [one.to_json() for one in report.kernels if (one.decision.op, one.decision.bucket) == (op, bucket)]
    return found

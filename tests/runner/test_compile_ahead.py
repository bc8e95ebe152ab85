"""Kernels compiled ahead are those that an engine would compile, and nothing else depends on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pellucid.hardware import load_hardware
from pellucid.kernels.device import DeviceLimits
from pellucid.runner import compile_ahead
from pellucid.runner.compile_ahead import CompileAhead, CompileJob, TileCandidate, compile_candidates
from pellucid.runner.prompt_graphs import PromptShape, prompt_shapes
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.resolve import resolve
from tests.selection.models import SMALL_DENSE, V2_LITE

H200 = DeviceLimits(90, 132, 232448)
COMPILE = """
import pickle, sys
from pellucid.runner.compile_child import compile_steps
with open(sys.argv[1], "rb") as file:
    compile_steps(pickle.load(file), sys.argv[2])
"""


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "pellucid"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path


@pytest.fixture
def jobs(caches: Path, monkeypatch: pytest.MonkeyPatch) -> list[CompileJob]:
    """What children would be started with; they end at once, well."""
    found: list[CompileJob] = []

    def start(job: CompileJob, folder: str) -> subprocess.Popen[bytes]:
        found.append(job)
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(compile_ahead, "_start", start)
    return found


def plan_of(traits=V2_LITE, **flags) -> ExecutionPlan:
    return resolve(
        EngineArgs("model", **{"max_num_seqs": 32, "num_kv_pages": 99, **flags}), traits, load_hardware("h200")
    )


def test_every_bucket_is_some_childs_and_a_layer_of_each_kind_is_enough(jobs: list[CompileJob]) -> None:
    with CompileAhead(V2_LITE, plan_of(), H200, cores=5) as ahead:
        ahead.wait()
    assert len(jobs) == 4
    assert sorted(bucket for job in jobs for bucket in job.buckets) == [1, 2, 4, 8, 16, 32]
    assert sorted(shape for job in jobs for shape in job.prompts) == list(prompt_shapes(V2_LITE, plan_of()))
    assert all(job.traits.moe_layers == (False, True) and job.traits.num_layers == 2 for job in jobs)
    jobs.clear()
    with CompileAhead(SMALL_DENSE, plan_of(SMALL_DENSE), H200, cores=1):
        assert [job.traits.num_layers for job in jobs] == [1]


def test_candidates_are_dealt_out_in_their_order(jobs: list[CompileJob]) -> None:
    candidates = [TileCandidate(f"op{index}", 1, "tile") for index in range(7)]
    with compile_candidates(V2_LITE, plan_of(), H200, 4, candidates):
        pass
    assert [[c.op for c in job.candidates] for job in jobs] == [["op0", "op3", "op6"], ["op1", "op4"], ["op2", "op5"]]
    assert all(not job.buckets and not job.prompts for job in jobs)
    jobs.clear()
    compile_candidates(V2_LITE, plan_of(), H200, 4, candidates[:1])
    assert len(jobs) == 1


def test_what_was_compiled_is_not_compiled_again_unless_something_changed(jobs: list[CompileJob]) -> None:
    plan = plan_of()
    with CompileAhead(V2_LITE, plan, H200, cores=2) as ahead:
        ahead.wait()
    jobs.clear()
    CompileAhead(V2_LITE, plan, H200, cores=2)
    assert jobs == []
    for other in (plan_of(max_num_seqs=64), plan_of(dtype="fp16")):
        CompileAhead(V2_LITE, other, H200, cores=2).wait()
        assert jobs and not jobs.clear()
    CompileAhead(V2_LITE, plan, H200._replace(sm=100), cores=2).wait()
    CompileAhead(replace(V2_LITE, hidden_size=4096), plan, H200, cores=2).wait()
    assert len(jobs) == 2


def test_a_child_that_fails_costs_nothing_but_is_tried_again(
    jobs: list[CompileJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(job: CompileJob, folder: str) -> subprocess.Popen[bytes]:
        jobs.append(job)
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    monkeypatch.setattr(compile_ahead, "_start", fails)
    for _ in range(2):
        with CompileAhead(V2_LITE, plan_of(), H200, cores=2) as ahead:
            ahead.wait()
    assert len(jobs) == 2


def test_children_end_with_the_start_that_wanted_them(jobs: list[CompileJob], monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(compile_ahead, "_start", lambda job, folder: subprocess.Popen(sleeps, start_new_session=True))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), CompileAhead(V2_LITE, plan_of(), H200, cores=3) as ahead:
        children = ahead._children
        raise KeyboardInterrupt
    assert all(child.poll() is not None for child in children)
    assert time.monotonic() - begin < 10


def test_kernels_of_tensors_without_memory_are_those_of_tensors_with_it(caches: Path, tmp_path: Path) -> None:
    """A kernel's key in Triton's cache has shapes, strides and alignments: one that differs is compiled in vain."""
    pytest.importorskip("triton", reason="triton is for Linux")
    import pickle

    assert V2_LITE.moe is not None
    traits = replace(
        V2_LITE, hidden_size=256, intermediate_size=512, vocab_size=320, num_layers=1, moe_layers=(True,),
        attention=replace(V2_LITE.attention, num_heads=2),
        moe=replace(V2_LITE.moe, num_experts=8, intermediate_size=64, shared_intermediate_size=128),
    )  # fmt: skip
    job = tmp_path / "job"
    plan, shapes = plan_of(traits, max_num_seqs=5), (PromptShape(128, 256),)
    candidates = (
        TileCandidate("projection.512x256.swiglu", 8, "dot-32x128-w2-p2-s3"),
        TileCandidate("projection.nonsense", 8, "dot-32x128-w2-p2-s3"),
        TileCandidate("experts.up", 1, "experts-8x128-w2-s2"),
    )
    job.write_bytes(pickle.dumps(CompileJob(traits, plan, H200, (1,), shapes)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    kernels = []
    for device in ("meta", "cpu"):
        subprocess.run([sys.executable, "-c", COMPILE, str(job), device], env=environment, check=True)
        kernels.append(len(list((caches / "triton").iterdir())))
    assert kernels[0] == kernels[1] > 10
    # One that can't be compiled is nobody else's trouble.
    for device in ("meta", "cpu"):
        job.write_bytes(pickle.dumps(CompileJob(traits, plan, H200, candidates=candidates)))
        subprocess.run([sys.executable, "-c", COMPILE, str(job), device], env=environment, check=True)
        kernels.append(len(list((caches / "triton").iterdir())))
    assert kernels[2] == kernels[3] >= kernels[1] + 2

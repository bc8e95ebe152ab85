"""From a model's name to what runs it, in steps that refuse before work is lost. Used by `Engine` and the processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.core import InvalidRequestError, PellucidError, StructuredOutputs
from pellucid.engine.inputs import check_installed, slow_path_reasons
from pellucid.engine.worker import Worker
from pellucid.hardware.facts import Hardware
from pellucid.hardware.probe import probe
from pellucid.kernels.device import device_limits
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.hub import resolve_model
from pellucid.models.registry import unsaid_traits
from pellucid.models.synthetic import SyntheticTensors, settle
from pellucid.models.weights import LoadProgress
from pellucid.runner.compile_ahead import CompileAhead
from pellucid.runner.gpu_runner import GPURunner
from pellucid.runner.model_runner import ModelRunner
from pellucid.scheduler.config import SchedulerConfig
from pellucid.scheduler.scheduler import Scheduler
from pellucid.selection.args import SYNTHETIC, EngineArgs
from pellucid.selection.decode_path import FUSED
from pellucid.selection.memory import stored_bytes
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.resolve import resolve
from pellucid.traits.model import ModelTraits
from pellucid.tuning.start import tune_plan

if TYPE_CHECKING:
    from pellucid.runner.sampler import Constraint

CPU_CHUNK_CONTEXT = 512 * 512
"""Attention over a long context is slow on a CPU: a chunk of it costs what 512 tokens from the start do, so that other
requests, and whoever asks whether the engine lives, wait seconds and not a minute."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DebugModes:
    """Modes that force rare paths. `None` is off."""

    force_preempt_every: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint whose headers are read and whose traits are supported.

    `notes` are for people; `conflicts` are those of them in which the files contradict each other.
    """

    path: Path
    checkpoint: Checkpoint
    traits: ModelTraits
    notes: tuple[str, ...]
    conflicts: tuple[str, ...]


def open_model(name: str, load_format: str | None = None) -> ModelFiles:
    """Find the model (which may download it), read its headers, and say what it is. Needs no torch.

    With the load format `synthetic` its config is enough, and no weight file is looked at.

    Raises:
        PellucidError: it is not there, is damaged, or has a trait that this version lacks.
    """
    check_installed()
    if load_format == SYNTHETIC:
        return _open_synthetic(name)
    path = resolve_model(name)
    checkpoint = Checkpoint.open(path)
    report = checkpoint.report()
    report.require_supported()
    checkpoint.require_weights()
    notes = (*report.notes, *report.conflicts)
    return ModelFiles(path, checkpoint, report.traits, notes, tuple(report.conflicts))


def _open_synthetic(name: str) -> ModelFiles:
    path = resolve_model(name, weights=False)
    if path.suffix == ".gguf":
        raise PellucidError(f"--load-format {SYNTHETIC}: {name} is GGUF; give a config.json or its directory")
    checkpoint = Checkpoint.open(path / "config.json" if path.is_dir() else path)
    report = checkpoint.report()
    report.require_supported()
    traits, assumed = settle(report.traits, unsaid_traits(checkpoint.config))
    # With its directory, for a tokenizer that may lie there.
    checkpoint = replace(checkpoint, path=path)
    return ModelFiles(path, checkpoint, traits, (*report.notes, *report.conflicts, *assumed), report.conflicts)


def make_plan(
    args: EngineArgs,
    files: ModelFiles,
    hardware: Hardware | None = None,
    *,
    measure: bool = False,
    on_progress: Callable[[str], None] | None = None,
    tell: bool = True,
) -> ExecutionPlan:
    """The plan for this machine, or for `hardware`. Raises PlanError for one that can't start.

    Of this machine it knows what was measured here; with `measure`, what was not is measured now, if the flags let it.
    How that went is logged, unless who runs on the plan makes it once more and will `tell` then.
    """
    machine = hardware or probe()
    resolver = partial(
        resolve,
        args,
        files.traits,
        machine,
        stored_bytes=stored_bytes(files.checkpoint.tensors, files.traits.num_layers),
    )
    plan = resolver()
    plan.check_startable()
    if hardware is not None:
        return plan
    tuned = tune_plan(args, files.traits, machine, resolver, files.checkpoint.tensors, measure, on_progress)
    for note in tuned.notes if tell else ():
        logger.info("%s", note)
    # What was found wrong here may leave an op with nothing to run.
    tuned.plan.check_startable()
    return tuned.plan


def load_worker(
    files: ModelFiles,
    plan: ExecutionPlan,
    *,
    capture_layers: Sequence[int] = (),
    on_progress: Callable[[LoadProgress], None] | None = None,
    debug: DebugModes | None = None,
    compile_constraint: Callable[[StructuredOutputs], Constraint] | None = None,
) -> Worker:
    """Read the weights and make the step loop's worker. What could be better about model or plan is warned of here.

    Raises:
        PellucidError: layers to capture that the model lacks, or tensors that do not make the model.
    """
    for layer in capture_layers:
        if not 0 <= layer < files.traits.num_layers:
            raise InvalidRequestError(
                f"layer {layer} to capture is outside [0, {files.traits.num_layers})", "capture_layers"
            )
    for conflict in files.conflicts:
        logger.warning("%s: %s", files.path.name, conflict)
    for reason in slow_path_reasons(plan):
        logger.warning("%s", reason)
    tensors = files.checkpoint.tensors
    if plan.decision("load_format").value == SYNTHETIC:
        tensors = SyntheticTensors(files.traits, plan.seed)
    runner: GPURunner | ModelRunner
    if plan.decode_path == FUSED:
        # Kernels are compiled beside the reading of weights.
        import torch

        with CompileAhead(files.traits, plan, device_limits(torch.device(plan.device)), plan.threads) as ahead:
            runner = GPURunner(files.traits, tensors, plan, capture_layers, on_progress, before_steps=ahead.wait)
    else:
        runner = ModelRunner(files.traits, tensors, plan, capture_layers, on_progress)
    return Worker(Scheduler(scheduler_config(plan, debug)), runner, compile_constraint)


def scheduler_config(plan: ExecutionPlan, debug: DebugModes | None = None) -> SchedulerConfig:
    """What of the plan bounds steps and the KV pool."""
    return SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_pages=plan.num_kv_pages,
        page_size=plan.page_size,
        max_chunk_context=CPU_CHUNK_CONTEXT if plan.device == "cpu" else None,
        enable_prefix_caching=plan.enable_prefix_caching,
        enable_chunked_prefill=plan.enable_chunked_prefill,
        force_preempt_every=None if debug is None else debug.force_preempt_every,
    )

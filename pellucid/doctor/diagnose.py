"""Every check of `pellucid doctor`, in order: host, devices, the model with its plan and its memory, and its kernels.

Says what `serve` would do with the same flags: it makes the same plan from the same files, and no weight is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pellucid.core import PellucidError
from pellucid.doctor.devices import DriverFacts, device_checks, read_driver_facts
from pellucid.doctor.host import host_checks, hub_folder, read_folder, read_host, unchecked_host
from pellucid.doctor.plan import blocker_name, memory_checks, plan_checks
from pellucid.doctor.report import Check, KernelFigures, Report
from pellucid.engine.inputs import PACKAGES, TOKENIZER_FILES
from pellucid.hardware.facts import Hardware, format_bytes
from pellucid.models.checkpoint import INDEX_FILE, Checkpoint
from pellucid.models.hub import HUB_NAME, resolve_model
from pellucid.models.registry import unsaid_traits
from pellucid.models.synthetic import settle
from pellucid.selection.args import SYNTHETIC, EngineArgs
from pellucid.selection.evidence import Evidence
from pellucid.selection.limits import SEQUENCES
from pellucid.selection.memory import stored_bytes
from pellucid.selection.plan import ExecutionPlan
from pellucid.selection.resolve import resolve
from pellucid.server.args import ServeArgs
from pellucid.traits.config import TraitReport
from pellucid.traits.model import ModelTraits

ELSEWHERE = "this is another machine"


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked: the flags of `serve`, and the machine. `here`: it is this one, so its host can be looked at.

    `args.model` is empty when the machine alone is meant. `packages`: the modules that serving needs. `kernels`: to run
    every kernel that fits, too.
    """

    args: EngineArgs
    serve_args: ServeArgs
    hardware: Hardware
    here: bool
    packages: Sequence[str]
    kernels: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose headers are read. `to_download`: bytes of weights that a start would fetch, None if not known."""

    checkpoint: Checkpoint
    traits: ModelTraits
    report: TraitReport
    downloads: bool
    to_download: int | None


def diagnose(case: Case, on_progress: Callable[[str], None] | None = None) -> Report:
    """The report. Errors that the user can act on become lines; nothing is raised for them.

    `on_progress` is told what is measured now, where that was asked for.
    """
    opened, model_lines = _open(case)
    plan, plan_lines = (None, []) if opened is None else _plan(case, opened)
    ranks = 1 if plan is None else plan.tensor_parallel_size
    device = case.args.device or case.hardware.device
    driver = read_driver_facts() if case.here and device == "cuda" and case.hardware.gpus else None
    around = [*_host(case, plan, ranks, device), *_devices(case, device, ranks, driver), *model_lines]
    planned = [*([] if plan is None else memory_checks(plan, case.hardware, driver)), *plan_lines]
    kernels, kernel_lines = _kernels(case, opened, plan, [*around, *planned], on_progress)
    if kernels and opened is not None:
        # A start knows these figures from now on.
        plan, plan_lines = _plan(case, opened)
        planned = [*([] if plan is None else memory_checks(plan, case.hardware, driver)), *plan_lines]
    checks = [*around, *planned]
    if opened is not None and plan is not None and not any(check.status == "fail" for check in checks):
        checks += _preparation(case, opened)
    machine = "this machine" if case.here else case.hardware.name
    return Report(f"{case.args.model or 'any model'} on {machine}", (*checks, *kernel_lines), kernels)


def _host(case: Case, plan: ExecutionPlan | None, ranks: int, device: str) -> Iterator[Check]:
    if not case.here:
        yield from unchecked_host(ELSEWHERE)
        return
    address = case.serve_args.host, case.serve_args.port
    running = plan.max_num_seqs if plan is not None else case.args.max_num_seqs or SEQUENCES[device]
    host = read_host(address, {"engine": PACKAGES, "serve": case.packages})
    yield from host_checks(host, address, running + case.serve_args.max_num_queued_reqs, ranks, device)


def _devices(case: Case, device: str, ranks: int, driver: DriverFacts | None) -> Iterator[Check]:
    if device == "cuda" and not case.hardware.gpus:
        remedy = "leave out --device, or install the driver"
        yield Check("devices", "GPU", "fail", "--device cuda, and this machine shows none", remedy)
        return
    yield from device_checks(case.hardware, device, ranks, driver)


# --- the model ----------------------------------------------------------------------------------


def _open(case: Case) -> tuple[Opened | None, list[Check]]:
    """The model's headers, and the lines on its files; None when it can't be served at all."""
    args = case.args
    if not args.model:
        return None, []
    try:
        path = resolve_model(args.model, weights=False)
        from_hub = not Path(args.model).expanduser().exists() and HUB_NAME.fullmatch(args.model) is not None
        downloads = from_hub and path.is_dir() and not _is_complete(path)
        bare = path.is_dir() and (downloads or args.load_format == SYNTHETIC)
        checkpoint = Checkpoint.open(path / "config.json" if bare else path)
        report = checkpoint.report()
        report.require_supported()
    except PellucidError as error:
        return None, [Check("model", "files", "fail", str(error), "give another model, or what the line names")]
    size = _download_size(path) if downloads else None
    traits = report.traits
    if args.load_format == SYNTHETIC:
        traits, _ = settle(traits, unsaid_traits(checkpoint.config))
    opened = Opened(checkpoint, traits, report, downloads, size)
    return opened, [
        _files(case, opened),
        *_free_disk(case, opened),
        *_tokenizer(case, path, opened),
        *_conflicts(report),
    ]


def _is_complete(folder: Path) -> bool:
    """Whether every shard that the index names is here; without an index, whether any file of weights is."""
    shards = _index(folder).get("weight_map")
    if not isinstance(shards, dict):
        return any(folder.glob("*.safetensors"))
    return all((folder / str(name)).exists() for name in set(map(str, shards.values())))


def _download_size(folder: Path) -> int | None:
    """Bytes of weights, as the index of the shards says, less what is here already."""
    metadata = _index(folder).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    here = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return max(0, size - here) if isinstance(size, int) else None


def _index(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / INDEX_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _files(case: Case, opened: Opened) -> Check:
    checkpoint = opened.checkpoint
    if case.args.load_format == SYNTHETIC:
        return Check("model", "files", "ok", "a config; weights are drawn")
    if checkpoint.tensors:
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        return Check(
            "model", "files", "ok", f"{checkpoint.kind}, {len(checkpoint.tensors)} tensors, {format_bytes(size)}"
        )
    if opened.downloads:
        size_text = "" if opened.to_download is None else f", {format_bytes(opened.to_download)}"
        return Check("model", "files", "ok", f"config read; the first start downloads the weights{size_text}")
    if not case.here:
        return Check("model", "files", "not checked", f"a config alone; {ELSEWHERE}")
    remedy = "download the model's .safetensors files, or --load-format synthetic to try without"
    return Check("model", "files", "fail", f"{checkpoint.path}: a config without weights", remedy)


def _free_disk(case: Case, opened: Opened) -> Iterator[Check]:
    if not opened.downloads or opened.to_download is None or not case.here:
        return
    folder = read_folder(hub_folder(os.environ))
    free = folder.free_bytes or 0
    found = f"{format_bytes(free)} free in {folder.path}, {format_bytes(opened.to_download)} to download"
    if free > opened.to_download and folder.writable:
        yield Check("model", "disk", "ok", found)
    else:
        yield Check("model", "disk", "fail", found, "free some space, or set HF_HUB_CACHE to another disk")


def _tokenizer(case: Case, path: Path, opened: Opened) -> Iterator[Check]:
    if opened.downloads or (opened.checkpoint.kind == "config-only" and not case.here):
        return
    gguf = opened.checkpoint.gguf_metadata
    folder = path if path.is_dir() else path.parent
    there = "tokenizer.ggml.model" in gguf if gguf is not None else any((folder / n).exists() for n in TOKENIZER_FILES)
    if there:
        yield Check("model", "tokenizer", "ok", "there")
    else:
        remedy = f"put {' or '.join(TOKENIZER_FILES)} beside the weights"
        yield Check("model", "tokenizer", "warn", "none: requests must give token ids", remedy)


def _conflicts(report: TraitReport) -> Iterator[Check]:
    for line in report.conflicts:
        yield Check("model", "conflict", "warn", line, "the tensors were followed; correct the config")


# --- the plan -----------------------------------------------------------------------------------


def _plan(case: Case, opened: Opened) -> tuple[ExecutionPlan | None, list[Check]]:
    """The plan that a start would make, and its lines; None where a flag does not fit."""
    make = _resolver(case, opened)
    notes: tuple[str, ...] = ()
    try:
        plan = make({})
        if case.here and not plan.blockers:
            # What was measured here before is part of a start's plan; nothing is measured now.
            from pellucid.tuning.start import tune_plan

            tensors = opened.checkpoint.tensors
            tuned = tune_plan(case.args, opened.traits, case.hardware, make, tensors, measure=False)
            plan, notes = tuned.plan, tuple(dict.fromkeys(tuned.notes))
    except PellucidError as error:
        return None, [Check("plan", "flags", "fail", str(error), "change the flag that the line names")]
    return plan, list(plan_checks(plan, notes))


def _resolver(case: Case, opened: Opened) -> Callable[[Evidence], ExecutionPlan]:
    stored = stored_bytes(opened.checkpoint.tensors, opened.traits.num_layers)
    return partial(resolve, case.args, opened.traits, case.hardware, stored_bytes=stored)


# --- what the server itself does before it starts its engine ------------------------------------


def _preparation(case: Case, opened: Opened) -> Iterator[Check]:
    """The same steps as `serve`, up to where it would start a process: tokenizer, template, keys, parsers, plan."""
    if not case.here or opened.downloads:
        return
    from pellucid.server.launch import prepare

    try:
        prepare(case.args, case.serve_args)
    except PellucidError as error:
        yield Check("plan", "server", "fail", str(error), "what the line names")
    else:
        yield Check("plan", "server", "ok", "tokenizer, template, keys and parsers are ready")


# --- the kernels --------------------------------------------------------------------------------


def _kernels(
    case: Case,
    opened: Opened | None,
    plan: ExecutionPlan | None,
    checks: Sequence[Check],
    on_progress: Callable[[str], None] | None,
) -> tuple[tuple[KernelFigures, ...], list[Check]]:
    """What `--kernels` asks for, or why it was not run. Whether weights are there does not matter to it."""
    if not case.kernels:
        return (), []
    # A device that another program holds would be timed with it, and the figures kept.
    broken = [c.name for c in checks if c.status == "fail" and (c.group in ("host", "devices") or c.name == "free now")]
    broken = [name for name in dict.fromkeys(broken) if name != "port"]
    reason = ""
    if not case.here:
        reason = f"{ELSEWHERE}: run it there"
    elif broken:
        reason = f"not before {', '.join(broken)} above is mended"
    elif opened is None or plan is None:
        reason = "there is no plan: see what fails above"
    elif blocked := _blocked(case, opened):
        reason = f"nothing was measured: `serve` would not start, see {', '.join(blocked)} above"
    elif plan.tensor_parallel_size > 1:
        reason = f"{plan.tensor_parallel_size} ranks: this version measures the kernels of one alone"
    if opened is None or plan is None or reason:
        return (), [Check("kernels", "numeric gate, speed", "not checked", reason)]
    from pellucid.doctor.kernels import run_kernels

    return run_kernels(case.args, opened.traits, case.hardware, _resolver(case, opened), on_progress)


def _blocked(case: Case, opened: Opened) -> tuple[str, ...]:
    """Names of what keeps any start from this plan. What figures found wrong is none: these kernels are run again."""
    plan = _resolver(case, opened)({})
    return tuple(dict.fromkeys(blocker_name(plan, blocker) for blocker in plan.blockers))

"""Traces: runs an engine's decision code for a model on a simulated GPU, and says for each field what decided it.

Called by the CLI. The code runs in a child process (`sandbox`); what could not be run is read from the source instead
(`static`) and marked so. A field of which neither is sure is "unknown", with a note: never a guess.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pellucid.core import PellucidError
from pellucid.tracer.decide import decide
from pellucid.tracer.environment import Environment, environment_for
from pellucid.tracer.evidence import Evidencing, config_keys
from pellucid.tracer.gpus import SimulatedGPU
from pellucid.tracer.record import Decision, LogLine, Refusal, Site, Trace
from pellucid.tracer.roads import add_roads, unread
from pellucid.tracer.sandbox import child_folder, copy_model, run_child
from pellucid.tracer.sources import SourceTree

Progress = Callable[[str], None]
Depth = Literal["static", "configuration", "layers"]

_SECONDS_TO_START = 90.0
_PARALLEL_FLAGS = {"sglang": ("--tp-size", "--tp", "--tensor-parallel-size"), "vllm": ("--tensor-parallel-size", "-tp")}


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What to trace. `tensor_parallel` is the number of GPUs where it is None and no flag says it.

    `architecture` replaces the model's own name (the rename test). `environment` are variables that the engine sees;
    it sees no others. `seconds` bound one model in the child.
    """

    tree: SourceTree
    model: Path
    gpu: SimulatedGPU
    flags: tuple[str, ...] = ()
    tensor_parallel: int | None = None
    architecture: str | None = None
    depth: Depth = "layers"
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 60.0

    @property
    def all_flags(self) -> tuple[str, ...]:
        """The flags, with that of tensor parallelism first."""
        names = _PARALLEL_FLAGS[self.tree.engine]
        if any(flag.split("=")[0] in names for flag in self.flags):
            return self.flags
        return (names[0], str(self.tensor_parallel or self.gpu.count), *self.flags)


def trace(request: TraceRequest, progress: Progress | None = None) -> Trace:
    """What the engine would choose for one model. Raises PellucidError for a model or tree that can't be read."""
    return trace_many([request], progress)[0]


def trace_many(requests: Sequence[TraceRequest], progress: Progress | None = None) -> tuple[Trace, ...]:
    """Traces in the order of the requests; those of one tree, GPU and environment share a child that is warm."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        key = (
            request.tree.root,
            request.gpu,
            request.depth,
            request.seconds,
            tuple(sorted(request.environment.items())),
        )
        groups[key].append(index)
    found: dict[int, Trace] = {}
    for indices in groups.values():
        traced = _trace_group([requests[index] for index in indices], progress)
        found.update(zip(indices, traced, strict=True))
    return tuple(found[index] for index in range(len(requests)))


def _trace_group(requests: Sequence[TraceRequest], progress: Progress | None) -> list[Trace]:
    first = requests[0]
    if first.depth == "static":
        return [_read_only(request) for request in requests]
    environment = environment_for(first.tree, progress)
    started = time.perf_counter()
    with child_folder() as folder:
        runs: list[dict[str, Any]] = []
        notes: list[tuple[str, ...]] = []
        for index, request in enumerate(requests):
            # Engines read the folder's name too, so it stays what the user called it.
            target = folder / "models" / str(index) / request.model.resolve().name
            notes.append(copy_model(request.model, target, request.architecture))
            runs.append({"model": str(target), "flags": list(request.all_flags)})
        if progress is not None:
            progress(f"running {first.tree} for {len(runs)} model{'s' * (len(runs) > 1)} on {first.gpu}")
        outcomes = run_child(
            environment.python,
            folder,
            _child_request(first, folder, runs),
            seconds=_SECONDS_TO_START + first.seconds * len(runs),
            environment=first.environment,
        )
        wall = time.perf_counter() - started
        # The child saw a copy: its path means nothing to the user.
        shown = [
            json.loads(json.dumps(outcome).replace(run["model"], str(request.model)))
            for request, outcome, run in zip(requests, outcomes, runs, strict=True)
        ]
    return [
        _checked(request, environment, outcome, note, wall)
        for request, outcome, note in zip(requests, shown, notes, strict=True)
    ]


def _child_request(request: TraceRequest, folder: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    tree = request.tree
    return {
        "engine": tree.engine,
        "version": tree.version,
        "root": str(tree.root),
        "folder": str(folder),
        "pins": dict(tree.pins),
        "extension_modules": list(tree.extension_modules),
        "gpu": request.gpu.to_json(),
        "layers": request.depth == "layers",
        "runs": runs,
        "seconds": request.seconds,
    }


def _checked(
    request: TraceRequest, environment: Environment, outcome: Mapping[str, Any], notes: Iterable[str], wall: float
) -> Trace:
    """The trace; where the engine's code has written something else into the result, that is all that is told."""
    try:
        return _trace(request, environment, outcome, notes, wall)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        message = f"what the child process left is no result: {type(error).__name__}: {error}"
        return _trace(request, environment, {"refusal": {"message": message, "site": None, "ours": True}}, notes, wall)


def _trace(
    request: TraceRequest, environment: Environment, outcome: Mapping[str, Any], notes: Iterable[str], wall: float
) -> Trace:
    refusal = _refusal(outcome["refusal"])
    config = _config(request)
    fields = frozenset(outcome.get("defaults", {})) | frozenset(outcome.get("values", {}))
    evidencing = Evidencing(fields, config_keys(config))
    decisions, doubts = decide(outcome, evidencing, request.flags)
    if not decisions and refusal is not None and refusal.ours:
        decisions, doubts = _from_source(request, refusal)
    else:
        decisions, hidden = add_roads(decisions, request.tree, outcome, evidencing)
        doubts = (*doubts, *hidden)
    return Trace(
        **_head(request, config),
        decisions=decisions,
        log=tuple(LogLine(one["level"], one["text"], Site(**one["site"])) for one in outcome.get("log", ())),
        refusal=refusal,
        pins=dict(environment.packages),
        stubs=tuple(outcome.get("stubs", ())),
        notes=(*notes, *outcome.get("notes", ()), *doubts, *_loose(outcome)),
        seconds={**outcome.get("seconds", {}), "wall": wall},
    )


def _loose(outcome: Mapping[str, Any]) -> tuple[str, ...]:
    """What the kernel of this machine does not hold the child to: there, only the interpreter's hook did."""
    loose = [name for name in ("files", "network") if name not in outcome.get("held", ("files", "network"))]
    if not loose:
        return ()
    return (f"this kernel can't confine a process's {' and '.join(loose)}: native code of the engine was not held",)


def _read_only(request: TraceRequest) -> Trace:
    """The lines that could set each field, and nothing run. Raises PellucidError where the tree can't be read."""
    started = time.perf_counter()
    decisions, notes = unread(request.tree)
    return Trace(
        **_head(request, _config(request)),
        decisions=decisions,
        notes=(*notes, "nothing was run: these are the lines of the source that could set each field"),
        seconds={"wall": time.perf_counter() - started},
    )


def _from_source(request: TraceRequest, refusal: Refusal) -> tuple[tuple[Decision, ...], tuple[str, ...]]:
    """What the source alone tells where the code could not be run; nothing, where it can't be read either."""
    note = f"the engine's code could not be run ({refusal.message}): its source was read, and no value is known"
    try:
        decisions, notes = unread(request.tree)
    except PellucidError as error:
        return (), (note, str(error))
    return decisions, (note, *notes)


def _head(request: TraceRequest, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "engine": request.tree.engine,
        "version": request.tree.version,
        "model": request.model.resolve().name,
        "architecture": request.architecture or next(iter(config.get("architectures") or ()), ""),
        "gpu": str(request.gpu),
        "flags": request.all_flags,
    }


def _config(request: TraceRequest) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((request.model / "config.json").read_text(encoding="utf-8"))
    return values


def _refusal(raw: Mapping[str, Any] | None) -> Refusal | None:
    if raw is None:
        return None
    return Refusal(raw["message"], None if raw["site"] is None else Site(**raw["site"]), raw["ours"])

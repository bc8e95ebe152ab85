"""`pellucid trace diff`, `audit` and `grid`: what several traces say together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pellucid.cli.trace_options import (
    ENGINE,
    EPILOG,
    GPU_HELP,
    MODEL_HELP,
    Asked,
    complete_gpu,
    engine_argument,
    gpu_option,
    json_option,
    model_folders,
    shared_options,
    show,
    status,
    traced,
)
from pellucid.core import PellucidError

if TYPE_CHECKING:
    from pellucid.tracer.record import Trace

models_option = click.option(
    "--model", "models", multiple=True, required=True, metavar="FOLDER", help="Model, or folder of models; repeatable."
)


@click.command()
@click.option("--engine", "engines", multiple=True, metavar="ENGINE", help=f"Engine: {ENGINE}")
@click.option("--model", "models", multiple=True, metavar="FOLDER", help=MODEL_HELP)
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help=GPU_HELP, shell_complete=complete_gpu)
@click.option("--as", "architecture", metavar="NAME", help="Right: the same model under this architecture's name.")
@click.option(
    "--saved", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Trace from --json."
)
@json_option
@shared_options
def diff(
    engines: tuple[str, ...],
    models: tuple[str, ...],
    gpus: tuple[str, ...],
    architecture: str | None,
    saved: tuple[Path, ...],
    as_json: bool,
    **shared: Any,
) -> None:
    """Compare two traces: what differs, and where the paths part.

    Give --engine, --model and --gpu once where both sides have the same, twice (left, right) where they differ; or give
    --saved twice.
    """
    from pellucid.tracer.diff import diff as compare
    from pellucid.tracer.diff import render_diff

    if saved:
        if len(saved) != 2 or engines or models or gpus:
            raise click.UsageError("give --saved twice and nothing else to trace")
        left, right = (_read(path) for path in saved)
    else:
        left, right = _two_traces(engines, models, gpus, architecture, Asked(**shared))
    found = compare(left, right)
    show(json.dumps(found.to_json(), indent=2) if as_json else render_diff(found))


def _two_traces(
    engines: Sequence[str], models: Sequence[str], gpus: Sequence[str], architecture: str | None, asked: Asked
) -> tuple[Trace, Trace]:
    engine, other_engine = _pair("engine", engines)
    model, other_model = _pair("model", models)
    gpu, other_gpu = _pair("gpu", gpus or ("this",))
    if (engine, model, gpu) == (other_engine, other_model, other_gpu) and architecture is None:
        raise click.UsageError("both sides are the same: give --engine, --model or --gpu twice, or --as")
    with status() as progress:
        requests = [
            asked.request(engine, model, gpu, progress),
            asked.request(other_engine, other_model, other_gpu, progress, architecture),
        ]
        left, right = traced(requests, progress)
    return left, right


def _pair(name: str, values: Sequence[str]) -> tuple[str, str]:
    if not 1 <= len(values) <= 2:
        raise click.UsageError(f"give --{name} once or twice")
    return values[0], values[-1]


def _read(path: Path) -> Trace:
    from pellucid.tracer.record import trace_from_json

    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PellucidError(f"--saved {path}: can't be read as JSON: {error}") from None
    return trace_from_json(values)


@click.command(epilog=EPILOG)
@engine_argument
@models_option
@gpu_option
@json_option
@shared_options
def audit(engine: str, models: tuple[str, ...], gpu: str, as_json: bool, **shared: Any) -> None:
    """Find equal models that ENGINE treats unequally.

    Choices against the chosen kernel's own limits are listed too.
    """
    from pellucid.tracer.audit import audit as find
    from pellucid.tracer.audit import read_case, render_audit

    folders = model_folders(models)
    with status() as progress:
        requests = [Asked(**shared).request(engine, folder, gpu, progress) for folder in folders]
        traces = traced(requests, progress)
    cases = [read_case(folder, one) for folder, one in zip(folders, traces, strict=True)]
    machine = requests[0].gpu
    report = find(cases, machine.hardware(), requests[0].tensor_parallel or machine.count)
    show(json.dumps(asdict(report), indent=2) if as_json else render_audit(report))


@click.command()
@click.option("--engine", "engines", multiple=True, required=True, metavar="ENGINE", help=f"Engine: {ENGINE}")
@models_option
@click.option("--gpu", "gpus", multiple=True, required=True, metavar="NAME", help=GPU_HELP, shell_complete=complete_gpu)
@click.option("--field", "fields", multiple=True, metavar="NAME", help="Only this field; repeatable.")
@json_option
@shared_options
def grid(
    engines: tuple[str, ...],
    models: tuple[str, ...],
    gpus: tuple[str, ...],
    fields: tuple[str, ...],
    as_json: bool,
    **shared: Any,
) -> None:
    """Tabulate each field: models down, GPUs across.

    Without --field, the fields that differ anywhere.
    """
    from pellucid.tracer.grid import arrange, render_grid

    folders = model_folders(models)
    with status() as progress:
        requests = [
            Asked(**shared).request(engine, folder, gpu, progress)
            for engine in engines
            for folder in folders
            for gpu in gpus
        ]
        found = arrange(traced(requests, progress))
    show(json.dumps(found.to_json(), indent=2) if as_json else render_grid(found, fields))

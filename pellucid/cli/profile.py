"""`pellucid profile`: what the GPU does in a decode step, kernel by kernel, beside what it must do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pellucid.bench.outputs import writable
from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.targets import whole_numbers
from pellucid.core import PellucidError


@click.command()
@click.argument("model", type=click.Path())
@click.option(
    "--concurrency", default="1", show_default=True, callback=whole_numbers, help="Sequences decoded at a time."
)
@click.option("--input-tokens", default=512, show_default=True, type=click.IntRange(1), help="Of each prompt.")
@click.option("--steps", default=32, show_default=True, type=click.IntRange(1), help="Decode steps to record.")
@click.option(
    "--svg",
    type=click.Path(path_type=Path),
    callback=writable,
    help="Draw the steps as stacked bars into this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@engine_options
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    model: str,
    *,
    concurrency: tuple[int, ...],
    input_tokens: int,
    steps: int,
    svg: Path | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Record steady decode steps of MODEL, and show where their time goes by kind of kernel. Needs a CUDA device."""
    from pellucid.bench import profile as bench
    from pellucid.bench.idle import leave, record_decode
    from pellucid.bench.offline import Load, sized, window_tokens
    from pellucid.bench.provenance import provenance
    from pellucid.cli.loading import load_llm
    from pellucid.hardware.probe import probe

    args = engine_args(ctx, model)
    if args.device == "cpu" or not probe().gpus:
        raise PellucidError("`pellucid profile` records GPU kernels and needs a CUDA device; on a CPU, use perf")
    load = Load(concurrency, input_tokens, 2)
    load = replace(load, output_tokens=window_tokens(load, steps))
    engine = load_llm(sized(args, load), "ids").engine
    found = []
    for sequences in concurrency:
        window = record_decode(engine, sequences, input_tokens, steps)
        found.append(bench.profile_of(window, bench.floor_of(engine, sequences, input_tokens + steps // 2)))
        if not as_json:
            click.echo(bench.render(found[-1]))
    if svg is not None:
        svg.write_text(bench.bar_svg(found, f"{engine.path.name}: a decode step by kind of kernel"))
    if as_json:
        record = {"machine": list(engine.plan.hardware), "profiles": [one.to_json() for one in found]}
        click.echo(json.dumps({**provenance("pellucid.cli"), "model": engine.path.name, **record}))
    leave()

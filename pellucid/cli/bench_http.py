"""`pellucid bench http`: the speed of a model over HTTP, beside that of the engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pellucid.cli.bench_offline import load_options
from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.serve import check_serve_installed


@click.command()
@click.argument("model", type=click.Path())
@load_options
@engine_options
@click.pass_context
def http(
    ctx: click.Context,
    /,
    model: str,
    *,
    concurrency: tuple[int, ...],
    input_tokens: int,
    output_tokens: int,
    repetitions: int,
    save: Path | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Speed of MODEL through `pellucid serve` and streams, beside `bench offline` in a process of its own before it.

    Needs no weights with --load-format synthetic. The last line of standard output is one JSON object.
    """
    check_serve_installed()
    from pellucid.bench import http as bench
    from pellucid.bench.offline import Load
    from pellucid.bench.provenance import save as append

    load = Load(concurrency, input_tokens, output_tokens, repetitions)
    record = bench.measure(model, engine_args(ctx, model), load, (lambda _: None) if as_json else click.echo)
    click.echo(append(record, save))

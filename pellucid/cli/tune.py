"""`pellucid tune`: measures every choice for a model on this machine, prints the tables, and keeps them for later."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import click

from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.core import PellucidError


@click.command()
@click.argument("model", type=click.Path())
@engine_options
@click.pass_context
def tune(ctx: click.Context, /, model: str, **_: Any) -> None:
    """Measure what is fastest for MODEL here, each candidate at each batch size, and keep it for the next starts.

    Weights are drawn where their format can be, so that a config.json is enough with --load-format synthetic. Takes up
    to --measure-seconds, ten minutes by default. --measure cached measures only what is not known yet.
    """
    from pellucid.engine.startup import make_plan, open_model
    from pellucid.selection.explain import table_lines
    from pellucid.selection.view import TABLE_LEGEND, rows
    from pellucid.tuning.start import FULL_SECONDS
    from pellucid.utils.progress import StatusLine

    args = engine_args(ctx, model)
    if args.measure == "off":
        raise PellucidError("--measure off: there is nothing to tune then; leave it out")
    # What was found, what there was no time for, and where it is kept.
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    args = replace(args, measure=args.measure or "full", measure_seconds=args.measure_seconds or FULL_SECONDS)
    status = StatusLine("measuring")
    try:
        plan = make_plan(args, open_model(args.model, args.load_format), measure=True, on_progress=status.update)
    finally:
        status.close()
    measured = [(row, row.table) for row in rows(plan.decisions) if row.table is not None]
    for row, table in measured:
        click.echo(f"{row.title}  {row.value}")
        click.echo("\n".join(f"  {line}" for line in table_lines(table)))
    click.echo(TABLE_LEGEND if measured else "nothing was worth so few seconds; --measure full asks all")

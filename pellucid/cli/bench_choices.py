"""`pellucid bench choices`: steps under the measured plan, the default, and every plan of one backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pellucid.bench.outputs import save_option
from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.targets import CONCURRENCY, whole_numbers
from pellucid.core import PellucidError


@click.command()
@click.argument("model", type=click.Path())
@click.option(
    "--concurrency", default=CONCURRENCY, show_default=True, callback=whole_numbers, help="Rows of decode steps."
)
@click.option(
    "--prompt-tokens", default="512,4096", show_default=True, callback=whole_numbers, help="Rows of prefill steps."
)
@save_option
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON line.")
@engine_options
@click.pass_context
def choices(
    ctx: click.Context,
    /,
    model: str,
    *,
    concurrency: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    save: Path | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Whether the plan that was measured for MODEL here is as fast as every plan of one backend, step by step.

    Run `pellucid tune MODEL` with the same flags first; nothing is measured anew here but those steps. The last line
    of standard output is one JSON object.
    """
    from pellucid.bench import choices as bench
    from pellucid.bench.provenance import save as append
    from pellucid.engine.startup import make_plan, open_model

    args = engine_args(ctx, model)
    if args.measure is not None:
        raise PellucidError(f"--measure {args.measure}: here what was measured before is compared; leave it out")
    if args.measure_seconds is not None:
        raise PellucidError("--measure-seconds: nothing is measured here but the steps compared; leave it out")
    files = open_model(args.model, args.load_format)
    measured, default = make_plan(args, files), make_plan(replace(args, measure="off"), files)
    # Sizes that nobody typed are those that the plan has.
    typed = {*concurrency, *prompt_tokens}
    if ctx.get_parameter_source("concurrency") is ParameterSource.DEFAULT:
        concurrency = tuple(rows for rows in concurrency if rows <= default.max_num_seqs)
    if ctx.get_parameter_source("prompt_tokens") is ParameterSource.DEFAULT:
        prompt_tokens = tuple(rows for rows in prompt_tokens if rows <= default.max_num_batched_tokens)
    missing = sorted(typed - {*concurrency, *prompt_tokens})
    if missing and not as_json:
        beyond = f"--max-num-seqs {default.max_num_seqs}, --max-num-batched-tokens {default.max_num_batched_tokens}"
        click.echo(f"left out: {', '.join(map(str, missing))}, beyond {beyond}")
    if not any(decision.how == "measured" for decision in measured.decisions):
        raise PellucidError(f"{model}: nothing was measured here with these flags; run `pellucid tune` first")
    record = bench.compare_plans(
        measured,
        default,
        files.traits,
        files.checkpoint.tensors,
        {"decode": concurrency, "prefill": prompt_tokens},
        (lambda _: None) if as_json else click.echo,
    )
    click.echo(append({**record, "model": Path(model).name}, save))

"""`pellucid bench offline`: the speed of a model on this machine, in this process, beside its floor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from pellucid.bench.outputs import save_option
from pellucid.cli.engine_options import F, engine_args, engine_options
from pellucid.cli.targets import CONCURRENCY, whole_numbers

LOAD_OPTIONS = (
    click.option(
        "--concurrency",
        default=CONCURRENCY,
        show_default=True,
        callback=whole_numbers,
        help="Sequences decoded at a time.",
    ),
    click.option("--input-tokens", default=512, show_default=True, type=click.IntRange(1), help="Of each prompt."),
    click.option("--output-tokens", default=256, show_default=True, type=click.IntRange(2), help="Of each sequence."),
    click.option(
        "--repetitions",
        default=2,
        show_default=True,
        type=click.IntRange(2),
        help="Of each concurrency; medians are shown.",
    ),
    save_option,
    click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON line."),
)


def load_options(command: F) -> F:
    """Adds what is measured and where its figures go: the same for every bench of a model's decoding."""
    for option in reversed(LOAD_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("model", type=click.Path())
@load_options
@engine_options
@click.pass_context
def offline(
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
    """Decode, prefill and end-to-end speed of MODEL in this process, each beside the floor measured in the same run.

    Needs no weights with --load-format synthetic. The last line of standard output is one JSON object.
    """
    from pellucid.bench import offline as bench
    from pellucid.bench.idle import leave
    from pellucid.bench.provenance import save as append
    from pellucid.cli.loading import load_llm

    load = bench.Load(concurrency, input_tokens, output_tokens, repetitions)
    began = time.monotonic()
    llm = load_llm(bench.sized(engine_args(ctx, model), load), "ids")
    ready = time.monotonic() - began
    if not as_json:
        click.echo(f"ready after {ready:.1f} s")
    record = bench.measure(llm.engine, load, (lambda _: None) if as_json else click.echo) | {"ready_s": ready}
    line = append(record, save)
    click.echo(line)
    if llm.plan.device == "cuda":
        leave()

"""`pellucid bench kernels`: each launch of a fused decode step alone, against its bytes and the library."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from pellucid.bench.outputs import save_option
from pellucid.cli.engine_options import engine_args, engine_options
from pellucid.cli.targets import CONCURRENCY, whole_numbers
from pellucid.core import PellucidError


@click.command()
@click.argument("model", type=click.Path())
@click.option("--rows", default=CONCURRENCY, show_default=True, callback=whole_numbers, help="Sequences in the step.")
@click.option("--context", default=640, show_default=True, type=click.IntRange(1), help="Tokens of each sequence.")
@save_option
@engine_options
@click.pass_context
def kernels(
    ctx: click.Context, /, model: str, *, rows: tuple[int, ...], context: int, save: Path | None, **_: Any
) -> None:
    """Each kind of launch of a fused decode step of MODEL, alone: its time, its bytes' floor, the library's time.

    Needs a CUDA device, and no weights with --load-format synthetic. The last line is one JSON object.
    """
    from pellucid.bench.bandwidth import measure_speeds
    from pellucid.bench.kernels import measure_kernels
    from pellucid.bench.provenance import provenance
    from pellucid.bench.provenance import save as append
    from pellucid.cli.loading import load_llm
    from pellucid.runner.gpu_runner import GPURunner

    args = engine_args(ctx, model)
    args = replace(args, max_num_seqs=max(rows), max_model_len=args.max_model_len or context + 64)
    llm = load_llm(args, "ids")
    runner, plan = llm.engine.runner, llm.plan
    if not isinstance(runner, GPURunner):
        why = "; ".join(plan.decision("decode_path").because)
        raise PellucidError(f"the decode path of this plan is {plan.decode_path}, not fused: {why}")
    speeds = measure_speeds(runner.device, runner.model.norm.weight.dtype).speeds()
    click.echo(f"read bandwidth measured now: {speeds.read_bandwidth / 1e12:.2f} TB/s; {context} tokens of context")
    found = []
    for count in rows:
        click.echo(
            f"\n{f'{count} rows':26} {'':>6} {'MB':>9} {'floor us':>9} {'us':>9} {'+-':>6} {'share':>6} {'library':>9}"
        )
        times = measure_kernels(runner, count, context, speeds.read_bandwidth)
        for one in times:
            library = "" if one.library_us is None else f"{one.library_us:9.2f}"
            click.echo(
                f"{one.name:26} {one.launches:>6} {one.megabytes:>9.2f} {one.floor_us:>9.2f} {one.us:>9.2f} "
                f"{one.spread_us:>6.2f} {one.share:>6.2f} {library}"
            )
        total, floor = sum(t.launches * t.us for t in times), sum(t.launches * t.floor_us for t in times)
        click.echo(
            f"{'all, launched apart':26} {'':>6} {'':>9} {floor:>9.1f} {total:>9.1f} {'':>6} {floor / total:>6.2f}"
        )
        found += [asdict(one) | {"share": one.share} for one in times]
    record = {"bench": "kernels", "model": model, "context": context, "read_bandwidth": speeds.read_bandwidth}
    click.echo(append(record | {"kernels": found, "provenance": provenance("pellucid.cli")}, save))

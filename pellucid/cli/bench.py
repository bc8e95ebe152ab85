"""`pellucid bench`: measurements, and the limits that they are measured against. One subcommand each."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pellucid.cli.bench_choices import choices
from pellucid.cli.bench_http import http
from pellucid.cli.bench_kernels import kernels
from pellucid.cli.bench_offline import offline
from pellucid.cli.targets import CONCURRENCY, hardware_option, local_path, whole_numbers
from pellucid.core import PellucidError

if TYPE_CHECKING:
    from pellucid.bench.roofline import StepFloor


@click.group()
def bench() -> None:
    """Measure speed, always beside the limit that the hardware sets."""


bench.add_command(choices)
bench.add_command(http)
bench.add_command(kernels)
bench.add_command(offline)


@bench.command()
@click.argument("model", type=click.Path())
@hardware_option
@click.option(
    "--concurrency", default=CONCURRENCY, show_default=True, callback=whole_numbers, help="Sequences decoded at a time."
)
@click.option("--context", default=1024, show_default=True, type=click.IntRange(1), help="Tokens of each sequence.")
@click.option("--tensor-parallel-size", "-tp", type=click.IntRange(1), help="GPUs; all of the machine's by default.")
@click.option(
    "--kv-cache-dtype",
    default="bf16",
    show_default=True,
    type=click.Choice(("bf16", "fp16", "fp32", "fp8")),
    help="Of the KV cache.",
)
@click.option(
    "--bandwidth", type=click.FloatRange(0, min_open=True), help="TB/s that a GPU reads, instead of the known."
)
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="Dense bf16 TFLOP/s, instead of the known.")
@click.option("--ops", is_flag=True, help="The work of a step by kind, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def roofline(
    model: str,
    hardware: str,
    concurrency: tuple[int, ...],
    context: int,
    tensor_parallel_size: int | None,
    kv_cache_dtype: str,
    bandwidth: float | None,
    tflops: float | None,
    ops: bool,
    as_json: bool,
) -> None:
    """The fastest that decoding MODEL can be on a machine, from the bytes and operations of a step. Needs no GPU."""
    from pellucid.bench.roofline import machine_speeds, step_floor
    from pellucid.hardware import load_hardware
    from pellucid.models.checkpoint import Checkpoint

    report = Checkpoint.open(local_path(model)).report()
    report.require_supported()
    machine = load_hardware(hardware)
    speeds = machine_speeds(
        machine, None if bandwidth is None else bandwidth * 1e12, None if tflops is None else tflops * 1e12
    )
    ranks = tensor_parallel_size or max(1, len(machine.gpus))
    if machine.gpus and ranks > len(machine.gpus):
        raise PellucidError(f"--tensor-parallel-size {ranks}: {machine.name} has {len(machine.gpus)} GPUs")
    floors = [
        step_floor(
            report.traits,
            speeds,
            batch=batch,
            context=context,
            ranks=ranks,
            kv_dtype=kv_cache_dtype,
            link=machine.link,
        )
        for batch in concurrency
    ]
    if as_json:
        click.echo(json.dumps({"machine": machine.name, "ranks": ranks, "floors": [_plain(floor) for floor in floors]}))
        return
    click.echo(f"{machine.describe()}; {ranks} rank{'s' if ranks > 1 else ''}, {context} tokens of context")
    rate = f"{speeds.read_bandwidth / 1e12:.2f} TB/s and {speeds.matrix_flops / 1e12:.0f} TFLOP/s"
    click.echo(f"{rate} a GPU: {speeds.source}")
    _table(floors)
    if ops:
        for floor in floors:
            _ops_table(floor)


def _table(floors: list[StepFloor]) -> None:
    experts, reduces = floors[0].distinct_experts is not None, floors[0].all_reduce is not None
    head = f"{'C':>4} {'GB read':>9} {'GFLOP':>9} {'floor ms':>9}"
    head += (" " + f"{'experts':>8}" if experts else "") + (f" {'all-reduce ms':>14}" if reduces else "")
    click.echo(head + f" {'tokens/s':>10} {'each':>8}")
    for floor in floors:
        line = f"{floor.batch:>4} {floor.num_bytes / 1e9:>9.2f} {floor.flops / 1e9:>9.1f} {floor.seconds * 1e3:>9.3f}"
        line += f" {floor.distinct_experts:>8.1f}" if floor.distinct_experts is not None else ""
        line += f" {floor.all_reduce_seconds * 1e3:>14.3f}" if reduces else ""
        click.echo(line + f" {floor.tokens_per_second:>10.0f} {floor.tokens_per_second / floor.batch:>8.1f}")
    if experts:
        click.echo("experts: distinct ones a layer, if every token chose at random; fewer in practice, and then faster")
    if reduces:
        named = dict.fromkeys(floor.all_reduce.algorithm for floor in floors if floor.all_reduce)
        click.echo(f"all-reduce: a model of {' and '.join(named)} over these links, not a limit; it is in tokens/s")


def _ops_table(floor: StepFloor) -> None:
    click.echo(f"\nC={floor.batch}: per layer")
    click.echo(f"{'':26} {'layers':>6} {'MB':>10} {'us':>9} {'share':>7}")
    for op in floor.ops:
        seconds = op.seconds(floor.speeds)
        bound = "" if op.num_bytes / floor.speeds.read_bandwidth >= op.flops / floor.speeds.matrix_flops else "  FLOP"
        click.echo(
            f"{op.name:26} {op.layers:>6} {op.num_bytes / 1e6:>10.2f} {seconds / op.layers * 1e6:>9.2f} "
            f"{seconds / floor.seconds:>7.1%}{bound}"
        )


def _plain(floor: StepFloor) -> dict[str, Any]:
    return asdict(floor) | {
        "bytes": floor.num_bytes,
        "flops": floor.flops,
        "seconds": floor.seconds,
        "all_reduce_seconds": floor.all_reduce_seconds,
        "tokens_per_second": floor.tokens_per_second,
    }

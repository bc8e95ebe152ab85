"""`python -m pellucid.bench.server`: what the server itself costs, measured with an engine that takes no time.

Two figures: chunks a second that 128 streams get at most, one chunk a token; and at a given rate, how long after the
engine has a token its chunk is in the client's hands, with 128 streams in lockstep (the worst case: 128 tokens at once)
and with a quarter of them. Server, engine and client share the machine's cores.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from pellucid import __version__
from pellucid.bench.outputs import save_option
from pellucid.bench.provenance import provenance, spread
from pellucid.bench.provenance import save as append
from pellucid.bench.streams import (
    Stream,
    cpu_seconds,
    free_port,
    percentile,
    post,
    read_streams,
    running_server,
)
from pellucid.bench.stub_engine import MAX_STEPS, STAMP, step_tokens
from pellucid.core import PellucidError

CONTENT = re.compile(rb'"content":"([A-Za-z0-9]+)"')
START_TIMEOUT_S = 60


def chat_request(tokens: int) -> bytes:
    """A streamed chat of so many tokens."""
    messages = [{"role": "user", "content": "hi"}]
    return post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    )


def throughput(received: Sequence[Stream], tokens: int) -> float:
    """Token chunks per second, from the first to the last. Raises PellucidError when any is missing."""
    counts = [sum(len(CONTENT.findall(data)) for _, data in stream.whole()) for stream in received]
    if any(count != tokens for count in counts):
        raise PellucidError(f"streams of {tokens} tokens gave {min(counts)} to {max(counts)} chunks; the run is void")
    first = min(stream.reads[0][0] for stream in received)
    last = max(stream.reads[-1][0] for stream in received)
    return sum(counts) / (last - first)


def latencies(received: Sequence[Stream], stamps: list[float], step_of: dict[bytes, int]) -> list[float]:
    """Seconds from the end of the engine's step to the chunk in the client's hands.

    Counted are the tokens of steps in which every stream ran: before them, requests still arrive all at once.
    """
    arrivals = [
        [(step_of[text], when) for when, data in stream.whole() for text in CONTENT.findall(data)]
        for stream in received
    ]
    first = max(stream[0][0] for stream in arrivals)
    last = min(stream[-1][0] for stream in arrivals)
    return [when - stamps[step] for stream in arrivals for step, when in stream if first <= step <= last]


@contextmanager
def stub_server(model: str, *stub_arguments: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server on a stub engine."""
    port = free_port()
    command = (sys.executable, "-m", "pellucid.bench.stub_engine", *stub_arguments)
    code = (
        "import sys; from pellucid.server.launch import serve; from pellucid.server.args import ServeArgs;"
        "from pellucid.selection.args import EngineArgs;"
        f"serve(EngineArgs(model={model!r}), ServeArgs(port={port}, log_level='warning'), {command!r})"
    )
    with running_server((sys.executable, "-c", code), port, START_TIMEOUT_S) as pid:
        yield port, pid


def measure_latency(model: str, streams: int, rate: float, runs: int) -> dict[str, dict[str, float]]:
    """What the server adds at `rate` tokens a second: a step of `streams` tokens at once, and a pause.

    Milliseconds, the median over all tokens of a run and the 99th percentile; each with its spread over runs. With
    many streams a step's tokens stand in line, so both grow with `streams` at the same rate.
    """
    from pellucid.engine.inputs import load_tokenizer
    from pellucid.engine.startup import open_model

    tokenizer = load_tokenizer(open_model(model).checkpoint)
    assert tokenizer is not None
    step_of = {text.encode(): step for step, (_, text) in enumerate(step_tokens(tokenizer))}
    p50, p99 = [], []
    count = min(200, MAX_STEPS // (runs + 2))
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(MAX_STEPS * STAMP.size)
        with stub_server(model, "--step-s", str(streams / rate), "--stamps", file.name) as (port, _):
            for _ in range(runs):
                received = read_streams(port, [chat_request(count)] * streams)
                stamps = [value for (value,) in STAMP.iter_unpack(Path(file.name).read_bytes())]
                found = latencies(received, stamps, step_of)
                p50.append(percentile(found, 0.5) * 1e3)
                p99.append(percentile(found, 0.99) * 1e3)
    return {"p50": spread(p50, 2), "p99": spread(p99, 2)}


@click.command()
@click.option("--model", default="smollm2", help="Whose tokenizer and chat template are used; no weights are read.")
@click.option("--streams", default=128)
@click.option("--tokens", default=500, help="Tokens of each stream when measuring the most.")
@click.option("--rate", default=2000.0, help="Tokens a second when measuring the latency.")
@click.option("--runs", default=5)
@save_option
def main(model: str, streams: int, tokens: int, rate: float, runs: int, save: Path | None) -> None:
    """Measure, and print one JSON line."""
    rates, costs = [], []
    with stub_server(model) as (port, pid):
        read_streams(port, [chat_request(20)] * streams)
        for _ in range(runs):
            before = cpu_seconds(pid)
            rates.append(throughput(read_streams(port, [chat_request(tokens)] * streams), tokens))
            costs.append((cpu_seconds(pid) - before) / (streams * tokens))
    added = {str(count): measure_latency(model, count, rate, runs) for count in (streams // 4, streams)}
    result = {
        "bench": "server",
        "version": __version__,
        **provenance("pellucid.bench.server"),
        "cores": os.cpu_count(),
        "streams": streams,
        "runs": runs,
        "streamed_tokens_per_s": spread(rates, 0),
        "api_cpu_us_per_token": spread([cost * 1e6 for cost in costs], 1),
        "rate_tokens_per_s": rate,
        "added_latency_ms_by_streams": added,
    }
    click.echo(append(result, save))


if __name__ == "__main__":
    try:
        main()
    except PellucidError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)

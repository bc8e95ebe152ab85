"""`python -m pellucid.bench.server`: what the server itself costs, measured with an engine that takes no time.

Two figures: chunks a second that 128 streams get at most, one chunk a token; and at a given rate, how long after the
engine has a token its chunk is in the client's hands, with 128 streams in lockstep (the worst case: 128 tokens at once)
and with a quarter of them. Server, engine and client share the machine's cores.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pellucid import __version__
from pellucid.bench.provenance import provenance, save, spread
from pellucid.bench.stub_engine import MAX_STEPS, STAMP, step_tokens
from pellucid.core import PellucidError

CONTENT = re.compile(rb'"content":"([A-Za-z0-9]+)"')
START_TIMEOUT_S = 60


class Load:
    """Streams of one run, read as they come by one thread that does as little as it can."""

    def __init__(self, port: int, streams: int, tokens: int) -> None:
        self._port, self._streams, self._tokens = port, streams, tokens

    def run(self) -> list[list[tuple[float, bytes]]]:
        """For each stream, (monotonic time, bytes) of everything read."""
        selector = selectors.DefaultSelector()
        received: list[list[tuple[float, bytes]]] = []
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"  # noqa: E501
        for index in range(self._streams):
            connection = socket.create_connection(("127.0.0.1", self._port))
            connection.sendall(head.encode() + body)
            connection.setblocking(False)
            received.append([])
            selector.register(connection, selectors.EVENT_READ, index)
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 18)
                if data:
                    received[key.data].append((time.monotonic(), data))
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        return received


def throughput(received: list[list[tuple[float, bytes]]], tokens: int) -> float:
    """Token chunks per second, from the first to the last. Raises PellucidError when any is missing."""
    counts = [sum(len(CONTENT.findall(data)) for _, data in _whole(stream)) for stream in received]
    if any(count != tokens for count in counts):
        raise PellucidError(f"streams of {tokens} tokens gave {min(counts)} to {max(counts)} chunks; the run is void")
    first = min(stream[0][0] for stream in received)
    last = max(stream[-1][0] for stream in received)
    return sum(counts) / (last - first)


def latencies(received: list[list[tuple[float, bytes]]], stamps: list[float], step_of: dict[bytes, int]) -> list[float]:
    """Seconds from the end of the engine's step to the chunk in the client's hands.

    Counted are the tokens of steps in which every stream ran: before them, requests still arrive all at once.
    """
    arrivals = [
        [(step_of[text], when) for when, data in _whole(stream) for text in CONTENT.findall(data)]
        for stream in received
    ]
    first = max(stream[0][0] for stream in arrivals)
    last = min(stream[-1][0] for stream in arrivals)
    return [when - stamps[step] for stream in arrivals for step, when in stream if first <= step <= last]


def _whole(stream: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The reads, cut where events end: a chunk counts when its last byte is there."""
    rest = b""
    for when, data in stream:
        whole, separator, rest = (rest + data).rpartition(b"\n\n")
        yield when, whole + separator
    yield stream[-1][0], rest


@contextmanager
def stub_server(model: str, *stub_arguments: str) -> Iterator[tuple[int, int]]:
    """(port, process id) of a server on a stub engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (sys.executable, "-m", "pellucid.bench.stub_engine", *stub_arguments)
    code = (
        "import sys; from pellucid.server.launch import serve; from pellucid.server.args import ServeArgs;"
        "from pellucid.selection.args import EngineArgs;"
        f"serve(EngineArgs(model={model!r}), ServeArgs(port={port}, log_level='warning'), {command!r})"
    )
    server = subprocess.Popen([sys.executable, "-c", code])
    try:
        _wait_ready(server, port)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait()


def _wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise PellucidError("the server on the stub engine did not get ready; its log is above")


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
                received = Load(port, streams, count).run()
                stamps = [value for (value,) in STAMP.iter_unpack(Path(file.name).read_bytes())]
                found = sorted(latencies(received, stamps, step_of))
                p50.append(found[len(found) // 2] * 1e3)
                p99.append(found[int(len(found) * 0.99)] * 1e3)
    return {"p50": spread(p50, 2), "p99": spread(p99, 2)}


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used so far."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


@click.command()
@click.option("--model", default="smollm2", help="Whose tokenizer and chat template are used; no weights are read.")
@click.option("--streams", default=128)
@click.option("--tokens", default=500, help="Tokens of each stream when measuring the most.")
@click.option("--rate", default=2000.0, help="Tokens a second when measuring the latency.")
@click.option("--runs", default=5)
@click.option("--save", "out", type=click.Path(path_type=Path), help="Append the result to this JSONL file.")
def main(model: str, streams: int, tokens: int, rate: float, runs: int, out: Path | None) -> None:
    """Measure, and print one JSON line."""
    rates, costs = [], []
    with stub_server(model) as (port, pid):
        Load(port, streams, 20).run()
        for _ in range(runs):
            before = cpu_seconds(pid)
            rates.append(throughput(Load(port, streams, tokens).run(), tokens))
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
    click.echo(save(result, out))


if __name__ == "__main__":
    main()

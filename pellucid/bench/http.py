"""Speed over HTTP beside the engine's own: a real `pellucid serve` and streams read from it by one thread.

Called by `pellucid bench http`. The engine is measured first, by `pellucid bench offline` in a process of its own; then
the server gets the same flags and prompts. Server, engine and client share the machine's cores.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pellucid import __version__
from pellucid.bench.idle import random_prompts
from pellucid.bench.offline import Load, Report, repetitiveness, sized
from pellucid.bench.provenance import provenance, spread
from pellucid.bench.streams import (
    Stream,
    cpu_seconds,
    free_port,
    percentile,
    post,
    read_streams,
    running_server,
)
from pellucid.core import PellucidError
from pellucid.engine.inputs import load_tokenizer
from pellucid.engine.startup import open_model
from pellucid.selection.args import SYNTHETIC, EngineArgs

START_TIMEOUT_S = 1800.0

BUSY = 0.9
"""A client that computes for more of a run than this may be what was measured."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream's events. A chunk is an event with a choice; `times` are when each was whole, in monotonic seconds.

    `completion_tokens` and `cached_tokens` are the server's own count, None when the stream broke off before it.
    """

    sent: float
    times: tuple[float, ...]
    texts: tuple[str, ...]
    completion_tokens: int | None
    cached_tokens: int

    @classmethod
    def of(cls, stream: Stream) -> Answer:
        """Raises PellucidError for an answer that is no stream, or one that ends in an error."""
        if not stream.reads or not stream.reads[0][1].startswith(b"HTTP/1.1 200 "):
            said = b"".join(data for _, data in stream.reads).decode(errors="replace")
            raise PellucidError(f"the server answered with {said[-500:] or 'nothing'}")
        times, texts, tokens, cached = [], [], None, 0
        for when, data in stream.whole():
            for line in data.splitlines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise PellucidError(f"a stream ended in an error: {event['error']['message']}")
                if event["choices"]:
                    times.append(when)
                    texts.append(event["choices"][0]["text"])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cls(stream.sent, tuple(times), tuple(texts), tokens, cached)


@dataclass(frozen=True, slots=True)
class Run:
    """All streams of one repetition. `cpu_s` is the API process's, `client_busy` this process's share of the time."""

    answers: tuple[Answer, ...]
    cpu_s: float = 0.0
    client_busy: float = 0.0

    @property
    def first_s(self) -> float:
        """From the first request until every stream has a chunk."""
        return max(answer.times[0] for answer in self.answers) - self._begin

    @property
    def total_s(self) -> float:
        """From the first request to the last chunk."""
        return max(answer.times[-1] for answer in self.answers) - self._begin

    @property
    def _begin(self) -> float:
        return min(answer.sent for answer in self.answers)

    def tokens_per_s(self, output_tokens: int) -> float:
        """Streams * (output tokens - 1) / (total - first): what `bench offline` calls decode, by the same formula."""
        return len(self.answers) * (output_tokens - 1) / (self.total_s - self.first_s)

    def ttft_s(self) -> list[float]:
        """Each stream's time to its first chunk."""
        return [answer.times[0] - answer.sent for answer in self.answers]

    def inter_token_s(self) -> list[float]:
        """Every time between two chunks of one stream; tokens that came together have none between them."""
        return [after - before for answer in self.answers for before, after in pairwise(answer.times)]

    def chunks(self) -> int:
        return sum(len(answer.times) for answer in self.answers)

    def invalid(self, output_tokens: int, *, spelled: bool) -> list[str]:
        """Why its figures count for nothing. `spelled`: every token has a text, so each must have its chunk."""
        reasons = []
        wrong = sum(answer.completion_tokens != output_tokens for answer in self.answers)
        if wrong:
            reasons.append(f"{wrong} of {len(self.answers)} streams did not end with {output_tokens} tokens")
        missing = len(self.answers) * output_tokens - self.chunks()
        if spelled and missing:
            reasons.append(f"{missing} chunks are missing: not every token had one of its own")
        cached = sum(answer.cached_tokens for answer in self.answers)
        if cached:
            reasons.append(f"{cached} prompt tokens came from the prefix cache")
        if self.client_busy > BUSY:
            reasons.append(f"this client computed for {self.client_busy:.0%} of the time: it may be what was measured")
        return reasons + repetitiveness([answer.texts for answer in self.answers])


def measure(model: str, args: EngineArgs, load: Load, report: Report) -> dict[str, Any]:
    """Every cell of the load: the engine alone, then the server. `report` gets a line for people at a time.

    Raises:
        PellucidError: a process did not start, or a stream was refused or ended in an error.
    """
    args = sized(args, load)
    with servable(model, args.load_format) as served:
        report("the engine alone:")
        engine = measure_engine(model, args, load, report)
        alone = {cell["concurrency"]: cell for cell in engine["cells"]}
        report("over HTTP:")
        port = free_port()
        command = [sys.executable, "-m", "pellucid", "serve", served.model, *args.command_line()]
        command += ["--port", str(port), "--log-level", "warning"]
        with running_server(command, port, START_TIMEOUT_S) as pid:
            cells = []
            for concurrency in load.concurrency:
                runs = repeat(port, pid, served.vocab_size, load, concurrency)
                cells.append(summary(runs, load, alone[concurrency], spelled=served.spelled))
                for line in _lines(cells[-1]):
                    report(line)
    return {
        "bench": "http",
        "version": __version__,
        **provenance("pellucid.cli"),
        "model": engine["model"],
        "tokenizer": "generated" if served.spelled else "the model's own",
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "cells": cells,
        "engine": engine,
    }


def measure_engine(model: str, args: EngineArgs, load: Load, report: Report) -> dict[str, Any]:
    """The record of `pellucid bench offline` in a process of its own; its other lines are reported."""
    command = [sys.executable, "-m", "pellucid", "bench", "offline", model, *args.command_line()]
    command += ["--concurrency", ",".join(map(str, load.concurrency)), "--repetitions", str(load.repetitions)]
    command += ["--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens)]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if last:
                report(last)
            last = line.rstrip("\n")
    if process.returncode:
        raise PellucidError(f"bench offline ended with exit code {process.returncode}; what it said is above")
    record: dict[str, Any] = json.loads(last)
    return record


def repeat(port: int, pid: int, vocab_size: int, load: Load, concurrency: int) -> list[Run]:
    """The load's repetitions, with the prompts of `bench offline`, after one that warms up and does not count."""
    runs = []
    for turn in range(load.repetitions + 1):
        prompts = random_prompts(concurrency, load.input_tokens, vocab_size, 1000 * concurrency + turn)
        requests = [completion_request(prompt, load.output_tokens) for prompt in prompts]
        cpu, busy, begin = cpu_seconds(pid), time.process_time(), time.monotonic()
        streams = read_streams(port, requests)
        client_busy = (time.process_time() - busy) / (time.monotonic() - begin)
        cpu_s = cpu_seconds(pid) - cpu
        runs.append(Run(tuple(Answer.of(stream) for stream in streams), cpu_s, client_busy))
    return runs[1:]


def completion_request(prompt: Sequence[int], output_tokens: int) -> bytes:
    """A greedy stream of so many tokens; the usage at its end says how many there were."""
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post("/v1/completions", body)


def summary(runs: Sequence[Run], load: Load, engine: Mapping[str, Any], *, spelled: bool) -> dict[str, Any]:
    """The figures of a concurrency, each with its spread over runs; `engine` is the cell of `bench offline`.

    Raises:
        PellucidError: too few chunks to time.
    """
    if any(len(answer.times) < 2 for run in runs for answer in run.answers) or any(
        r.total_s <= r.first_s for r in runs
    ):
        raise PellucidError("a stream came in one piece, so nothing can be timed: raise --output-tokens")
    count = len(runs[0].answers)
    tokens = count * load.output_tokens
    decode = [run.tokens_per_s(load.output_tokens) for run in runs]
    whole = [tokens / run.total_s for run in runs]
    invalid = {reason for run in runs for reason in run.invalid(load.output_tokens, spelled=spelled)}
    return {
        "concurrency": count,
        "repetitions": len(runs),
        "invalid": sorted(invalid | {f"the engine alone: {reason}" for reason in engine["invalid"]}),
        "tokens_per_s": spread(decode),
        "engine_tokens_per_s": engine["tokens_per_s"],
        "share_of_engine": _share(decode, count, engine["decode_step_s"]),
        "end_to_end_tokens_per_s": spread(whole),
        "end_to_end_share_of_engine": _share(whole, tokens, engine["end_to_end_s"]),
        "ttft_s": _percentiles([run.ttft_s() for run in runs]),
        "inter_token_s": _percentiles([run.inter_token_s() for run in runs]),
        "chunks_per_token": statistics.mean(run.chunks() for run in runs) / tokens,
        "api_cpu_us_per_token": spread([run.cpu_s / tokens * 1e6 for run in runs], 1),
        "client_busy": spread([run.client_busy for run in runs], 3),
    }


def _share(rates: Sequence[float], tokens: int, engine_s: Mapping[str, float]) -> dict[str, float]:
    """Rates as a share of the engine's, which needs `engine_s` for `tokens`; the least is that of both spreads."""
    return {name: rate * engine_s[name] / tokens for name, rate in spread(rates).items()}


def _percentiles(runs: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    return {f"p{share}": spread([percentile(values, share / 100) for values in runs]) for share in (50, 99)}


def _lines(cell: Mapping[str, Any]) -> Iterator[str]:
    rate, share, whole = cell["tokens_per_s"], cell["share_of_engine"], cell["end_to_end_tokens_per_s"]
    first, between, whole_share = cell["ttft_s"], cell["inter_token_s"], cell["end_to_end_share_of_engine"]
    yield (
        f"C={cell['concurrency']}: {rate['median']:.1f} tok/s ({rate['min']:.1f} to {rate['max']:.1f}), "
        f"{share['median']:.3f} of the engine's {cell['engine_tokens_per_s']:.1f} "
        f"({share['min']:.3f} to {share['max']:.3f})"
    )
    yield (
        f"  end to end {whole['median']:.1f} tok/s, {whole_share['median']:.3f} of the engine's; "
        f"the API process computes {cell['api_cpu_us_per_token']['median']:.1f} us a token"
    )
    yield (
        f"  first token {first['p50']['median'] * 1e3:.1f} ms (99 %: {first['p99']['median'] * 1e3:.1f}), "
        f"between tokens {between['p50']['median'] * 1e3:.2f} ms (99 %: {between['p99']['median'] * 1e3:.2f})"
    )
    for reason in cell["invalid"]:
        yield f"  INVALID: {reason}"


class Served(NamedTuple):
    """What the server is given. `spelled`: its tokenizer is generated, and gives every token a text."""

    model: str
    vocab_size: int
    spelled: bool


@contextlib.contextmanager
def servable(model: str, load_format: str | None) -> Iterator[Served]:
    """A model with a tokenizer: what makes a stream's text must be in the measurement.

    That is the model itself, or for synthetic weights, whose text is noise, a folder with its config and a generated
    tokenizer, for as long as the context lasts: no token then is half a character that waits for the next.

    Raises:
        PellucidError: no such model, or real weights without a tokenizer.
    """
    files = open_model(model, load_format)
    vocab_size = files.traits.vocab_size
    if load_format != SYNTHETIC:
        if load_tokenizer(files.checkpoint) is None:
            raise PellucidError(
                f"{model} has no tokenizer, so its streams carry no text that could be timed; "
                f"add its tokenizer.json, or use --load-format {SYNTHETIC}"
            )
        yield Served(model, vocab_size, spelled=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = files.path / "config.json" if files.path.is_dir() else files.path
        Path(folder, "config.json").symlink_to(config.resolve())
        write_tokenizer(Path(folder), vocab_size)
        yield Served(folder, vocab_size, spelled=True)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer.json that spells every id as a word of its own, and reads no text."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    backend = Tokenizer(BPE({f"w{token_id}": token_id for token_id in range(vocab_size)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))

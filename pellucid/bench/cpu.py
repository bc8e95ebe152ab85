"""`python -m pellucid.bench.cpu`: CPU decode and prefill, side by side with llama.cpp on the same file and threads.

Each engine lives in a process of its own and they take turns, A B A B ..., so that a drift of the machine's speed hits
both. The table is for people; the last line of standard output is JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from pellucid.bench.outputs import writable
from pellucid.bench.provenance import provenance, save, spread
from pellucid.models.hub import DEFAULT_MODEL, resolve_model

# Real text, so that neither engine runs on degenerate input.
PROMPT = "Once upon a time there was a small village by the sea, and"

OURS = """
import json, sys, time
from pellucid import LLM, SamplingParams
model, threads = sys.argv[1], int(sys.argv[2])
llm = LLM(model, threads=threads, max_model_len=2048, enable_prefix_caching=False)
ids = llm.tokenizer.encode(sys.argv[3])
print(json.dumps({"version": __import__("pellucid").__version__, "prompt": ids}), flush=True)
for line in sys.stdin:
    kind, batch, count = json.loads(line)
    if kind == "prefill":
        prompt = [1000 + i for i in range(count)]
        begin = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        rate, tokens = count / (time.perf_counter() - begin), []
    else:
        params = SamplingParams(temperature=0, max_tokens=count + 1, ignore_eos=True)
        outputs = llm.generate([ids] * batch, params)
        rate = sum(o.outputs[0].metrics.decode_tok_s(count + 1) for o in outputs)
        tokens = list(outputs[0].outputs[0].token_ids)
    print(json.dumps({"tok_s": rate, "tokens": tokens}), flush=True)
"""

LLAMA_CPP = """
import ctypes, json, sys, time
import llama_cpp as L, numpy as np
path, threads, ids = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
silent = L.llama_log_callback(lambda *a: None)
L.llama_log_set(silent, ctypes.c_void_p(0))
L.llama_backend_init()
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
settings = L.llama_context_default_params()
settings.n_ctx, settings.n_threads, settings.n_threads_batch = 2048, threads, threads
context = L.llama_init_from_model(model, settings)
vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
def decode(tokens):
    array = (L.llama_token * len(tokens))(*tokens)
    assert L.llama_decode(context, L.llama_batch_get_one(array, len(tokens))) == 0
    return int(np.argmax(np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), shape=(vocab,))))
features = L.llama_print_system_info().decode()
print(json.dumps({"version": L.__version__, "features": features}), flush=True)
for line in sys.stdin:
    kind, batch, count = json.loads(line)
    L.llama_memory_clear(L.llama_get_memory(context), True)
    if kind == "prefill":
        begin = time.perf_counter()
        decode([1000 + i for i in range(count)])
        rate, tokens = count / (time.perf_counter() - begin), []
    else:
        tokens = [decode(ids)]
        begin = time.perf_counter()
        for _ in range(count):
            tokens.append(decode(tokens[-1:]))
        rate = count / (time.perf_counter() - begin)
    print(json.dumps({"tok_s": rate, "tokens": tokens}), flush=True)
"""


class Engine:
    """A child process that answers one JSON line per measurement."""

    def __init__(self, python: str, source: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", source, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hello: dict[str, Any] = self._read()

    def measure(self, kind: str, batch: int, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, batch, count]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self._process.args!r} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def first_token_seconds(model: str, threads: int) -> float:
    """From process start to the first token on the terminal, as a user sees it."""
    command = [sys.executable, "-m", "pellucid.cli", "generate", model, "--prompt", PROMPT, "--max-tokens", "1"]
    begin = time.perf_counter()
    subprocess.run([*command, "--threads", str(threads)], check=True, capture_output=True)
    return time.perf_counter() - begin


@click.command()
@click.option("--model", default=DEFAULT_MODEL, help="A GGUF file that both engines read.")
@click.option("--llama-cpp", "llama_python", help="A Python that has llama-cpp-python; without it only Pellucid runs.")
@click.option("--threads", default=os.cpu_count() or 1)
@click.option("--rounds", default=7, help="Measurements of each kind; medians are shown.")
@click.option("--tokens", default=128, help="Decoded per sequence.")
@click.option("--out", type=click.Path(path_type=Path), callback=writable, help="Append the JSON line to this file.")
def main(model: str, llama_python: str | None, threads: int, rounds: int, tokens: int, out: Path | None) -> None:
    """Measure decode at batch 1 and 8, prefill of 512 tokens, and the time from start to first token."""
    path = str(resolve_model(model))
    ours = Engine(sys.executable, OURS, path, str(threads), PROMPT)
    engines = {"pellucid": ours}
    if llama_python is not None:
        engines["llama.cpp"] = Engine(llama_python, LLAMA_CPP, path, str(threads), json.dumps(ours.hello["prompt"]))
    plans = [("pellucid", "decode", 8, tokens)]
    plans += [(name, kind, 1, n) for name in engines for kind, n in (("decode", tokens), ("prefill", 512))]
    rates: dict[str, list[float]] = {f"{name} {kind} batch {batch}": [] for name, kind, batch, _ in plans}
    texts: dict[str, list[int]] = {}
    for turn in range(rounds + 1):
        for name, kind, batch, count in plans:
            answer = engines[name].measure(kind, batch, count)
            # The first turn warms both up.
            if turn:
                rates[f"{name} {kind} batch {batch}"].append(answer["tok_s"])
            if kind == "decode" and batch == 1:
                texts[name] = answer["tokens"]
    for engine in engines.values():
        engine.close()
    starts = [first_token_seconds(path, threads) for _ in range(3)]

    for label, values in rates.items():
        s = spread(values)
        click.echo(f"{label:28} {s['median']:8.1f} tok/s   ({s['min']:.1f} to {s['max']:.1f})")
    ratios = _ratios(rates)
    for label, value in ratios.items():
        click.echo(f"{label:28} {value:8.2f}")
    click.echo(
        f"{'start to first token':28} {statistics.median(starts):8.2f} s       ({min(starts):.2f} to {max(starts):.2f})"
    )
    record = {
        **provenance("pellucid.bench.cpu"),
        "model": Path(path).name,
        "threads": threads,
        "versions": {
            "pellucid": ours.hello["version"],
            "torch": importlib.metadata.version("torch"),
            **{name: engine.hello["version"] for name, engine in engines.items() if name != "pellucid"},
        },
        "tok_s": {label: spread(values) for label, values in rates.items()},
        "ratios": ratios,
        "first_token_s": spread(starts),
        # They part where llama.cpp's 8-bit activations tip a near-tie; ours are exact.
        "equal_leading_tokens": _equal_leading(*texts.values()) if len(texts) > 1 else None,
    }
    click.echo(save(record, out))


def _equal_leading(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Ratios of medians measured in the same run."""
    median = {label: statistics.median(values) for label, values in rates.items()}
    ratios = {"batch 8 / batch 1": median["pellucid decode batch 8"] / median["pellucid decode batch 1"]}
    for kind in ("decode", "prefill"):
        if f"llama.cpp {kind} batch 1" in median:
            ratios[f"{kind} / llama.cpp"] = median[f"pellucid {kind} batch 1"] / median[f"llama.cpp {kind} batch 1"]
    return ratios


if __name__ == "__main__":
    main()

"""Decode speed, prefill time and end-to-end time of a model in this process, each beside the floor of the same run.

Called by `pellucid bench offline`. Prompts are random ids that share no prefix; every sequence gets as many tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pellucid import __version__
from pellucid.bench.bandwidth import MeasuredSpeeds, measure_speeds
from pellucid.bench.experts import count_experts
from pellucid.bench.idle import SETTLE, random_prompts, record_decode
from pellucid.bench.provenance import provenance, spread
from pellucid.bench.roofline import StepFloor, step_floor
from pellucid.core import InvalidRequestError, PellucidError, SamplingParams
from pellucid.engine.engine import Engine
from pellucid.quantization.weight import dtype_of
from pellucid.runner.gpu_runner import GPURunner
from pellucid.runner.model_runner import ModelRunner
from pellucid.selection.args import EngineArgs

WARM_TOKENS = 8
COUNTED_POSITIONS = 4
"""Decode batches of a cell whose experts are counted, spread over its output."""

IDLE_STEPS = 32

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: each of `concurrency` sequences at a time, `repetitions` times."""

    concurrency: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    repetitions: int = 2

    def __post_init__(self) -> None:
        if self.output_tokens < 2:
            raise InvalidRequestError("--output-tokens: a decode step lies between two tokens; give 2 or more")
        if self.input_tokens < 1 or self.repetitions < 1 or min(self.concurrency) < 1:
            raise InvalidRequestError("concurrency, input tokens and repetitions are 1 or more")

    @property
    def mean_context(self) -> int:
        return self.input_tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True)
class Repetition:
    """Seconds from the first prompt's arrival. `first_s`: until every sequence has a token; `total_s`: until all have
    all of them. `outputs` are in the order of the prompts; `invalid` says why the figures count for nothing."""

    first_s: float
    total_s: float
    outputs: tuple[tuple[int, ...], ...]
    invalid: tuple[str, ...]

    def step_s(self, output_tokens: int) -> float:
        """(time of all tokens - time until every sequence has its first) / (output tokens - 1)."""
        return (self.total_s - self.first_s) / (output_tokens - 1)


def window_tokens(load: Load, steps: int) -> int:
    """Tokens that the first sequence has after `steps` profiled steps: it decodes while others are prefilled."""
    return steps + 4 * SETTLE + max(load.concurrency) * load.input_tokens // 2048


def sized(args: EngineArgs, load: Load) -> EngineArgs:
    """The arguments with room for the load where nothing was asked, and no prefix cache, which would answer for it."""
    if args.enable_prefix_caching:
        raise InvalidRequestError("--enable-prefix-caching: a cached prompt is not computed; leave the flag out")
    length = load.input_tokens + max(load.output_tokens, window_tokens(load, IDLE_STEPS))
    return replace(
        args,
        enable_prefix_caching=False,
        max_model_len=args.max_model_len or length,
        max_num_seqs=args.max_num_seqs or max(load.concurrency),
    )


def run(engine: Engine, prompts: Sequence[list[int]], output_tokens: int) -> Repetition:
    """Serve the prompts together, greedily, to their full length."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
    preempted = engine.stats().preemptions
    begin = time.perf_counter()
    ids = [engine.add_prompt(prompt, params) for prompt in prompts]
    waiting, unfinished, first_s = set(ids), set(ids), 0.0
    while unfinished:
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            if delta.token_ids and delta.request_id in waiting:
                waiting.discard(delta.request_id)
                if not waiting:
                    first_s = time.perf_counter() - begin
            if delta.finish_reason is not None:
                unfinished.discard(delta.request_id)
    total_s = time.perf_counter() - begin
    results = [engine.take_result(request_id).outputs[0] for request_id in ids]
    outputs = tuple(result.token_ids for result in results)
    cached = sum(result.metrics.cached_prompt_tokens for result in results if result.metrics is not None)
    reasons = degeneracy(outputs, output_tokens)
    reasons += [f"{cached} prompt tokens came from the prefix cache"] if cached else []
    preemptions = engine.stats().preemptions - preempted
    reasons += [f"{preemptions} preemptions: the KV cache is too small for this load"] if preemptions else []
    return Repetition(first_s, total_s, outputs, tuple(reasons))


def degeneracy(outputs: Sequence[Sequence[Hashable]], output_tokens: int) -> list[str]:
    """What is wrong with outputs whose speed is to count: unequal lengths, or what `repetitiveness` finds."""
    unequal = any(len(tokens) != output_tokens for tokens in outputs)
    return [f"not every sequence has {output_tokens} tokens"] * unequal + repetitiveness(outputs)


def repetitiveness(outputs: Sequence[Sequence[Hashable]]) -> list[str]:
    """Are the outputs, token by token, all alike, or one token over and over?"""
    reasons = []
    if len(outputs) > 1 and len({tuple(tokens) for tokens in outputs}) == 1:
        reasons.append(f"all {len(outputs)} sequences are equal")
    repeated = sum(Counter(tokens).most_common(1)[0][1] > len(tokens) / 2 for tokens in outputs if len(tokens) > 2)
    if repeated:
        reasons.append(f"{repeated} of {len(outputs)} sequences are one token for more than half of their length")
    return reasons


def measure(engine: Engine, load: Load, report: Report) -> dict[str, Any]:
    """Every cell of the load. `report` gets a line for people at a time: each floor before its speed."""
    import torch

    plan = engine.plan
    dtype = dtype_of(plan.dtype)
    speeds = measure_speeds(torch.device(plan.device), dtype)
    report(f"{speeds.speeds().read_bandwidth / 1e12:.3f} TB/s read, {speeds.speeds().matrix_flops / 1e12:.1f} TFLOP/s")
    report(f"  {speeds.speeds().source}")
    cells = [_measure_cell(engine, load, concurrency, speeds, report) for concurrency in load.concurrency]
    for cell in cells:
        # After all timing: a profiler that has once been on may slow what follows.
        cell["idle"] = _idle(engine, load, cell["concurrency"]) if plan.device == "cuda" else None
        if cell["idle"] is not None and cell["idle"]["share"] is not None:
            report(f"C={cell['concurrency']}: GPU idle {cell['idle']['share']:.1%} of profiled decode steps")
    return {
        "bench": "offline",
        "version": __version__,
        **provenance("pellucid.cli"),
        "torch": torch.__version__,
        "machine": list(plan.hardware),
        "model": engine.path.name,
        "traits": list(plan.model),
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "speeds": speeds.to_json(),
        "cells": cells,
        "decisions": [{"op": d.op, "bucket": d.bucket, "value": d.value, "how": d.how} for d in plan.decisions],
    }


def _measure_cell(
    engine: Engine, load: Load, concurrency: int, speeds: MeasuredSpeeds, report: Report
) -> dict[str, Any]:
    uniform = _floor(engine, load, concurrency, speeds, None)
    experts = f", {uniform.distinct_experts:.1f} experts if chosen at random" if uniform.distinct_experts else ""
    report(f"C={concurrency}: floor {uniform.seconds * 1e3:.3f} ms a step{experts}")
    vocabulary, seed = engine.traits.vocab_size, 1000 * concurrency
    # Not counted: kernels are compiled, buffers made, clocks raised.
    run(engine, random_prompts(concurrency, load.input_tokens, vocabulary, seed), min(WARM_TOKENS, load.output_tokens))
    found = []
    for turn in range(load.repetitions):
        prompts = random_prompts(concurrency, load.input_tokens, vocabulary, seed + turn + 1)
        found.append(run(engine, prompts, load.output_tokens))
    steps = [repetition.step_s(load.output_tokens) for repetition in found]
    counted = _count(engine, load, [[*p, *ids] for p, ids in zip(prompts, found[-1].outputs, strict=True)])
    floor = uniform if counted is None else _floor(engine, load, concurrency, speeds, sum(counted) / len(counted))
    step = spread(steps)
    invalid = sorted({reason for repetition in found for reason in repetition.invalid})
    cell: dict[str, Any] = {
        "concurrency": concurrency,
        "repetitions": load.repetitions,
        "invalid": invalid,
        "decode_step_s": step,
        "tokens_per_s": concurrency / step["median"],
        "ttft_s": spread([repetition.first_s for repetition in found]),
        "prefill_tokens_per_s": concurrency * load.input_tokens / min(r.first_s for r in found),
        "end_to_end_s": spread([repetition.total_s for repetition in found]),
        "floor_s": floor.seconds,
        "floor_uniform_s": uniform.seconds,
        "share_of_floor": floor.seconds / step["median"],
        "distinct_experts": None if counted is None else spread(counted),
        "distinct_experts_uniform": uniform.distinct_experts,
    }
    for line in _lines(cell):
        report(line)
    return cell


def _floor(engine: Engine, load: Load, batch: int, speeds: MeasuredSpeeds, experts: float | None) -> StepFloor:
    return step_floor(
        engine.traits,
        speeds.speeds(),
        batch=batch,
        context=load.mean_context,
        ranks=engine.plan.tensor_parallel_size,
        kv_dtype=engine.plan.kv_dtype,
        distinct_experts=experts,
    )


def _count(engine: Engine, load: Load, sequences: Sequence[Sequence[int]]) -> list[float] | None:
    """Distinct experts a layer in decode batches of what was just generated; None without experts, or without room."""
    if engine.traits.moe is None:
        return None
    stride = max(1, load.output_tokens // COUNTED_POSITIONS)
    positions = range(load.input_tokens, load.input_tokens + load.output_tokens - 1, stride)
    runner = engine.runner
    assert isinstance(runner, ModelRunner | GPURunner)
    return count_experts(runner, sequences, positions, engine.plan.num_kv_pages)


def _idle(engine: Engine, load: Load, concurrency: int) -> dict[str, Any]:
    try:
        window = record_decode(engine, concurrency, load.input_tokens, IDLE_STEPS)
    except PellucidError as error:
        return {"share": None, "because": str(error)}
    return {"share": window.idle_share, "profiled_step_s": window.wall_us / window.steps / 1e6}


def _lines(cell: Mapping[str, Any]) -> Iterator[str]:
    step, first = cell["decode_step_s"], cell["ttft_s"]
    yield (
        f"  decode {step['median'] * 1e3:.3f} ms a step ({step['min'] * 1e3:.3f} to {step['max'] * 1e3:.3f}), "
        f"{cell['tokens_per_s']:.1f} tok/s, {cell['share_of_floor']:.1%} of the floor"
    )
    if cell["distinct_experts"] is not None:
        yield (
            f"  counted {cell['distinct_experts']['median']:.1f} experts a layer (at random "
            f"{cell['distinct_experts_uniform']:.1f}): floor {cell['floor_s'] * 1e3:.3f} ms"
        )
    yield (
        f"  first token of all {first['median'] * 1e3:.1f} ms, {cell['prefill_tokens_per_s']:.0f} prompt tok/s; "
        f"end to end {cell['end_to_end_s']['median']:.3f} s"
    )
    for reason in cell["invalid"]:
        yield f"  INVALID: {reason}"

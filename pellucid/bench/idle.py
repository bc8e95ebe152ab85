"""Kernels of a window of steady decode steps, as the profiler saw them, and how long the GPU stood idle in it.

Used by `bench offline` for the idle share, and by `profile` for everything else.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from pellucid.core import PellucidError, SamplingParams
from pellucid.engine.engine import Engine

SETTLE = 8
"""Decode steps before the window."""


class KernelRun(NamedTuple):
    """One kernel or copy on the GPU; microseconds on the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Window:
    """`steps` decode steps of `concurrency` sequences."""

    concurrency: int
    steps: float
    kernels: tuple[KernelRun, ...]

    @property
    def wall_us(self) -> float:
        """From the first kernel's start to the last one's end."""
        return max(k.end_us for k in self.kernels) - min(k.start_us for k in self.kernels)

    @property
    def busy_us(self) -> float:
        return union_us(self.kernels)

    @property
    def idle_share(self) -> float:
        """Of the window, in which nothing ran. The profiler itself takes time between kernels: an upper bound."""
        return 1 - self.busy_us / self.wall_us


def union_us(kernels: Sequence[KernelRun]) -> float:
    """Microseconds in which at least one of the kernels ran: they may overlap."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_us):
        total += max(0.0, kernel.end_us - max(kernel.start_us, reached))
        reached = max(reached, kernel.end_us)
    return total


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random ids. No two share a prefix: where the vocabulary has enough, the first tokens all differ."""
    drawn = random.Random(seed)
    firsts = (
        drawn.sample(range(vocab_size), count) if count <= vocab_size else drawn.choices(range(vocab_size), k=count)
    )
    return [[first, *(drawn.randrange(vocab_size) for _ in range(tokens - 1))] for first in firsts]


def leave(code: int = 0) -> NoReturn:
    """End the process of a command that has profiled, without Python's own way out.

    At exit torch 2.11 frees buffers that CUPTI may still write to, and now and then the heap is found corrupt
    (https://github.com/pytorch/pytorch/pull/195207).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def record_decode(engine: Engine, concurrency: int, input_tokens: int, steps: int, seed: int = 0) -> Window:
    """Prefill, let decoding settle, and record about `steps` steps in which every sequence gets one token.

    Raises:
        PellucidError: not a CUDA device, no room for as many tokens, or the profiler saw no kernel.
    """
    import torch

    if engine.plan.device != "cuda":
        raise PellucidError(f"profiling kernels needs a CUDA device; this plan runs on the {engine.plan.device}")
    room = engine.plan.max_model_len - input_tokens
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max(1, room))
    prompts = random_prompts(concurrency, input_tokens, engine.traits.vocab_size, seed)
    counts = {engine.add_prompt(prompt, params): 0 for prompt in prompts}

    def advance(tokens: int) -> None:
        """Until every sequence has `tokens` more than the shortest has now."""
        goal = min(counts.values()) + tokens
        while min(counts.values()) < goal:
            for delta in engine.step():
                if delta.finish_reason is not None:
                    raise PellucidError(f"a sequence ended before the window of {steps} steps: raise --max-model-len")
                counts[delta.request_id] += len(delta.token_ids)

    try:
        advance(SETTLE)
        torch.cuda.synchronize()
        before = sum(counts.values())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            advance(steps)
            torch.cuda.synchronize()
        made = sum(counts.values()) - before
    finally:
        for request_id in counts:
            engine.abort(request_id)
    kernels = tuple(
        KernelRun(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA" and event.time_range.end > event.time_range.start
    )
    if not kernels:
        raise PellucidError("the profiler saw no kernel: is CUPTI allowed here (NVreg_RestrictProfilingToAdminUsers)?")
    return Window(concurrency, made / concurrency, kernels)

"""Compiles kernels of captured steps for a device: `python -m pellucid.runner.compile_child`, a pickled job on stdin.

The steps are the engine's own, over tensors that have shapes and no memory; every launch stops behind its compilation.
Needs no GPU. Started by `runner.compile_ahead`.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pellucid.attention.base import PartialAttention
from pellucid.layers.step_tiles import PREFIX, Projection
from pellucid.runner.compile_ahead import SAMPLED_ROWS, CompileJob
from pellucid.runner.prompt_graphs import PromptStep
from pellucid.utils.process import end_with_parent

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionBackend
    from pellucid.kernels.device import DeviceLimits
    from pellucid.layers.fused_step import FusedStep
    from pellucid.traits.model import ModelTraits


def main() -> None:
    end_with_parent()
    job: CompileJob = pickle.load(sys.stdin.buffer)
    if job.candidates:
        # Beside a process that times others.
        os.nice(10)
    compile_steps(job)


def compile_steps(job: CompileJob, device: str = "meta") -> None:
    """Every kernel that `GPURunner` launches for steps of the job's buckets and shapes, and to sample prompts; and what
    candidates launch, as they are gated and timed.

    `device`: where tensors are; with memory, on another than `meta`, the same kernels are compiled.
    """
    import torch

    from pellucid.kernels.triton.routing import route
    from pellucid.kernels.triton.row_ops import TritonOps
    from pellucid.kvcache.pool import KVPool
    from pellucid.layers.backends import LayerBackends
    from pellucid.layers.fused_step import lone_step
    from pellucid.layers.step_tiles import parse_tile, plan_tiles
    from pellucid.models.fused_decoder import FusedDecoder, TokenRing
    from pellucid.models.loading import load_decoder
    from pellucid.models.synthetic import SyntheticTensors
    from pellucid.moe.triton_fused import TritonFusedMoE
    from pellucid.quantization.reference import ReferenceLinear
    from pellucid.quantization.weight import dtype_of
    from pellucid.runner.device_state import DeviceState
    from pellucid.selection.bucket import bucket
    from pellucid.selection.registry import discover

    _only_compile(job.limits.sm)
    traits, plan, where = job.traits, job.plan, torch.device(device)
    dtype = dtype_of(plan.dtype)
    moe = TritonFusedMoE(dtype, where)
    moe.shared_memory = job.limits.shared_memory
    # Ours: what is computed with those of others is not captured (`decode_path`), and compiled when it is needed.
    backends = LayerBackends(TritonOps(), ReferenceLinear(dtype, where), moe, traits.attention.kind == "mla", route)
    decoder = load_decoder(traits, SyntheticTensors(traits, 0), backends, plan.max_model_len)
    pool = KVPool(
        traits.attention, traits.num_layers, plan.num_kv_pages, plan.page_size, dtype_of(plan.kv_dtype), where
    )
    most, pages = bucket(plan.max_num_seqs), -(-plan.max_model_len // plan.page_size) + 1
    # On the CPU, for its memory begins where the device's does: a kernel is compiled for the alignment of its pointers.
    state = DeviceState(plan.max_num_seqs, most, pages, torch.device("cpu"))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=where)

    ring = TokenRing(empty(8, most), empty(1, dtype=torch.int64))
    called = {backend.name for backend in discover() if backend.op == "attention" and backend.fused_decode == "called"}

    def called_attention(rows: int) -> AttentionBackend | None:
        return ElsewhereCompiled() if plan.backend("attention.decode", rows) in called else None

    make_fused = partial(
        FusedDecoder, decoder, pool, state, ring, plan.max_model_len, job.limits, called_attention=called_attention
    )
    fused = make_fused(plan_tiles(plan))
    with torch.inference_mode():
        for rows in job.buckets:
            fused.step(rows)
            if rows in {min(sampled, most) for sampled in SAMPLED_ROWS}:
                fused.sample(empty(rows, traits.vocab_size, dtype=torch.float32), empty(rows))
        for shape in job.prompts:
            PromptStep(decoder, pool, own_prefill(traits, job.limits), shape, job.limits, where).forward()
        for op, rows, name in job.candidates:
            # What a compiler makes of it, the gate hears when it is asked.
            with suppress(Exception):
                tiles = {(op, rows): parse_tile(name)}
                if op.startswith(PREFIX):
                    compile_projection(Projection.of(op), rows, lone_step(rows, job.limits, tiles, where, dtype))
                else:
                    make_fused(tiles).step(rows)


def compile_projection(projection: Projection, rows: int, step: FusedStep) -> None:
    """In both forms that a step has: behind a norm, and added to the residual."""
    n, k, pair = projection
    x, weight = step.scratch("x", rows, k), step.scratch("weight", n, k)
    out, norm = step.scratch("out", rows, n // 2 if pair else n), step.scratch("norm", k)
    step.project(x, weight, out, norm=norm, eps=1e-6, activation="silu_mul" if pair else None)
    if not pair:
        step.project(x, weight, out, residual=True)


def own_prefill(traits: ModelTraits, limits: DeviceLimits) -> AttentionBackend:
    """Our attention for prompts, on a device that need not be there."""
    from pellucid.attention.triton_gqa import TritonGQA
    from pellucid.attention.triton_mla import TritonMLA

    kind = TritonMLA if traits.attention.kind == "mla" else TritonGQA
    return kind("prefill", limits)


class ElsewhereCompiled(PartialAttention):
    """In place of another project's attention: outputs of its shapes. Implements `AttentionBackend`."""

    expands_latent = False

    def gqa(self, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q.new_empty(q.shape)

    def mla(self, q: torch.Tensor, *_: Any, kv_lora_rank: int, **__: Any) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], kv_lora_rank)


def _only_compile(sm: int) -> None:
    """Triton for a device that need not be there, whose launches end when their kernel is compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Ahead:
        """What the just-in-time compiler asks of a driver before it would launch."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", sm, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    launch = JITFunction.run

    def compiled(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **given)

    driver.set_active(Ahead())
    JITFunction.run = compiled


if __name__ == "__main__":
    main()

"""Compiles the kernels of fused steps for a device: `python -m pellucid.runner.compile_child`, a pickled job on stdin.

The steps are the engine's own, over tensors that have shapes and no memory; every launch stops behind its compilation.
Needs no GPU. Started by `runner.compile_ahead`.
"""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

from pellucid.attention.base import PartialAttention
from pellucid.runner.compile_ahead import SAMPLED_ROWS, CompileJob
from pellucid.utils.process import end_with_parent

if TYPE_CHECKING:
    import torch

    from pellucid.attention.base import AttentionBackend


def main() -> None:
    end_with_parent()
    job: CompileJob = pickle.load(sys.stdin.buffer)
    compile_steps(job)


def compile_steps(job: CompileJob, device: str = "meta") -> None:
    """Every kernel that `GPURunner` launches for steps of the job's buckets, and to sample prompts.

    `device`: where tensors are; with memory, on another than `meta`, the same kernels are compiled.
    """
    import torch

    from pellucid.kernels.torch_ops import TorchOps
    from pellucid.kvcache.pool import KVPool
    from pellucid.layers.backends import LayerBackends
    from pellucid.layers.step_tiles import plan_tiles
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
    # Those whose weights fused steps read (`decode_path`); what layered ones launch is compiled when a prompt comes.
    backends = LayerBackends(TorchOps(), ReferenceLinear(dtype, where), TritonFusedMoE(dtype, where), False)
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
    tiles = plan_tiles(plan)
    called = {backend.name for backend in discover() if backend.op == "attention" and backend.fused_decode == "called"}

    def called_attention(rows: int) -> AttentionBackend | None:
        return ElsewhereCompiled() if plan.backend("attention.decode", rows) in called else None

    fused = FusedDecoder(decoder, pool, state, ring, plan.max_model_len, job.limits, tiles, called_attention)
    with torch.inference_mode():
        for rows in job.buckets:
            fused.step(rows)
            if rows in {min(sampled, most) for sampled in SAMPLED_ROWS}:
                fused.sample(empty(rows, traits.vocab_size, dtype=torch.float32), empty(rows))


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

"""Compiles every kernel of a fused decode step for a device that is not here, and prints what each needs.

    python -m tests.kernels.triton.compile_step CONFIG SM[,SM ...] SHARED_MEMORY KERNELS ROWS [ROWS ...]

A line a kernel whose name the pattern KERNELS finds: name, rows, bytes of shared memory, bytes of spilled registers a
thread. Tensors have shapes but no memory, so that real sizes cost nothing.
Run in a process of its own by `test_offline_compile`: the other tests here need Triton's interpreter instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from pellucid.kernels.device import DeviceLimits
from pellucid.kernels.torch_ops import TorchOps
from pellucid.kvcache.pool import KVPool
from pellucid.layers.backends import LayerBackends
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.fused_decoder import FusedDecoder, TokenRing
from pellucid.models.loading import load_decoder
from pellucid.models.synthetic import SyntheticTensors, settle
from pellucid.moe.triton_fused import TritonFusedMoE
from pellucid.quantization.reference import ReferenceLinear

META = torch.device("meta")
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Compiled:
    """Stands in for launching: each kind of launch is compiled once, and its need noted."""

    def __init__(self, sm: int, kernels: str) -> None:
        self.target, self.rows, self.kernels = GPUTarget("cuda", sm, 32), 0, re.compile(kernels)
        self.needs: dict[tuple[Any, ...], tuple[str, int, int, int]] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        if not self.kernels.search(kernel.fn.__name__):
            return
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        values = dict(zip(kernel.arg_names, args, strict=False)) | given
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            name, value = parameter.name, values.get(parameter.name, parameter.default)
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                signature[name], constants[(index,)] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name], aligned = TYPES[value.dtype], True
            elif isinstance(value, TensorDescriptor):
                block = ", ".join(map(str, value.block_shape))
                signature[name], aligned = f"tensordesc<{TYPES[value.base.dtype][1:]}[{block}]>", False
            elif isinstance(value, float):
                signature[name], aligned = "fp32", False
            else:
                signature[name], aligned = "i32", value % 16 == 0
            if aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        key = (kernel.fn.__name__, str(signature), str(constants), str(attributes), str(options))
        if key not in self.needs:
            source = ASTSource(kernel, signature, constants, attributes)
            found = compile(source, target=self.target, options=options)
            self.needs[key] = (kernel.fn.__name__, self.rows, found.metadata.shared, stack_bytes(found.asm["cubin"]))


def stack_bytes(cubin: bytes) -> int:
    """What the one kernel in `cubin` keeps in local memory instead of registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", text))


def main(config: str, sm: int, shared_memory: int, kernels: str, rows: list[int]) -> None:
    report = Checkpoint.open(Path(config)).report()
    traits, _ = settle(report.traits)
    # A dense and a MoE layer, where there are both.
    kinds = traits.moe_layers[:1] + traits.moe_layers[-1:]
    traits = replace(traits, num_layers=2, moe_layers=kinds)
    backends = LayerBackends(
        TorchOps(), ReferenceLinear(torch.bfloat16, META), TritonFusedMoE(torch.bfloat16, META), expands_latent=False
    )
    decoder = load_decoder(traits, SyntheticTensors(traits, 0), backends, 64)
    pool = KVPool(traits.attention, 2, 64, 64, torch.bfloat16, META)
    most = max(rows)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    state = SimpleNamespace(
        tokens=empty(most + 1), positions=empty(most + 1), temperatures=empty(most + 1, dtype=torch.float32),
        seeds=empty(most + 1, dtype=torch.int64), top_k=empty(most + 1), top_p=empty(most + 1, dtype=torch.float32),
        min_p=empty(most + 1, dtype=torch.float32), row_slots=empty(most), page_table=empty(most + 1, 64),
        scratch_slot=most,
    )  # fmt: skip
    ring = TokenRing(empty(8, most), empty(1, dtype=torch.int64))
    fused = FusedDecoder(decoder, pool, state, ring, 2048, DeviceLimits(sm, 132, shared_memory))
    compiled = Compiled(sm, kernels)
    JITFunction.run = lambda kernel, *args, **given: compiled.run(kernel, *args, **given)
    for count in rows:
        compiled.rows = count
        fused.step(count)
    for need in compiled.needs.values():
        sys.stdout.write(" ".join(map(str, need)) + "\n")


if __name__ == "__main__":
    for each in sys.argv[2].split(","):
        main(sys.argv[1], int(each), int(sys.argv[3]), sys.argv[4], [int(word) for word in sys.argv[5:]])

"""Tiny decoders with their fused twin, for the tests of decode steps and of their measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid.attention.base import AttentionBackend
from pellucid.attention.reference import create as reference_attention
from pellucid.core import SamplingParams
from pellucid.kernels.context import KernelContext
from pellucid.kernels.device import DeviceLimits, device_limits
from pellucid.kernels.torch_ops import TorchOps
from pellucid.kvcache.pool import KVPool
from pellucid.layers.backends import LayerBackends
from pellucid.layers.batch import AttentionSegment, ForwardBatch
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.decoder import Decoder
from pellucid.models.fused_decoder import FusedDecoder, TokenRing
from pellucid.models.loading import load_decoder
from pellucid.moe.triton_fused import create as triton_moe
from pellucid.quantization.reference import create as reference_linear
from pellucid.runner.device_state import DeviceState
from pellucid.runner.forward_batch import attention_metadata
from pellucid.step_plan import ScheduledSequence
from tests import checkpoints

PAGE = 16
PAGES = 3
"""Of each sequence."""


@dataclass(frozen=True, slots=True)
class FusedSteps:
    """A fused decoder over the state of `rows` sequences r0, r1, ..., each with `PAGES` pages of its own."""

    decoder: Decoder
    pool: KVPool
    state: DeviceState
    ring: TokenRing
    fused: FusedDecoder
    bucket: int
    context: KernelContext

    @classmethod
    def of(
        cls,
        shape: str,
        rows: int,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        call: Callable[[DeviceLimits], AttentionBackend] | None = None,
    ) -> FusedSteps:
        """`call` makes the attention backend that its steps call; their own kernels attend without."""
        context = KernelContext(device, dtype, None)
        checkpoint = Checkpoint.open(checkpoints.write_sharded(shape, folder, "float16"))
        traits = checkpoint.report().traits
        moe = triton_moe(context) if traits.moe is not None else None
        backends = LayerBackends(TorchOps(), reference_linear(context), moe, expands_latent=False)
        decoder = load_decoder(traits, checkpoint.tensors, backends, 256)
        pool = KVPool(traits.attention, traits.num_layers, rows * PAGES, PAGE, dtype, device)
        limits = device_limits(device) if device.type == "cuda" else DeviceLimits(86, 4, 99 << 10)
        bucket = 1 << (rows - 1).bit_length()
        state = DeviceState(rows, bucket, PAGES + 1, device)
        ring = TokenRing(
            torch.zeros(8, bucket, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
        called = None if call is None else call(limits)
        fused = FusedDecoder(
            decoder, pool, state, ring, PAGE * PAGES, limits, called_attention=lambda rows: called
        )  # fmt: skip
        return cls(decoder, pool, state, ring, fused, bucket, context)

    def row(self, index: int, start: int, tokens: Sequence[int], prefill: bool = False) -> ScheduledSequence:
        pages = tuple(range(1 + PAGES * index, 1 + PAGES * (index + 1)))
        return ScheduledSequence(f"r{index}", start, tuple(tokens), pages, not prefill, prefill)

    def layered(self, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
        """The layered decoder's logits [rows, vocab] of each row's last token. It writes their KV."""
        device = self.context.device
        places = [(row, p) for row in rows for p in range(row.start, row.start + len(row.token_ids))]
        slots = [row.pages[p // PAGE] * PAGE + p % PAGE for row, p in places]
        ends = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0) - 1
        backend = reference_attention(self.context, "decode")
        segment = AttentionSegment(0, len(places), backend, attention_metadata(rows, device))
        batch = ForwardBatch(
            torch.tensor([token for row in rows for token in row.token_ids], device=device),
            torch.tensor([p for _, p in places], device=device),
            torch.tensor(slots, device=device),
            (segment,),
            self.pool,
            ends.to(device),
        )
        return self.decoder.forward(batch).logits

    def step(self, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
        """The fused decoder's logits of `rows`, one token each."""
        self.state.prepare(rows, self.bucket, [(SamplingParams(temperature=0), 1)] * len(rows))
        self.fused.step(self.bucket)
        return self.fused.logits(self.bucket)[: len(rows)].float()

"""Prompts padded to a graph's rows have the logits, and leave the cache, of a step that is not; captured on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pellucid.attention.base import AttentionBackend
from pellucid.kernels.context import KernelContext
from pellucid.kernels.device import DeviceLimits, device_limits
from pellucid.kernels.triton.routing import route
from pellucid.kernels.triton.row_ops import TritonOps
from pellucid.kvcache.pool import KVPool
from pellucid.layers.backends import LayerBackends
from pellucid.models.checkpoint import Checkpoint
from pellucid.models.decoder import Decoder
from pellucid.models.loading import load_decoder
from pellucid.moe.triton_fused import create as triton_moe
from pellucid.quantization.reference import create as reference_linear
from pellucid.runner.compile_child import own_prefill
from pellucid.runner.forward_batch import build_forward_batch
from pellucid.runner.prompt_graphs import MOST_SEQUENCES, PromptGraphs, PromptShape, PromptStep
from pellucid.step_plan import ScheduledSequence, StepPlan
from tests import checkpoints

PAGE, PAGES = 16, 3
NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prompts:
    """A model with our kernels, and two pools: of the steps that are padded, and of those that are not."""

    decoder: Decoder
    pool: KVPool
    other_pool: KVPool
    context: KernelContext
    limits: DeviceLimits

    @classmethod
    def of(cls, shape: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Prompts:
        context = KernelContext(device, dtype, None)
        checkpoint = Checkpoint.open(checkpoints.write_sharded(shape, folder, "float16"))
        traits = checkpoint.report().traits
        moe = triton_moe(context) if traits.moe is not None else None
        expands = traits.attention.kind == "mla"
        backends = LayerBackends(TritonOps(), reference_linear(context), moe, expands, route)
        pools = [KVPool(traits.attention, traits.num_layers, 8 * PAGES, PAGE, dtype, device) for _ in range(2)]
        limits = device_limits(device) if device.type == "cuda" else DeviceLimits(86, 4, 99 << 10)
        return cls(load_decoder(traits, checkpoint.tensors, backends, 256), pools[0], pools[1], context, limits)

    def step(self, shape: PromptShape) -> PromptStep:
        return PromptStep(self.decoder, self.pool, self.backend(), shape, self.limits, self.context.device)

    def backend(self) -> AttentionBackend:
        return own_prefill(self.decoder.traits, self.limits)

    def expected(self, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
        plan = StepPlan(0, tuple(rows), 0, sum(len(row.token_ids) for row in rows))
        backend = self.backend()
        batch = build_forward_batch(plan, self.other_pool, self.context.device, backend, backend, NOBODY)
        return self.decoder.forward(batch).logits

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Planes of both pools, but for the scratch page."""
        pools = (self.pool, self.other_pool)
        layers = range(self.decoder.traits.num_layers)
        planes = ([pool.keys(layer)[1:] for pool in pools] for layer in layers)
        values = ([pool.values(layer)[1:] for pool in pools] for layer in layers)
        return [(a.float(), b.float()) for a, b in [*planes, *values]]


def chunk(index: int, start: int, tokens: Sequence[int], sample: bool = True) -> ScheduledSequence:
    pages = tuple(range(1 + PAGES * index, 1 + PAGES * (index + 1)))
    return ScheduledSequence(f"r{index}", start, tuple(tokens), pages, sample, True)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The kernels are the same; products of the library may take another order at another number of rows."""
    assert found.isfinite().all()
    assert (found - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("shape", ["v3", "qwen3-moe", "llama"])
def test_chunks_of_several_prompts_and_behind_a_prefix(
    shape: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Two prompts, one of which goes on in the second step beside a new one; a third row that nobody samples."""
    prompts = Prompts.of(shape, tmp_path, device, dtype)
    mla = prompts.decoder.traits.attention.kind == "mla"
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, prompts.decoder.traits.vocab_size, (3, 32), generator=generator).tolist()
    first = [chunk(0, 0, drawn[0][:7]), chunk(1, 0, drawn[1][:20], sample=False)]
    second = [chunk(1, 20, drawn[1][20:29]), chunk(2, 0, drawn[2][:5])]
    steps = [PromptShape(32, 32 if mla else 0), PromptShape(16, 48 if mla else 0)]
    graphs = PromptGraphs(steps, (8, 16, 32), prompts.step) if device.type == "cuda" else None
    with torch.inference_mode():
        for rows, size, wanted in ((first, steps[0], 1), (second, steps[1], 2)):
            if graphs is not None:
                assert graphs.fitting(rows) == size
                logits = graphs.replay(size, rows)
            else:
                step = prompts.step(size)
                assert step.fill(rows) == wanted
                logits = step.forward()
                assert logits.shape[0] == MOST_SEQUENCES
                logits = logits[:wanted]
            assert logits.shape[0] == wanted
            assert_near(logits, prompts.expected(rows))
        for padded, plain in prompts.caches():
            assert_near(padded, plain)


def test_a_step_that_was_filled_before_forgets_what_it_held(
    tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """A short prompt after a long one: nothing of the long one is computed or written again."""
    prompts = Prompts.of("llama", tmp_path, device, dtype)
    step = prompts.step(PromptShape(32, 0))
    with torch.inference_mode():
        step.fill([chunk(0, 0, range(3, 33))])
        step.forward()
        before = prompts.pool.keys(0)[1 : 1 + PAGES].clone()
        prompts.pool.keys(0)[1 : 1 + PAGES] = 1.0
        assert step.fill([chunk(1, 0, [5, 6])]) == 1
        logits = step.forward()[:1]
        assert (prompts.pool.keys(0)[1 : 1 + PAGES] == 1.0).all() and before.abs().sum() > 0
        assert_near(logits, prompts.expected([chunk(1, 0, [5, 6])]))

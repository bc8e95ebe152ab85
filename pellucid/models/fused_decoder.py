"""The decode step of a model in fused kernels over fixed buffers. Made by `runner.gpu_runner` from a loaded `Decoder`.

begin (embedding of each slot's token) -> fused layers -> norm + lm_head + best token -> what filters keep of a row
-> finish (the next state)

It shares the decoder's weights and computes the same sums in fewer launches. A step reads and writes the device's
own state, so that steps follow each other without the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pellucid.attention.base import AttentionBackend
from pellucid.kernels.device import DeviceLimits
from pellucid.kvcache.pool import KVPool
from pellucid.layers.fused_attention import FusedGQA, FusedMLA
from pellucid.layers.fused_mlp import FusedMLP, FusedMoE
from pellucid.layers.fused_step import FUSED_NORM_ROWS, CalledAttention, FusedStep, dense, scratch_space
from pellucid.layers.mla import MLAAttention
from pellucid.layers.moe import MoE
from pellucid.layers.step_tiles import LM_HEAD
from pellucid.models.decoder import Decoder, DecoderLayer

if TYPE_CHECKING:
    import torch

    from pellucid.kernels.triton.sampling import SlotSampling
    from pellucid.kernels.triton.token_filters import FilterSpace
    from pellucid.layers.fused_step import Scratch
    from pellucid.layers.step_tiles import Tiles


class SequenceState(Protocol):
    """Per slot, on the device: what a step reads and moves on. See `runner.device_state`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    row_slots: torch.Tensor
    page_table: torch.Tensor
    scratch_slot: int


@dataclass(frozen=True, slots=True)
class TokenRing:
    """Where steps leave their tokens: `tokens` int32 [steps, rows] in memory that the host reads, -1 for logits that
    are not finite. `step` int64 [1] on the device counts the steps that have written."""

    tokens: torch.Tensor
    step: torch.Tensor


class FusedDecoder:
    """`step(rows)` computes the first `rows` of `state.row_slots`, and samples.

    The logits of the last step of a bucket stay in `logits(rows)`, for rows that the host samples.
    `tiles`: measured ones of its projections. `called_attention`: what a bucket calls instead of our attention.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        state: SequenceState,
        ring: TokenRing,
        max_context: int,
        limits: DeviceLimits,
        tiles: Tiles | None = None,
        called_attention: Callable[[int], AttentionBackend | None] = lambda _: None,
    ) -> None:
        self._decoder, self._pool, self._state, self._ring = decoder, pool, state, ring
        self._max_context, self._limits, self._tiles = max_context, limits, tiles or {}
        self._called_attention = called_attention
        self._pdl = limits.pdl
        self._device, self._dtype = decoder.norm.weight.device, decoder.norm.weight.dtype
        self._halves = [half for layer in decoder.layers for half in _fused(layer)]
        self._head, _ = dense(decoder.lm_head)
        self._steps: dict[int, FusedStep] = {}
        self._scratch: dict[int, Scratch] = {}
        self._prompt_scratch = scratch_space(self._device, self._dtype)

    def step(self, rows: int) -> None:
        """One step of a bucket: launches only, nothing is waited for."""
        from pellucid.kernels.triton.head import begin_step

        state, step = self._state, self._bucket(rows)
        begin_step(
            state.tokens, state.positions, step.sequence, state.scratch_slot, self._decoder.embedding.data, step.x,
            step.context,
        )  # fmt: skip
        if step.called is not None:
            step.called.begin(step.context)
        for half in self._halves:
            half.add_to(step)
        self._finish(step, self._scratch[rows])

    def sample(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """The next token of sequences in `slots`, int32 [rows], whose prompts end here, from logits [rows, vocab]."""
        import torch

        from pellucid.kernels.triton import head
        from pellucid.kernels.triton.token_filters import FilterSpace

        rows, vocab = logits.shape
        programs = -(-vocab // head.PARTIAL_BLOCK)
        value = torch.empty(rows, programs, dtype=torch.float32, device=logits.device)
        index = torch.empty(rows, programs, dtype=torch.int32, device=logits.device)
        head.partial_best(
            logits, value, index, sampling=self._sampling(), state_positions=self._state.positions, row_slots=slots
        )
        space = FilterSpace.of(rows, vocab, self._prompt_scratch)
        self._choose(logits, value, index, slots, space, pdl=False)

    def logits(self, rows: int) -> torch.Tensor:
        """[rows, vocab] of the last step of this bucket."""
        import torch

        dtype = torch.float32 if self._steps[rows].few else self._dtype
        return self._scratch[rows]("logits", rows, self._head.shape[0], dtype=dtype)

    def _finish(self, step: FusedStep, scratch: Scratch) -> None:
        """The next token of each row into the state and the ring."""
        import torch

        from pellucid.kernels.triton import head
        from pellucid.kernels.triton.row_ops import rms_norm
        from pellucid.kernels.triton.token_filters import FilterSpace

        norm, state, rows, x, slots = self._decoder.norm, self._state, step.rows, step.x, step.sequence
        vocab, width = self._head.shape
        tile = step.tile(LM_HEAD, lambda: head.head_tile(vocab, width, rows)) if step.few else None
        programs = head.head_programs(vocab, rows, tile)
        value = scratch("best_value", rows, programs, dtype=torch.float32)
        index = scratch("best_index", rows, programs, dtype=torch.int32)
        logits = self.logits(rows)
        if step.few:
            source = scratch("normed", rows, x.shape[1]) if rows > FUSED_NORM_ROWS else x
            weight = None if rows > FUSED_NORM_ROWS else norm.weight
            if weight is None:
                rms_norm(x, norm.weight, norm.eps, source, pdl=self._pdl)
            head.small_head(
                source, weight, norm.eps, self._head, logits, value, index, sampling=self._sampling(),
                state_positions=state.positions, row_slots=slots, pdl=self._pdl, tile=tile,
            )  # fmt: skip
        else:
            normed = scratch("normed", rows, x.shape[1])
            rms_norm(x, norm.weight, norm.eps, normed, pdl=self._pdl)
            torch.mm(normed, self._head.t(), out=logits)
            head.partial_best(
                logits, value, index, sampling=self._sampling(), state_positions=state.positions, row_slots=slots,
                pdl=self._pdl,
            )  # fmt: skip
        space = FilterSpace.of(rows, logits.shape[1], scratch)
        self._choose(logits, value, index, slots, space, pdl=self._pdl)

    def _choose(
        self,
        logits: torch.Tensor,
        value: torch.Tensor,
        index: torch.Tensor,
        slots: torch.Tensor,
        space: FilterSpace,
        pdl: bool,
    ) -> None:
        """The next tokens and the next state, from logits [rows, vocab] and the best of their parts."""
        from pellucid.kernels.triton.head import finish_step
        from pellucid.kernels.triton.token_filters import sampling_bins

        state, sampling = self._state, self._sampling()
        sampling_bins(logits, value, slots, sampling, space, pdl=pdl)
        finish_step(
            value, index, slots, state.scratch_slot, state.tokens, state.positions, self._ring.tokens, self._ring.step,
            logits=logits, sampling=sampling, space=space, pdl=pdl,
        )  # fmt: skip

    def _sampling(self) -> SlotSampling:
        from pellucid.kernels.triton.sampling import SlotSampling

        state = self._state
        return SlotSampling(state.temperatures, state.seeds, state.top_k, state.top_p, state.min_p)

    def _bucket(self, rows: int) -> FusedStep:
        import torch

        if rows not in self._steps:
            scratch = self._scratch[rows] = scratch_space(self._device, self._dtype)
            backend = self._called_attention(rows)
            self._steps[rows] = FusedStep(
                rows,
                scratch("x", rows, self._decoder.traits.hidden_size),
                self._state.row_slots[:rows],
                scratch("context", rows, dtype=torch.int32),
                self._state.page_table,
                self._pool,
                scratch,
                self._max_context,
                self._limits,
                self._tiles,
                None
                if backend is None
                else CalledAttention(backend, self._state.page_table, self._state.row_slots[:rows]),
            )
        return self._steps[rows]


def _fused(layer: DecoderLayer) -> tuple[FusedMLA | FusedGQA, FusedMLP | FusedMoE]:
    attention, mlp = layer.attention, layer.mlp
    return (
        FusedMLA(layer.input_norm, attention)
        if isinstance(attention, MLAAttention)
        else FusedGQA(layer.input_norm, attention),
        FusedMoE.of(layer.post_attention_norm, mlp)
        if isinstance(mlp, MoE)
        else FusedMLP(layer.post_attention_norm, mlp),
    )

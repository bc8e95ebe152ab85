"""The decoder: one class for every model, assembled from traits by `models.loading`, called by the runner.

embed -> [ x += attention(norm(x)) ; x += mlp or moe(norm(x)) ] * layers -> norm -> lm_head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.layers.batch import ForwardBatch
from pellucid.layers.embedding import Embedding
from pellucid.layers.gqa import GQAAttention
from pellucid.layers.linear import Linear
from pellucid.layers.mla import MLAAttention
from pellucid.layers.mlp import MLP
from pellucid.layers.moe import MoE
from pellucid.layers.norm import RMSNorm
from pellucid.traits.model import ModelTraits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm block; both halves add to the residual where it lies."""

    input_norm: RMSNorm
    attention: GQAAttention | MLAAttention
    post_attention_norm: RMSNorm
    mlp: MLP | MoE

    def add_to(self, residual: torch.Tensor, batch: ForwardBatch) -> None:
        """residual [tokens, hidden], in place."""
        self.attention.add_to(residual, self.input_norm(residual), batch)
        self.mlp.add_to(residual, self.post_attention_norm(residual))


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """`logits` fp32 [wanted, vocab] of `batch.logit_rows`; `hidden[i]` the residual after layer `capture[i]`."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A loaded model. Holds no state of any request."""

    traits: ModelTraits
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Linear

    def forward(self, batch: ForwardBatch, capture: Sequence[int] = ()) -> DecoderOutput:
        """One step over all rows of the batch. `capture`: 0-based layers whose output [tokens, hidden] is wanted."""
        x = self.embedding(batch.token_ids)  # [tokens, hidden]
        captured = {}
        for index, layer in enumerate(self.layers):
            layer.add_to(x, batch)
            if index in capture:
                captured[index] = x.clone()
        logits = self.lm_head(self.norm(x[batch.logit_rows])).float()
        return DecoderOutput(logits, tuple(captured[index] for index in capture))

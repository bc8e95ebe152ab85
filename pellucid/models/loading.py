"""Builds a `Decoder` from a checkpoint: the strict tensor check, then layer by layer. Called by the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pellucid.core import CheckpointError
from pellucid.layers.backends import LayerBackends
from pellucid.layers.embedding import Embedding
from pellucid.layers.gqa import GQAAttention
from pellucid.layers.linear import Linear
from pellucid.layers.mla import MLAAttention
from pellucid.layers.mlp import MLP
from pellucid.layers.moe import MoE
from pellucid.layers.norm import RMSNorm
from pellucid.layers.rotary import Rotary
from pellucid.models.decoder import Decoder, DecoderLayer
from pellucid.models.layout import decoder_layout
from pellucid.models.synthetic import ShapedWeights, SyntheticTensors, SyntheticWeights
from pellucid.models.weights import SAFETENSORS_SCHEMES, ProgressCallback, Weights
from pellucid.traits.model import GQATraits, MLATraits, ModelTraits
from pellucid.traits.tensors import TensorIndex, TextTensors

if TYPE_CHECKING:
    import torch


def load_decoder(
    traits: ModelTraits,
    tensors: TensorIndex,
    backends: LayerBackends,
    max_position: int,
    on_progress: ProgressCallback | None = None,
) -> Decoder:
    """The model in memory, in the formats its backends chose. `max_position` bounds the rope table.

    `SyntheticTensors` are drawn where the layers compute, on torch's meta device with shapes alone; all others are read
    from their files.

    Raises:
        CheckpointError: tensors that are missing, left over, misshapen, not finite or of an unknown format.
    """
    text = TextTensors.of(tensors)
    _check_formats(text)
    layout = decoder_layout(traits, text)
    weights: Weights
    if isinstance(tensors, SyntheticTensors) and backends.linear.device.type == "meta":
        weights = ShapedWeights(tensors)
    elif isinstance(tensors, SyntheticTensors):
        weights = SyntheticWeights(traits, tensors, backends.linear.device, on_progress)
    else:
        weights = Weights(text.by_name, layout.required, on_progress)
    return _Builder(traits, weights, backends, max_position).decoder()


def _check_formats(text: TextTensors) -> None:
    """Refuse weights that no loader here reads, before any is read."""
    for name, info in text.by_name.items():
        stored_by_gguf = info.file.suffix == ".gguf"
        loaded = name.endswith((".weight", ".bias", "_correction_bias"))
        if not stored_by_gguf and loaded and info.dtype not in SAFETENSORS_SCHEMES:
            raise CheckpointError(
                f"{name} is stored as {info.dtype}; this version loads BF16, F16 and F32 safetensors, and GGUF"
            )


@dataclass(frozen=True, slots=True)
class _Builder:
    traits: ModelTraits
    weights: Weights
    backends: LayerBackends
    max_position: int

    def decoder(self) -> Decoder:
        traits, linear = self.traits, self.backends.linear
        table = self.weights.matrix("model.embed_tokens.weight")
        embedding = Embedding(table, linear.dtype, linear.device)
        rotary = Rotary(traits.attention.rope, self.max_position, linear.device)
        layers = tuple(self.layer(index, rotary) for index in range(traits.num_layers))
        norm = self.norm("model.norm", traits.norm_eps)
        head = table if traits.tied_embeddings else self.weights.matrix("lm_head.weight")
        return Decoder(traits, embedding, layers, norm, Linear(linear, [head]))

    def layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        traits, prefix = self.traits, f"model.layers.{index}"
        attention: GQAAttention | MLAAttention
        if traits.attention.kind == "mla":
            attention = self.mla(traits.attention, index, f"{prefix}.self_attn", rotary)
        else:
            attention = self.gqa(traits.attention, index, f"{prefix}.self_attn", rotary)
        return DecoderLayer(
            self.norm(f"{prefix}.input_layernorm", traits.norm_eps),
            attention,
            self.norm(f"{prefix}.post_attention_layernorm", traits.norm_eps),
            self.moe(f"{prefix}.mlp") if traits.moe_layers[index] else self.mlp(f"{prefix}.mlp"),
        )

    def norm(self, module: str, eps: float) -> RMSNorm:
        linear = self.backends.linear
        weight = self.weights.vector(f"{module}.weight").to(linear.device, linear.dtype)
        return RMSNorm(self.backends.ops, weight, eps)

    def linear(self, *modules: str) -> Linear:
        """The matrices of `modules`, which share their input, with the biases that are stored."""
        biases = [self.weights.vector(f"{m}.bias") if f"{m}.bias" in self.weights else None for m in modules]
        return Linear(self.backends.linear, [self.weights.matrix(f"{m}.weight") for m in modules], biases)

    def gqa(self, traits: GQATraits, index: int, prefix: str, rotary: Rotary) -> GQAAttention:
        def norm(name: str) -> RMSNorm | None:
            return self.norm(f"{prefix}.{name}", self.traits.norm_eps) if traits.qk_norm else None

        return GQAAttention(
            traits=traits,
            layer=index,
            ops=self.backends.ops,
            rotary=rotary,
            qkv_proj=self.linear(f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            o_proj=self.linear(f"{prefix}.o_proj"),
        )

    def mla(self, traits: MLATraits, index: int, prefix: str, rotary: Rotary) -> MLAAttention:
        low_rank = traits.q_lora_rank is not None
        queries = f"{prefix}.q_a_proj" if low_rank else f"{prefix}.q_proj"
        linear = self.backends.linear
        key, value = self.kv_b(traits, prefix)
        return MLAAttention(
            traits=traits,
            layer=index,
            ops=self.backends.ops,
            rotary=rotary,
            qkv_a_proj=self.linear(queries, f"{prefix}.kv_a_proj_with_mqa"),
            q_a_norm=self.norm(f"{prefix}.q_a_layernorm", traits.inner_eps) if low_rank else None,
            q_b_proj=self.linear(f"{prefix}.q_b_proj") if low_rank else None,
            kv_a_norm=self.norm(f"{prefix}.kv_a_layernorm", traits.inner_eps),
            absorb_key=linear.prepare_headwise(key.transpose(1, 2)),
            project_value=linear.prepare_headwise(value),
            key_up=key.to(linear.device, linear.dtype).contiguous() if self.backends.expands_latent else None,
            value_up=value.to(linear.device, linear.dtype).contiguous() if self.backends.expands_latent else None,
            o_proj=self.linear(f"{prefix}.o_proj"),
        )

    def kv_b(self, traits: MLATraits, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [heads, nope, kv_lora_rank] and W_UV [heads, v, kv_lora_rank]."""
        dtype = self.backends.linear.dtype
        if f"{prefix}.k_b_proj.weight" in self.weights:
            key = self.weights.matrix(f"{prefix}.k_b_proj.weight").dequantize(dtype)
            return key.transpose(1, 2), self.weights.matrix(f"{prefix}.v_b_proj.weight").dequantize(dtype)
        both = self.weights.matrix(f"{prefix}.kv_b_proj.weight").dequantize(dtype)
        key, value = both.unflatten(0, (traits.num_heads, -1)).split(
            [traits.qk_nope_head_dim, traits.v_head_dim], dim=1
        )
        return key, value

    def mlp(self, prefix: str) -> MLP:
        return MLP(
            self.backends.ops,
            self.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            self.linear(f"{prefix}.down_proj"),
        )

    def moe(self, prefix: str) -> MoE:
        moe, backend = self.traits.moe, self.backends.moe
        assert moe is not None and backend is not None
        stored = [
            self.weights.experts(f"{prefix}.experts", projection, moe.num_experts)
            for projection in ("gate_proj", "up_proj", "down_proj")
        ]
        bias = self.weights.vector(f"{prefix}.gate.e_score_correction_bias") if moe.correction_bias else None
        return MoE(
            traits=moe,
            gate=self.linear(f"{prefix}.gate"),
            correction_bias=None if bias is None else bias.to(self.backends.linear.device),
            experts=backend.prepare(*stored),
            shared_experts=self.mlp(f"{prefix}.shared_experts") if moe.num_shared_experts else None,
            route=self.backends.route,
        )

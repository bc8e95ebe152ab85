"""Random weights for the tiny checkpoints, scaled so that logits are of order 1 to 10 and every part has a say in them.

Norms are far from 1, latents and embeddings are small enough that an eps matters, biases move the router's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]
Named = Iterator[tuple[str, Array]]


class RandomWeights:
    """The tensors of one model, by the names its publishers use."""

    def __init__(self, rng: np.random.Generator, config: Mapping[str, Any]) -> None:
        self.rng, self.config = rng, config
        self.hidden: int = config["hidden_size"]

    def matrix(self, rows: int, columns: int, gain: float = 1.5) -> Array:
        drawn: Array = (self.rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)
        return drawn

    def vector(self, size: int, mean: float, deviation: float = 0.3) -> Array:
        return (mean + deviation * self.rng.standard_normal(size)).astype(np.float32)

    def model(self) -> Named:
        c = self.config
        tied = c["tie_word_embeddings"]
        yield "model.embed_tokens.weight", self.matrix(c["vocab_size"], self.hidden, 2.0 if tied else 0.3)
        for layer in range(c["num_hidden_layers"]):
            for name, values in self.layer(moe=_is_moe(c, layer)):
                yield f"model.layers.{layer}.{name}", values
        yield "model.norm.weight", self.vector(self.hidden, 1.0)
        if not tied:
            yield "lm_head.weight", self.matrix(c["vocab_size"], self.hidden)

    def layer(self, moe: bool) -> Named:
        yield "input_layernorm.weight", self.vector(self.hidden, 1.0)
        yield "post_attention_layernorm.weight", self.vector(self.hidden, 1.0)
        attention = self.mla() if "kv_lora_rank" in self.config else self.gqa()
        for name, values in attention:
            yield f"self_attn.{name}", values
        for name, values in self.moe() if moe else self.mlp(self.config["intermediate_size"]):
            yield f"mlp.{name}", values

    def gqa(self) -> Named:
        c = self.config
        head_dim = c.get("head_dim") or self.hidden // c["num_attention_heads"]
        width, kv_width = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
        for name, rows in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield f"{name}.weight", self.matrix(rows, self.hidden)
            if c["attention_bias"] or c["model_type"] == "qwen2":
                yield f"{name}.bias", self.vector(rows, 0.0)
        yield "o_proj.weight", self.matrix(self.hidden, width)
        if c["attention_bias"]:
            yield "o_proj.bias", self.vector(self.hidden, 0.0)
        if c["model_type"].startswith("qwen3"):
            yield "q_norm.weight", self.vector(head_dim, 1.0)
            yield "k_norm.weight", self.vector(head_dim, 1.0)

    def mla(self) -> Named:
        c = self.config
        heads, rank, low, rope = (
            c[key] for key in ("num_attention_heads", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
        )
        width = heads * (c["qk_nope_head_dim"] + rope)
        if low is None:
            yield "q_proj.weight", self.matrix(width, self.hidden)
        else:
            yield "q_a_proj.weight", self.matrix(low, self.hidden, 0.02)
            yield "q_a_layernorm.weight", self.vector(low, 1.0)
            yield "q_b_proj.weight", self.matrix(width, low)
        latent, k_rope = self.matrix(rank, self.hidden, 0.02), self.matrix(rope, self.hidden)
        yield "kv_a_proj_with_mqa.weight", np.concatenate([latent, k_rope])
        yield "kv_a_layernorm.weight", self.vector(rank, 1.0)
        yield "kv_b_proj.weight", self.matrix(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
        yield "o_proj.weight", self.matrix(self.hidden, heads * c["v_head_dim"])
        if c["attention_bias"]:
            yield "q_a_proj.bias", self.vector(low, 0.0, 0.01)
            yield "kv_a_proj_with_mqa.bias", self.vector(rank + rope, 0.0, 0.01)
            yield "o_proj.bias", self.vector(self.hidden, 0.0)

    def mlp(self, width: int, prefix: str = "") -> Named:
        for name, rows, columns in (
            ("gate_proj", width, self.hidden), ("up_proj", width, self.hidden), ("down_proj", self.hidden, width)
        ):  # fmt: skip
            yield f"{prefix}{name}.weight", self.matrix(rows, columns)
            if self.config.get("mlp_bias"):
                yield f"{prefix}{name}.bias", self.vector(rows, 0.0)

    def moe(self) -> Named:
        c = self.config
        experts, width = c.get("n_routed_experts") or c["num_experts"], c["moe_intermediate_size"]
        yield "gate.weight", self.matrix(experts, self.hidden)
        if c["model_type"] not in ("deepseek_v2", "qwen3_moe"):
            # With groups, many biased scores are negative: a left-out group must score -inf, not 0.
            yield "gate.e_score_correction_bias", self.vector(experts, -0.6 if c["n_group"] > 1 else 0.0)
        for expert in range(experts):
            yield from self.mlp(width, f"experts.{expert}.")
        if c.get("n_shared_experts"):
            yield from self.mlp(width * c["n_shared_experts"], "shared_experts.")

    def mtp_layer(self, tensors: Tensors) -> Tensors:
        """Stored after the last layer in DeepSeek-V3's files, for speculation; the decoder must pass it over."""
        prefix = f"model.layers.{self.config['num_hidden_layers']}."
        extra = {prefix + name: values for name, values in self.layer(moe=True)}
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            extra[f"{prefix}{norm}.weight"] = self.vector(self.hidden, 1.0)
        extra[prefix + "eh_proj.weight"] = self.matrix(self.hidden, 2 * self.hidden)
        extra[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        extra[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].copy()
        return extra

    def vision(self) -> Tensors:
        return {
            "vision_tower.patch_embed.proj.weight": self.matrix(32, 3 * 14 * 14).reshape(32, 3, 14, 14),
            "vision_tower.encoder.blocks.0.wqkv.weight": self.matrix(96, 32),
            "vision_tower.encoder.final_layernorm.weight": self.vector(32, 1.0),
            "mm_projector.proj.0.weight": self.matrix(128, 128),
        }


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    if "mlp_layer_types" in config:
        return bool(config["mlp_layer_types"][layer] == "sparse")
    if "n_routed_experts" in config:
        return bool(layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0)
    return "num_experts" in config and layer not in config["mlp_only_layers"]

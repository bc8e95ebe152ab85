"""The whole decoder in fp64, from a config.json and its tensors under their Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.attention import gqa, mla_absorbed, mla_naive
from tests.reference.gating import gate
from tests.reference.rope import Rope, softmax_multiplier

Array = npt.NDArray[np.float64]


class Reference:
    """A model. `margin` is the closest call the router has made so far; small ones make comparisons meaningless.

    `inner_eps` is the eps of MLA's two inner norms: the config's unless given. `absorbed` picks the form of MLA.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, npt.NDArray[Any]],
        *,
        inner_eps: float | None = None,
        absorbed: bool = False,
    ) -> None:
        self.config = dict(config.get("text_config") or config)
        self.weights = {
            name.removeprefix("language_model."): values.astype(np.float64)
            for name, values in tensors.items()
            if not name.startswith(("vision_tower.", "mm_projector."))
        }
        self.eps = float(self.config["rms_norm_eps"])
        self.inner_eps = self.eps if inner_eps is None else inner_eps
        self.absorbed = absorbed
        self.margin = np.inf
        if self.config.get("kv_lora_rank"):
            interleaved = bool(self.config.get("rope_interleave", True))
            self.rope = Rope.of(self.config, self.config["qk_rope_head_dim"], interleaved)
        else:
            self.rope = Rope.of(self.config, self.head_dim, interleaved=False)

    @classmethod
    def open(cls, path: Path, **options: Any) -> Reference:
        """From a directory with config.json and one or more safetensors files of any float type."""
        from safetensors import safe_open

        tensors = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                tensors.update({name: stored.get_tensor(name).double().numpy() for name in stored.keys()})  # noqa: SIM118
        return cls(json.loads((path / "config.json").read_text()), tensors, **options)

    @property
    def head_dim(self) -> int:
        given = self.config.get("head_dim")
        return int(given or self.config["hidden_size"] // self.config["num_attention_heads"])

    def logits(self, token_ids: Sequence[int]) -> Array:
        """[tokens, vocab] of one sequence from position 0."""
        tied = bool(self.config.get("tie_word_embeddings"))
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return self._norm(self.residuals(token_ids)[-1], "model.norm", self.eps) @ head.T

    def residuals(self, token_ids: Sequence[int]) -> list[Array]:
        """The residual stream [tokens, hidden] after each layer."""
        x = self.weights["model.embed_tokens.weight"][np.asarray(token_ids)]
        after = []
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm", self.eps)
            attention = self._mla if self.config.get("kv_lora_rank") else self._gqa
            x = x + attention(normed, prefix + "self_attn.")
            normed = self._norm(x, prefix + "post_attention_layernorm", self.eps)
            x = x + (self._moe if self._is_moe(layer) else self._mlp)(normed, prefix + "mlp.")
            after.append(x)
        return after

    def _norm(self, x: Array, module: str, eps: float) -> Array:
        normed: Array = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
        return normed * self.weights[f"{module}.weight"]

    def _linear(self, x: Array, module: str) -> Array:
        return x @ self.weights[f"{module}.weight"].T + self.weights.get(f"{module}.bias", np.float64(0))

    def _mlp(self, x: Array, prefix: str) -> Array:
        gated = self._linear(x, prefix + "gate_proj")
        return self._linear(gated / (1 + np.exp(-gated)) * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _gqa(self, x: Array, prefix: str) -> Array:
        q, k, v = (self._linear(x, f"{prefix}{name}_proj").reshape(len(x), -1, self.head_dim) for name in "qkv")
        if f"{prefix}q_norm.weight" in self.weights:
            q, k = self._norm(q, prefix + "q_norm", self.eps), self._norm(k, prefix + "k_norm", self.eps)
        positions = np.arange(len(x), dtype=np.float64)
        out = gqa(self.rope(q, positions), self.rope(k, positions), v, self.head_dim**-0.5)
        return self._linear(out.reshape(len(x), -1), prefix + "o_proj")

    def _mla(self, x: Array, prefix: str) -> Array:
        c = self.config
        heads, rank, nope, rope = (
            c[key] for key in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        positions = np.arange(len(x), dtype=np.float64)
        if c.get("q_lora_rank"):
            low = self._norm(self._linear(x, prefix + "q_a_proj"), prefix + "q_a_layernorm", self.inner_eps)
            q = self._linear(low, prefix + "q_b_proj")
        else:
            q = self._linear(x, prefix + "q_proj")
        q = q.reshape(len(x), heads, nope + rope)
        compressed = self._linear(x, prefix + "kv_a_proj_with_mqa")
        latent = self._norm(compressed[:, :rank], prefix + "kv_a_layernorm", self.inner_eps)
        k_rope = self.rope(compressed[:, None, rank:], positions)[:, 0]
        kv_b = self.weights[prefix + "kv_b_proj.weight"].reshape(heads, -1, rank)
        scale = (nope + rope) ** -0.5 * softmax_multiplier(c)
        form = mla_absorbed if self.absorbed else mla_naive
        out = form(q[..., :nope], self.rope(q[..., nope:], positions), latent, k_rope, kv_b, scale)
        return self._linear(out.reshape(len(x), -1), prefix + "o_proj")

    def _is_moe(self, layer: int) -> bool:
        c = self.config
        if not (c.get("n_routed_experts") or c.get("num_experts")):
            return False
        if c.get("mlp_layer_types"):
            return bool(c["mlp_layer_types"][layer] == "sparse")
        if "first_k_dense_replace" in c:
            return bool(layer >= c["first_k_dense_replace"] and layer % (c.get("moe_layer_freq") or 1) == 0)
        step = c.get("decoder_sparse_step") or 1
        return layer not in (c.get("mlp_only_layers") or ()) and (layer + 1) % step == 0

    def _moe(self, x: Array, prefix: str) -> Array:
        c = self.config
        bias = self.weights.get(prefix + "gate.e_score_correction_bias")
        groups = c.get("n_group") or 1
        rule = "none" if groups == 1 or c.get("topk_method") == "greedy" else "max" if bias is None else "top2_sum"
        routing = gate(
            self._linear(x, prefix + "gate"),
            top_k=c["num_experts_per_tok"],
            scoring="softmax" if bias is None else "sigmoid",
            bias=bias,
            num_groups=groups,
            topk_groups=c.get("topk_group") or 1,
            group_rule=rule,
            normalize=bool(c.get("norm_topk_prob")),
            scaling=c.get("routed_scaling_factor") or 1.0,
        )
        self.margin = min(self.margin, float(routing.margin.min()))
        out = np.zeros_like(x)
        for expert in np.unique(routing.experts):
            token, slot = np.nonzero(routing.experts == expert)
            out[token] += self._mlp(x[token], f"{prefix}experts.{expert}.") * routing.weights[token, slot, None]
        return out + self._mlp(x, prefix + "shared_experts.") if c.get("n_shared_experts") else out

"""A plain statement of the DeepSeek-V3 decoder for training: Multi-head Latent Attention, MoE, YaRN. Used by train.py.

It shares no code with the engine, on purpose: the two are compared (tests, MODEL.md). Parameters carry the names and
shapes of DeepSeek-V3's checkpoints, except that the experts of a layer are stacked until `checkpoint` splits them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 6144,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
BIAS_SPREAD = 0.3  # of sigmoid scores, which lie between 0 and 1: enough to decide most choices at first


def yarn_frequencies(config: dict[str, Any]) -> Tensor:
    """Angle per position of each rotated pair, [rope_dim / 2]: YaRN, arXiv 2309.00071, section 3.2 ("NTK-by-parts").

    Pairs that turn more than `beta_fast` times within the original context keep their frequency, those that turn less
    than `beta_slow` times are slowed by `factor`, and a linear ramp lies between.
    """
    dim, base, yarn = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn["original_max_position_embeddings"] / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(yarn["beta_slow"])), dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float32)
    slowed = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = base ** (-2 * pair / dim)
    return frequency * (1 - slowed) + frequency / yarn["factor"] * slowed


def softmax_scale(config: dict[str, Any]) -> float:
    """1 / sqrt(192), times YaRN's temperature squared: once for the queries, once for the keys."""
    yarn = config["rope_scaling"]
    mscale = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1.0
    return float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * mscale**2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours are a pair, as DeepSeek stores them. x [batch, length, heads, rope]; cos, sin [length, rope / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Multi-head Latent Attention in its expanded form; DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.latent = config["num_attention_heads"], config["kv_lora_rank"]
        self.nope, self.rope, self.v = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        hidden, q_rank, eps = config["hidden_size"], config["q_lora_rank"], config["rms_norm_eps"]
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=eps)
        self.q_b_proj = nn.Linear(q_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.latent, eps=eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v, hidden, bias=False)
        self.scale = softmax_scale(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split((self.nope, self.v), -1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        # Values are padded to the keys' width: the flash kernels want one width for all three.
        v = F.pad(v, (0, q.shape[-1] - self.v)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.o_proj(out[..., : self.v].transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, gates: Tensor | None = None) -> Tensor:
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner if gates is None else inner * gates)


class Router(nn.Module):
    """Sigmoid scores; experts are chosen with a correction bias, weighted without; arXiv 2412.19437, section 2.1.2.

    The bias starts spread over +-BIAS_SPREAD, in another order in each layer, so that the routers learn to work with
    it: from zero it stayed so near to zero that forgetting it cost nothing, and no test could see that (train.py).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.top_k, self.scaling = config["num_experts_per_tok"], config["routed_scaling_factor"]
        experts = config["n_routed_experts"]
        self.weight = nn.Parameter(torch.empty(experts, config["hidden_size"]))
        bias = torch.linspace(-BIAS_SPREAD, BIAS_SPREAD, experts)[torch.randperm(experts)]
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of every expert for every token, zero where it is not chosen, and the scores; [..., experts]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return weights / weights.sum(-1, keepdim=True) * self.scaling, scores


class MoE(nn.Module):
    """Routed experts and a shared one. The experts lie side by side in one wide MLP, and a token's unchosen columns are
    multiplied by zero: with experts this small that is faster than sorting tokens, and it is the same function."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.width = config["moe_intermediate_size"]
        self.gate = Router(config)
        self.experts = MLP(config["hidden_size"], config["n_routed_experts"] * self.width)
        self.shared_experts = MLP(config["hidden_size"], config["n_shared_experts"] * self.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output [..., hidden]; and of each expert its load (1 is the mean) and its mean score, [2, experts]."""
        weights, scores = self.gate(x)
        routed = self.experts(x, weights.to(x.dtype).repeat_interleave(self.width, -1))
        load = (weights > 0).flatten(0, -2).sum(0).float()
        return routed + self.shared_experts(x), torch.stack((load / load.mean(), scores.flatten(0, -2).mean(0)))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, dense = config["hidden_size"], index < config["first_k_dense_replace"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.mlp: nn.Module = MLP(hidden, config["intermediate_size"]) if dense else MoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, dropout, self.training)
        out = self.mlp(self.post_attention_layernorm(x))
        out, routing = out if isinstance(out, tuple) else (out, None)  # a dense layer routes nothing
        return x + F.dropout(out, dropout, self.training), routing


class Decoder(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocab], and the experts' loads (1 is a layer's mean) and mean
    scores, each [MoE layers, experts]. Gradients go through the scores; the loads are counts.
    """

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), yarn_frequencies(config))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config["initializer_range"])
            if name.endswith("gate.weight"):
                nn.init.normal_(parameter, std=3 * config["initializer_range"])
        for layer in self.layers:  # both ends of a residual branch start small: x grows with depth otherwise
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.data /= math.sqrt(2 * config["num_hidden_layers"])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = tokens.shape[1]
        x = F.dropout(self.embed_tokens(tokens), self.dropout, self.training)
        found = []
        for layer in self.layers:
            x, routing = layer(x, self.cos[:length], self.sin[:length], self.dropout)
            if routing is not None:
                found.append(routing)
        loads, scores = torch.stack(found, 1)
        return self.lm_head(self.norm(x)), loads, scores

    @torch.no_grad()
    def balance(self, loads: Tensor, rate: float) -> None:
        """Auxiliary-loss-free balancing, arXiv 2408.15664: an overloaded expert's bias goes down a step, an idle's up.

        `loads` [MoE layers, experts] as `forward` gives them: relative to the mean.
        """
        routers = [layer.mlp.gate for layer in self.layers if isinstance(layer.mlp, MoE)]
        for router, load in zip(routers, loads, strict=True):
            router.e_score_correction_bias += rate * torch.sign(1 - load)

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors under DeepSeek-V3's names: bf16, the router's bias in fp32."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            full = name if name.startswith("lm_head") else f"model.{name}"
            if ".experts." not in name:
                dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
                tensors[full] = tensor.detach().to("cpu", dtype).contiguous()
                continue
            prefix, projection = full.split(".experts.")
            parts = tensor.chunk(self.config["n_routed_experts"], 1 if projection.startswith("down") else 0)
            for index, part in enumerate(parts):
                tensors[f"{prefix}.experts.{index}.{projection}"] = part.detach().to("cpu", torch.bfloat16).contiguous()
        return tensors

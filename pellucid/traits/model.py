"""What a model *is*, as plain frozen values. Read by selection, scheduling, loading and the decoder.

Nothing here knows an architecture's name: two checkpoints with equal traits get equal plans whatever
they are called. Values come from `traits.config`, which reads config.json and tensor headers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Scoring = Literal["softmax", "sigmoid"]
GroupRule = Literal["none", "max", "top2_sum"]


@dataclass(frozen=True, slots=True)
class RopeTraits:
    """Rotary position embedding. `dim` is the rotated width of one head.

    `interleaved`: the weights pair dims (2i, 2i+1), as DeepSeek's do; otherwise (i, i + dim/2).
    The YaRN fields follow https://arxiv.org/abs/2309.00071, with DeepSeek's `mscale` pair.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @property
    def cos_sin_multiplier(self) -> float:
        """What cos and sin are multiplied by: 1 unless YaRN says otherwise.

        With both `mscale` and `mscale_all_dim`, their ratio (1.0 in every published MLA model); with
        neither, YaRN's own 0.1 ln(factor) + 1.
        """
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_multiplier(self) -> float:
        """What DeepSeek-style YaRN multiplies the softmax scale by: m(mscale_all_dim) squared, else 1."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 when the context is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class MLATraits:
    """Multi-head Latent Attention: one latent row of `kv_lora_rank + rope` per token, shared by all heads.

    `inner_eps` is the eps of the two inner RMSNorms. HF builds them with 1e-6, vLLM and SGLang with the
    config's `rms_norm_eps`; here it is explicit, and defaults to the config's value.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    inner_eps: float
    rope: RopeTraits
    bias: bool | None = False

    kind: Literal["mla"] = "mla"

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_head_size(self) -> int:
        """Width of one row of the KV cache, latent first, rope last."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_heads_in_cache(self) -> int:
        return 1

    @property
    def softmax_scale(self) -> float:
        """From the *unabsorbed* width, times YaRN's squared mscale: kernels' own defaults are wrong here."""
        return float(self.qk_head_dim**-0.5) * self.rope.softmax_multiplier

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:
        """Cache elements per token and layer on one rank: the latent row is replicated, never divided."""
        return self.latent_head_size


@dataclass(frozen=True, slots=True)
class GQATraits:
    """Grouped-query attention; `num_kv_heads == num_heads` is plain multi-head.

    `qk_norm` and `qkv_bias` are None when only the tensors can tell and no tensor header was given.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeTraits
    qk_norm: bool | None = False
    qkv_bias: bool | None = False
    o_bias: bool | None = False

    kind: Literal["gqa"] = "gqa"

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def kv_heads_in_cache(self) -> int:
        return self.num_kv_heads

    def kv_elements_per_token(self, tensor_parallel_size: int = 1) -> int:
        """Cache elements (K and V) per token and layer on one rank; heads are divided, at least one stays."""
        return 2 * max(1, self.num_kv_heads // tensor_parallel_size) * self.head_dim


@dataclass(frozen=True, slots=True)
class MoETraits:
    """Mixture of Experts. `scoring` is None when only the tensors can tell and no header was given.

    `group_rule`: how a group of experts is scored before the best `topk_groups` groups are kept:
    the largest score in it (V2), or the sum of its two largest biased scores (V3).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared_experts: int
    shared_intermediate_size: int
    scoring: Scoring | None
    correction_bias: bool | None
    normalize: bool
    scaling: float
    num_groups: int = 1
    topk_groups: int = 1
    group_rule: GroupRule = "none"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one class of tensors is stored: `scheme` is bf16, fp16, fp32, fp8, int4, nvfp4, mxfp4, q4_1 ...

    `group_size` counts elements along K that share a scale; of an fp8 block it is the side (128 means 128 x 128).
    `scale_per` is how far one scale reaches where there are no groups: the whole tensor or one output channel.
    """

    scheme: str
    group_size: int | None = None
    symmetric: bool = True
    scale_per: Literal["tensor", "channel"] | None = None

    def __str__(self) -> str:
        if self.scale_per is not None:
            return f"{self.scheme} per {self.scale_per}"
        if self.group_size is None:
            return self.scheme
        if self.scheme == "fp8":
            return f"fp8 block {self.group_size}x{self.group_size}"
        return f"{self.scheme} group {self.group_size}" + (" symmetric" if self.symmetric else "")


@dataclass(frozen=True, slots=True)
class WeightTraits:
    """The storage format of each class of weights, as found in the tensors (or, without them, the config).

    A class that mixes formats is named by its most frequent one; `exceptions` lists the kinds of module that some
    layer stores otherwise, for instance `("self_attn.o_proj", nvfp4)`.
    """

    attention: WeightFormat
    dense_mlp: WeightFormat
    routed_experts: WeightFormat | None
    shared_experts: WeightFormat | None
    lm_head: WeightFormat
    embedding: WeightFormat
    source: Literal["tensors", "config"] = field(default="config", compare=False)
    exceptions: tuple[tuple[str, WeightFormat], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Everything that decides how a model is computed. `moe_layers[i]` says whether layer i is MoE."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    norm_eps: float
    attention: MLATraits | GQATraits
    intermediate_size: int
    moe: MoETraits | None
    moe_layers: tuple[bool, ...]
    max_position: int
    tied_embeddings: bool
    mlp_bias: bool | None
    weights: WeightTraits
    dtype: str
    mtp_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_dense_layers(self) -> int:
        return self.moe_layers.count(False)

    def kv_bytes_per_token(self, itemsize: int, tensor_parallel_size: int = 1) -> int:
        """Bytes of KV cache per token on one rank, all layers. `itemsize` is the cache dtype's, in bytes."""
        return self.num_layers * self.attention.kv_elements_per_token(tensor_parallel_size) * itemsize

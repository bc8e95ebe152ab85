"""Traits of a few published models, written by hand, and plans for them. Used by the tests of selection."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from pellucid.hardware import Hardware, load_hardware
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import Decision, ExecutionPlan, Rejection
from pellucid.selection.resolve import resolve
from pellucid.traits.model import (
    GQATraits,
    MLATraits,
    ModelTraits,
    MoETraits,
    RopeTraits,
    WeightFormat,
    WeightTraits,
)

BF16 = WeightFormat("bf16")
INT4 = WeightFormat("int4", 32, True)

KIMI_K25 = ModelTraits(
    hidden_size=7168,
    num_layers=61,
    vocab_size=163840,
    norm_eps=1e-5,
    attention=MLATraits(
        num_heads=64,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=1536,
        inner_eps=1e-5,
        rope=RopeTraits(64, 50000.0, "yarn", True, 64.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    ),
    intermediate_size=18432,
    moe=MoETraits(384, 8, 2048, 1, 2048, "sigmoid", True, True, 2.827),
    moe_layers=(False,) + (True,) * 60,
    max_position=262144,
    tied_embeddings=False,
    mlp_bias=False,
    weights=WeightTraits(BF16, BF16, INT4, BF16, BF16, BF16),
    dtype="bfloat16",
    mtp_layers=0,
    bos_token_id=163584,
    eos_token_ids=(163585,),
)

V2_LITE = replace(
    KIMI_K25,
    hidden_size=2048,
    num_layers=27,
    vocab_size=102400,
    attention=replace(KIMI_K25.attention, num_heads=16, q_lora_rank=None),
    intermediate_size=10944,
    moe=MoETraits(64, 6, 1408, 2, 2816, "softmax", False, False, 1.0),
    moe_layers=(False,) + (True,) * 26,
    max_position=163840,
    weights=WeightTraits(BF16, BF16, BF16, BF16, BF16, BF16),
)

SMALL_DENSE = ModelTraits(
    hidden_size=1024,
    num_layers=28,
    vocab_size=32000,
    norm_eps=1e-6,
    attention=GQATraits(num_heads=16, num_kv_heads=8, head_dim=128, rope=RopeTraits(128, 1e6)),
    intermediate_size=3072,
    moe=None,
    moe_layers=(False,) * 28,
    max_position=32768,
    tied_embeddings=True,
    mlp_bias=False,
    weights=WeightTraits(BF16, BF16, None, None, BF16, BF16),
    dtype="bfloat16",
    mtp_layers=0,
    bos_token_id=1,
    eos_token_ids=(2,),
)


@lru_cache
def machine(name: str) -> Hardware:
    return load_hardware(name)


def plan(model: ModelTraits, where: str | Hardware, **flags: Any) -> ExecutionPlan:
    hardware = machine(where) if isinstance(where, str) else where
    return resolve(EngineArgs("model", **flags), model, hardware)


def rejection(decision: Decision, candidate: str) -> Rejection:
    return next(r for r in decision.rejected if r.candidate == candidate)


def kinds(decision: Decision, candidate: str) -> set[str]:
    """The kinds of misfit of a candidate; none of the one that was taken."""
    return set() if decision.value == candidate else {m.kind for m in rejection(decision, candidate).misfits}

"""What has to be chosen for a model: its slots, each described by the traits that define it. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pellucid.core import PlanError
from pellucid.selection.args import EngineArgs, flag_name
from pellucid.selection.choose import Slot
from pellucid.selection.misfits import Need
from pellucid.selection.registry import candidates
from pellucid.traits.backend import BackendTraits, Op, Phase
from pellucid.traits.model import MLATraits, ModelTraits, WeightFormat
from pellucid.traits.quantization import module_class


def make_slots(
    args: EngineArgs,
    need: Need,
    backends: Sequence[BackendTraits],
    decode_buckets: tuple[int, ...],
    step_buckets: tuple[int, ...],
) -> tuple[Slot, ...]:
    """Every op of the model that needs a backend, in the order of a layer.

    `decode_buckets` count sequences of a decode step, `step_buckets` tokens of any step.
    Raises PlanError when a flag names no backend.
    """
    model = need.model
    slots = [
        _attention(args, need, backends, "prefill", step_buckets),
        _attention(args, need, backends, "decode", decode_buckets),
    ]
    if model.moe is not None:
        forms = expert_formats(model)
        experts = f"{model.moe.num_experts} experts of width {model.moe.intermediate_size}, {model.moe.top_k} per token"
        asked = _known(args, "moe_backend", "moe", backends)
        traits = f"{experts}, stored as {' and '.join(map(str, forms))}"
        slots.append(Slot("moe", "moe", "moe_backend", replace(need, weights=forms), step_buckets, traits, asked))
    asked = _known(args, "linear_backend", "linear", backends)
    for scheme, classes in linear_classes(model).items():
        traits = f"{', '.join(classes)} stored as {scheme}"
        weights = replace(need, weights=tuple(dict.fromkeys(classes.values())))
        slots.append(Slot(f"linear.{scheme}", "linear", "linear_backend", weights, step_buckets, traits, asked))
    if need.tensor_parallel_size > 1:
        traits = f"{need.tensor_parallel_size} ranks each sum rows of hidden size {model.hidden_size} twice a layer"
        slots.append(Slot("all_reduce", "all_reduce", "all_reduce_backend", need, step_buckets, traits))
    return tuple(slots)


def expert_formats(model: ModelTraits) -> tuple[WeightFormat, ...]:
    """Every format that routed experts are stored in, the most frequent first: one backend serves them all."""
    weights = model.weights
    others = (form for kind, form in weights.exceptions if module_class(kind) == "routed_experts")
    return tuple(dict.fromkeys((weights.routed_experts or weights.dense_mlp, *others)))


def linear_classes(model: ModelTraits) -> dict[str, dict[str, WeightFormat]]:
    """The classes of linear weights by scheme, and the modules stored otherwise: one backend serves each scheme."""
    weights = model.weights
    classes = [("attention", weights.attention)]
    if model.num_dense_layers:
        classes.append(("dense MLP", weights.dense_mlp))
    if model.moe is not None and model.moe.num_shared_experts:
        classes.append(("shared experts", weights.shared_experts or weights.dense_mlp))
    classes.append(("lm_head", weights.embedding if model.tied_embeddings else weights.lm_head))
    classes += [(kind, form) for kind, form in weights.exceptions if module_class(kind) != "routed_experts"]
    by_scheme: dict[str, dict[str, WeightFormat]] = {}
    for name, form in classes:
        by_scheme.setdefault(form.scheme, {})[name] = form
    return by_scheme


def _attention(
    args: EngineArgs, need: Need, backends: Sequence[BackendTraits], phase: Phase, buckets: tuple[int, ...]
) -> Slot:
    name = _known(args, "attention_backend", "attention", backends)
    serves = name is None or phase in next(b.phases for b in candidates(backends, "attention") if b.name == name)
    return Slot(
        name=f"attention.{phase}",
        op="attention",
        flag="attention_backend",
        need=replace(need, phase=phase),
        buckets=buckets,
        traits=describe_attention(need.model, need.tensor_parallel_size),
        asked=name if serves else None,
        aside="" if serves else f"{name}, asked for, does not serve {phase}",
    )


def _known(args: EngineArgs, field: str, op: Op, backends: Sequence[BackendTraits]) -> str | None:
    name: str | None = getattr(args, field)
    names = [b.name for b in candidates(backends, op)]
    if name is not None and name not in names:
        raise PlanError(f"{flag_name(field)} {name}: no such {op} backend; known: {', '.join(names)}")
    return name


def describe_attention(model: ModelTraits, tensor_parallel_size: int = 1) -> str:
    """One line of the attention's traits as a kernel sees them."""
    a = model.attention
    share = f" per rank ({a.num_heads} / {tensor_parallel_size})" if tensor_parallel_size > 1 else ""
    heads = f"{a.num_heads // tensor_parallel_size} query heads{share}"
    if isinstance(a, MLATraits):
        return f"MLA: kv_lora_rank {a.kv_lora_rank}, rope {a.qk_rope_head_dim}, nope {a.qk_nope_head_dim}, {heads}"
    return f"GQA: head_dim {a.head_dim}, {a.num_kv_heads} KV heads in all, {heads}"


def describe_model(model: ModelTraits) -> tuple[str, ...]:
    """The traits a reader wants beside a plan, one line per subject, without any model's name."""
    lines = [
        f"{model.num_layers} layers, hidden {model.hidden_size}, vocabulary {model.vocab_size}, "
        f"context {model.max_position}",
        describe_attention(model),
    ]
    moe = model.moe
    if moe is not None:
        lines.append(
            f"MoE in {model.num_layers - model.num_dense_layers} layers: {moe.num_experts} experts of width "
            f"{moe.intermediate_size}, {moe.top_k} per token, {moe.num_shared_experts} shared, {moe.scoring} scores, "
            f"{moe.num_groups} group{'s' if moe.num_groups > 1 else ''}"
        )
    weights = model.weights
    named = {"attention": weights.attention, "lm_head": weights.lm_head}
    if model.num_dense_layers:
        named["dense MLP"] = weights.dense_mlp
    if weights.routed_experts is not None:
        named["routed experts"] = weights.routed_experts
    if weights.shared_experts is not None:
        named["shared experts"] = weights.shared_experts
    listed = [f"{name} {form}" for name, form in (*named.items(), *weights.exceptions)]
    lines.append(f"weights ({weights.source}): {', '.join(listed)}")
    if model.mtp_layers:
        lines.append(f"{model.mtp_layers} multi-token prediction layers")
    return tuple(lines)

"""The memory bill of one rank: weights by class, room for activations, and the KV tokens that fit. Called by `resolve`.

Every line carries its formula, so that a user can check it by hand. Sizes are bytes, on one tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pellucid.hardware.facts import Hardware, format_bytes
from pellucid.selection.args import ITEMSIZE
from pellucid.selection.plan import BillItem, MemoryBill
from pellucid.traits.model import GQATraits, MLATraits, ModelTraits, WeightFormat
from pellucid.traits.quantization import ModuleClass, module_class
from pellucid.traits.tensors import TensorIndex, canonical_name, layer_of

UTILIZATION = {"cuda": 0.9, "cpu": 0.5}
"""Share of the device's memory the engine takes when not asked: a host is shared with other programs."""

RUNTIME_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
"""An allowance for the CUDA context, graphs and libraries, or the Python process; not measured."""

_BLOCK_BYTES = {
    **{"q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34)},
    **{"q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210)},
}
"""GGUF block formats: weights per block, bytes per block."""

_CLASSES: Mapping[ModuleClass, str] = {
    "attention": "attention",
    "dense_mlp": "dense MLP",
    "routed_experts": "routed experts",
    "shared_experts": "shared experts",
    "router": "router",
    "embedding": "embedding",
    "lm_head": "lm_head",
}


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Weights of one class on one rank, and the format they are stored in."""

    name: str
    count: int
    form: WeightFormat
    formula: str


def bytes_per_weight(form: WeightFormat) -> float:
    """Stored bytes of one weight, scales included; two when the scheme is not known.

    A group of int4 has a bf16 scale, one of nvfp4 an e4m3 and one of mxfp4 an e8m0 scale; a block of fp8 an fp32 one.
    """
    if form.scheme in _BLOCK_BYTES:
        weights, size = _BLOCK_BYTES[form.scheme]
        return size / weights
    if form.scheme == "int4":
        return 0.5 + 2 / (form.group_size or 128)
    if form.scheme in ("nvfp4", "mxfp4"):
        return 0.5 + 1 / (form.group_size or (16 if form.scheme == "nvfp4" else 32))
    if form.scheme == "fp8":
        return 1 + (4 / form.group_size**2 if form.group_size else 0)
    return float(ITEMSIZE.get(form.scheme, 2))


def count_weights(model: ModelTraits, tensor_parallel_size: int = 1) -> tuple[WeightCount, ...]:
    """Weights of each class on one rank.

    Heads, MLP widths, expert widths and the vocabulary are divided; latent projections and the router are copies.
    """
    tp, hidden, forms = tensor_parallel_size, model.hidden_size, model.weights
    text = f"{model.num_layers} layers x {_attention(model, 1)}"
    counts = [WeightCount("attention", model.num_layers * _attention(model, tp), forms.attention, text)]
    if model.num_dense_layers:
        dense = model.num_dense_layers * 3 * hidden * rank_share(model.intermediate_size, tp)
        text = f"{model.num_dense_layers} layers x 3 x {hidden} x {model.intermediate_size}"
        counts.append(WeightCount("dense MLP", dense, forms.dense_mlp, text))
    if model.moe is not None:
        layers, moe = model.num_layers - model.num_dense_layers, model.moe
        routed = layers * moe.num_experts * 3 * hidden * rank_share(moe.intermediate_size, tp)
        text = f"{layers} layers x {moe.num_experts} experts x 3 x {hidden} x {moe.intermediate_size}"
        counts.append(WeightCount("routed experts", routed, forms.routed_experts or forms.dense_mlp, text))
        if moe.num_shared_experts:
            shared = layers * 3 * hidden * rank_share(moe.shared_intermediate_size, tp)
            text = f"{layers} layers x 3 x {hidden} x {moe.shared_intermediate_size}"
            counts.append(WeightCount("shared experts", shared, forms.shared_experts or forms.dense_mlp, text))
        router = layers * hidden * moe.num_experts
        text = f"{layers} layers x {hidden} x {moe.num_experts}, a copy per rank"
        counts.append(WeightCount("router", router, WeightFormat("bf16"), text))
    vocabulary = rank_share(model.vocab_size, tp) * hidden
    text = f"{model.vocab_size} x {hidden}"
    counts.append(WeightCount("embedding", vocabulary, forms.embedding, text))
    if not model.tied_embeddings:
        counts.append(WeightCount("lm_head", vocabulary, forms.lm_head, text))
    return tuple(counts)


def _attention(model: ModelTraits, tp: int) -> int:
    """Weights of one attention layer on one rank."""
    a, hidden = model.attention, model.hidden_size
    heads = rank_share(a.num_heads, tp)
    if isinstance(a, MLATraits):
        queries = heads * a.qk_head_dim
        q = hidden * queries if a.q_lora_rank is None else a.q_lora_rank * (hidden + queries)
        kv = hidden * a.latent_head_size + a.kv_lora_rank * heads * (a.qk_nope_head_dim + a.v_head_dim)
        return q + kv + heads * a.v_head_dim * hidden
    kv_heads = max(1, a.num_kv_heads // tp)
    return hidden * a.head_dim * (2 * heads + 2 * kv_heads)


def rank_share(width: int, tp: int) -> int:
    """What one of `tp` ranks holds of a divided width; the last ranks pad where it does not divide."""
    return -(-width // tp)


def kv_formula(model: ModelTraits, kv_dtype: str, tensor_parallel_size: int) -> str:
    """How the bytes of KV per token and rank come about, in words."""
    a, itemsize = model.attention, ITEMSIZE[kv_dtype]
    if isinstance(a, GQATraits):
        heads = max(1, a.num_kv_heads // tensor_parallel_size)
        return f"{model.num_layers} layers x 2 x {heads} kv heads x {a.head_dim} x {itemsize} bytes ({kv_dtype})"
    copied = ", the same on every rank" if tensor_parallel_size > 1 else ""
    row = f"(kv_lora_rank {a.kv_lora_rank} + rope {a.qk_rope_head_dim})"
    return f"{model.num_layers} layers x {row} x {itemsize} bytes ({kv_dtype}){copied}"


def activation_bytes(model: ModelTraits, dtype: str, tokens: int, sequences: int, tp: int) -> BillItem:
    """An estimate of the largest step's temporaries: the widest layer's rows, and fp32 logits of every sequence."""
    widest = max(
        2 * rank_share(model.intermediate_size, tp), rank_share(model.attention.num_heads, tp) * 3 * _query_width(model)
    )
    if model.moe is not None:
        widest = max(widest, model.moe.top_k * (2 * rank_share(model.moe.intermediate_size, tp) + model.hidden_size))
    rows = tokens * (4 * model.hidden_size + widest) * ITEMSIZE[dtype]
    logits = sequences * model.vocab_size * 4 * 2
    text = (
        f"estimate: {tokens} tokens x (4 x {model.hidden_size} + {widest}) x {ITEMSIZE[dtype]} bytes, "
        f"and logits of {sequences} sequences x {model.vocab_size} x 8 bytes"
    )
    return BillItem("activations", rows + logits, text)


def _query_width(model: ModelTraits) -> int:
    a = model.attention
    return a.latent_head_size if isinstance(a, MLATraits) else a.head_dim


def weight_items(
    model: ModelTraits,
    tensor_parallel_size: int,
    stored: Mapping[str, int] | None = None,
    expanded: Mapping[str, str] | None = None,
) -> tuple[BillItem, ...]:
    """Bytes of each class of weights on one rank.

    `stored`: bytes of whole classes as found in the checkpoint's tensors; with one rank they replace the computed
    size. With more they are scaled by the share of the class that one rank holds. `expanded`: class -> dtype, for
    classes that the chosen backend does not hold as they are stored.
    """
    expanded = expanded or {}
    whole = {w.name: w.count for w in count_weights(model)}
    items = []
    for weight in count_weights(model, tensor_parallel_size):
        found = None if stored is None else stored.get(weight.name)
        share = weight.count / whole[weight.name]
        if weight.name in expanded:
            held = expanded[weight.name]
            size, source = weight.count * ITEMSIZE[held], f"{weight.form}, held as {held}"
        elif found is not None:
            size, source = round(found * share), "from the tensors"
        else:
            size, source = round(weight.count * bytes_per_weight(weight.form)), f"{weight.form}"
        per_rank = f", {share:.3f} of it per rank" if share < 1 else ""
        items.append(BillItem(f"weights: {weight.name}", size, f"{weight.formula}; {source}{per_rank}"))
        if weight.name == "embedding" and model.tied_embeddings:
            # Rows are looked up in one table, and multiplied by another in the layout of the linear kernels.
            if "lm_head" in expanded:
                size = weight.count * ITEMSIZE[expanded["lm_head"]]
            items.append(BillItem("weights: lm_head", size, "a copy of the tied embedding for the linear kernels"))
    return tuple(items)


def stored_bytes(tensors: TensorIndex, num_layers: int) -> dict[str, int]:
    """Bytes of each class of weights as stored, by the names of `count_weights`; layers past `num_layers` left out."""
    sizes: dict[str, int] = {}
    for name, info in tensors.items():
        place = layer_of(canonical_name(name))
        found = _CLASSES.get(module_class(name.rpartition(".")[0]))
        if found is not None and (place is None or place[0] < num_layers):
            sizes[found] = sizes.get(found, 0) + info.nbytes
    return sizes


def memory_budget(hardware: Hardware, device: str, ranks: int, utilization: float | None) -> tuple[int, str]:
    """Bytes the engine may take of one device, and how that comes about.

    A GPU's memory, the smallest of those that the ranks use; or the host's, but never more than is free there now.
    """
    share = UTILIZATION[device] if utilization is None else utilization
    if device == "cuda":
        memory = min(gpu.memory_bytes for gpu in hardware.gpus[:ranks])
        return int(memory * share), f"{share:g} of the GPU's {format_bytes(memory)}"
    memory, free = hardware.cpu.memory_bytes, hardware.cpu.available_bytes
    if free < memory * share:
        return free, f"what is free now, less than {share:g} of the host's {format_bytes(memory)}"
    return int(memory * share), f"{share:g} of the host's {format_bytes(memory)}"


def memory_bill(
    model: ModelTraits,
    hardware: Hardware,
    *,
    device: str,
    tensor_parallel_size: int,
    utilization: float | None,
    dtype: str,
    kv_dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    stored: Mapping[str, int] | None = None,
    expanded: Mapping[str, str] | None = None,
) -> MemoryBill:
    """What one rank's memory goes to under these choices."""
    budget, budget_formula = memory_budget(hardware, device, tensor_parallel_size, utilization)
    items = (
        *weight_items(model, tensor_parallel_size, stored, expanded),
        activation_bytes(model, dtype, max_num_batched_tokens, max_num_seqs, tensor_parallel_size),
        BillItem("runtime", RUNTIME_BYTES[device], "an allowance, not measured"),
    )
    return MemoryBill(
        utilization=UTILIZATION[device] if utilization is None else utilization,
        budget_bytes=budget,
        budget_formula=budget_formula,
        items=items,
        kv_bytes_per_token=model.kv_bytes_per_token(ITEMSIZE[kv_dtype], tensor_parallel_size),
        kv_formula=kv_formula(model, kv_dtype, tensor_parallel_size),
    )

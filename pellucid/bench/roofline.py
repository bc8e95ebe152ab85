"""The floor of one decode step: bytes that must be read, operations that must be done, for any model on any machine.

Called by `pellucid bench roofline`, and by every benchmark that states a share of the limit. No torch, no device.
A weight is read once a step however many tokens use it, and a live row of the KV cache once. Each op takes the longer
of its bytes over the read bandwidth and its operations over the matrix rate; ops follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pellucid.core import PellucidError
from pellucid.hardware.facts import Hardware, Speeds
from pellucid.selection.args import ITEMSIZE
from pellucid.selection.memory import bytes_per_weight, rank_share
from pellucid.traits.model import MLATraits, ModelTraits, MoETraits, WeightFormat


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of work of a step, on one rank: `num_bytes` read and `flops` done in each of `layers` layers."""

    name: str
    layers: int
    num_bytes: float
    flops: float

    def seconds(self, speeds: Speeds) -> float:
        """Of all its layers."""
        return self.layers * max(self.num_bytes / speeds.read_bandwidth, self.flops / speeds.matrix_flops)


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The least that a decode step of `batch` sequences with `context` tokens each can take on these `speeds`.

    `distinct_experts` is per MoE layer; None for a dense model. `all_reduce_seconds` is that of the whole step, by a
    model of the links and not a limit; zero on one rank.
    """

    batch: int
    context: int
    ops: tuple[Op, ...]
    speeds: Speeds
    distinct_experts: float | None
    all_reduce: AllReduce | None = None

    @property
    def num_bytes(self) -> float:
        return sum(op.layers * op.num_bytes for op in self.ops)

    @property
    def flops(self) -> float:
        return sum(op.layers * op.flops for op in self.ops)

    @property
    def seconds(self) -> float:
        """Without any communication."""
        return sum(op.seconds(self.speeds) for op in self.ops)

    @property
    def all_reduce_seconds(self) -> float:
        return self.all_reduce.count * self.all_reduce.seconds if self.all_reduce else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch, with the modelled communication."""
        return self.batch / (self.seconds + self.all_reduce_seconds)


def step_floor(
    model: ModelTraits,
    speeds: Speeds,
    *,
    batch: int,
    context: int,
    ranks: int = 1,
    kv_dtype: str = "bf16",
    distinct_experts: float | None = None,
    link: str = "none",
) -> StepFloor:
    """The floor of one step; `distinct_experts` as counted in a run, else expected under uniform routing.

    Raises:
        PellucidError: a batch, context or rank count below one, or more distinct experts than there are.
    """
    for name, value in (("batch", batch), ("context", context), ("ranks", ranks)):
        if value < 1:
            raise PellucidError(f"{name} {value}: give 1 or more")
    hit = None
    if model.moe is not None:
        hit = expected_experts(model.moe, batch) if distinct_experts is None else distinct_experts
        if hit > model.moe.num_experts:
            raise PellucidError(f"{hit} distinct experts counted, but a layer has {model.moe.num_experts}")
    ops = (
        *_attention_ops(model, batch, ranks),
        _attention_core(model, batch, context, ranks, ITEMSIZE[kv_dtype]),
        *_mlp_ops(model, batch, ranks, hit),
        _matrix("lm_head", 1, model.hidden_size * rank_share(model.vocab_size, ranks), model.weights.lm_head, batch),
    )
    reduced = None
    if ranks > 1:
        reduced = best_all_reduce(batch * model.hidden_size * 2, ranks, link, 2 * model.num_layers)
    return StepFloor(batch, context, ops, speeds, hit, reduced)


def expected_experts(moe: MoETraits, batch: int) -> float:
    """Distinct experts of a layer that `batch` tokens choose, each its top k at random: E (1 - (1 - k/E)^B)."""
    return float(moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** batch))


def _matrix(name: str, layers: int, weights: float, form: WeightFormat, tokens: float) -> Op:
    return Op(name, layers, weights * bytes_per_weight(form), 2 * weights * tokens)


def _attention_ops(model: ModelTraits, batch: int, ranks: int) -> Iterator[Op]:
    """The projections. Latent ones are a copy on every rank, those with heads are divided."""
    a, hidden, form = model.attention, model.hidden_size, model.weights.attention
    heads = rank_share(a.num_heads, ranks)
    if not isinstance(a, MLATraits):
        kv_heads = max(1, a.num_kv_heads // ranks)
        yield _matrix("qkv", model.num_layers, hidden * (heads + 2 * kv_heads) * a.head_dim, form, batch)
        yield _matrix("o", model.num_layers, heads * a.head_dim * hidden, form, batch)
        return
    queries = heads * a.qk_head_dim
    latent = hidden * a.latent_head_size
    if a.q_lora_rank is None:
        yield _matrix("q, kv_a", model.num_layers, hidden * queries + latent, form, batch)
    else:
        yield _matrix("q_a, kv_a", model.num_layers, hidden * a.q_lora_rank + latent, form, batch)
        yield _matrix("q_b", model.num_layers, a.q_lora_rank * queries, form, batch)
    up = a.kv_lora_rank * heads * (a.qk_nope_head_dim + a.v_head_dim)
    yield _matrix("kv_b, absorbed", model.num_layers, up, form, batch)
    yield _matrix("o", model.num_layers, heads * a.v_head_dim * hidden, form, batch)


def _attention_core(model: ModelTraits, batch: int, context: int, ranks: int, itemsize: int) -> Op:
    """Scores and values over the cache; an MLA row is read once for all heads, and by every rank."""
    a = model.attention
    size = batch * context * a.kv_elements_per_token(ranks) * itemsize
    width = a.latent_head_size + a.kv_lora_rank if isinstance(a, MLATraits) else 2 * a.head_dim
    return Op(
        "attention over the cache", model.num_layers, size, 2 * rank_share(a.num_heads, ranks) * width * batch * context
    )


def _mlp_ops(model: ModelTraits, batch: int, ranks: int, hit: float | None) -> Iterator[Op]:
    hidden, forms, moe = model.hidden_size, model.weights, model.moe
    if model.num_dense_layers:
        weights = 3 * hidden * rank_share(model.intermediate_size, ranks)
        yield _matrix("dense MLP", model.num_dense_layers, weights, forms.dense_mlp, batch)
    if moe is None or hit is None:
        return
    layers = model.num_layers - model.num_dense_layers
    yield _matrix("router", layers, hidden * moe.num_experts, WeightFormat("bf16"), batch)
    if moe.num_shared_experts:
        weights = 3 * hidden * rank_share(moe.shared_intermediate_size, ranks)
        yield _matrix("shared experts", layers, weights, forms.shared_experts or forms.dense_mlp, batch)
    expert = 3 * hidden * rank_share(moe.intermediate_size, ranks)
    size = hit * expert * bytes_per_weight(forms.routed_experts or forms.dense_mlp)
    yield Op("routed experts", layers, size, 2 * expert * moe.top_k * batch)


# --- all-reduce -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One all-reduce by a model of the links: `algorithm`, its `seconds`, and how many a step has."""

    algorithm: str
    num_bytes: int
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class _Link:
    """Bytes per second of one rank in one direction; seconds before the first byte of each algorithm, and of a hop."""

    bandwidth: float
    ring: float
    hop: float
    one_shot: float
    two_shot: float


# Fitted to published figures of 8 GPUs behind PCIe 5 switches, and of Hopper GPUs behind NVLink: models, not limits.
_LINKS = {
    "pcie": _Link(50e9, ring=2.0e-6, hop=1.2e-6, one_shot=5.5e-6, two_shot=9.0e-6),
    "nvlink": _Link(300e9, ring=2.0e-6, hop=0.8e-6, one_shot=3.5e-6, two_shot=5.5e-6),
}


def all_reduce_seconds(num_bytes: int, ranks: int, link: str) -> dict[str, float]:
    """Seconds of one all-reduce of `num_bytes` on each rank, by algorithm.

    ring (NCCL's LL, whose lines are half flags): t + 2(n-1)(hop + 2S/(nB)); one-shot, everyone reads everyone:
    t + (n-1)S/B; two-shot, reduce-scatter and all-gather: t + 2(n-1)/n S/B.

    Raises:
        PellucidError: no model of such links.
    """
    found = _LINKS.get(link)
    if found is None:
        raise PellucidError(f"no model of links of kind {link!r}; known: {', '.join(_LINKS)} (a machine's `link`)")
    others = ranks - 1
    return {
        "ring": found.ring + 2 * others * (found.hop + 2 * num_bytes / ranks / found.bandwidth),
        "one-shot": found.one_shot + others * num_bytes / found.bandwidth,
        "two-shot": found.two_shot + 2 * others / ranks * num_bytes / found.bandwidth,
    }


def best_all_reduce(num_bytes: int, ranks: int, link: str, count: int) -> AllReduce:
    times = all_reduce_seconds(num_bytes, ranks, link)
    algorithm = min(times, key=lambda name: times[name])
    return AllReduce(algorithm, num_bytes, times[algorithm], count)


def machine_speeds(hardware: Hardware, bandwidth: float | None, flops: float | None) -> Speeds:
    """The machine's speeds, with what was given instead: bytes and operations per second.

    Raises:
        PellucidError: nothing known and nothing given.
    """
    known = hardware.speeds
    if known is None and (bandwidth is None or flops is None):
        raise PellucidError(
            f"the speeds of {hardware.name} are not known: give --bandwidth (TB/s that a GPU reads) and --tflops "
            "(dense bf16), or name a --hardware that has them"
        )
    if bandwidth is None and flops is None and known is not None:
        return known
    given = [text for text, value in (("bandwidth", bandwidth), ("matrix rate", flops)) if value is not None]
    rest = f"; else {known.source}" if known is not None and len(given) == 1 else ""
    return Speeds(
        bandwidth if bandwidth is not None else known.read_bandwidth if known else 0.0,
        flops if flops is not None else known.matrix_flops if known else 0.0,
        f"{' and '.join(given)} as given{rest}",
    )

"""Decides how steps are launched: decode by layers, or fused; what is captured in CUDA graphs. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.core import PlanError
from pellucid.selection.args import EngineArgs
from pellucid.selection.plan import Decision, ExecutionPlan, How
from pellucid.traits.backend import BackendTraits
from pellucid.traits.model import ModelTraits

FUSED, LAYERED = "fused", "layered"

DENSE = frozenset({"bf16", "fp16", "fp32"})

PROMPT_TOKENS = 1024
"""Of the longest chunk that is captured."""

NOTHING_CAPTURED: dict[str, bool | int] = {"cuda_graphs": False, "prompt_graphs": 0}


def decide_decode(
    args: EngineArgs,
    model: ModelTraits,
    device: str,
    ranks: int,
    dtype: str,
    kv_dtype: str,
    kernels: Sequence[Decision],
    backends: Sequence[BackendTraits],
) -> tuple[Decision, ...]:
    """`decode_path`, and what of it is captured, `cuda_graphs` and `prompt_graphs`: of the fused path only. `kernels`
    chose among `backends`.

    Raises:
        PlanError: the fused path was asked for and does not fit.
    """
    obstacle = _obstacle(args, model, device, ranks, dtype, kv_dtype, kernels, backends)
    asked = args.decode_path
    if asked == FUSED and obstacle:
        raise PlanError(f"--decode-path fused: {obstacle}; leave the flag out")
    if asked is not None:
        path = Decision("decode_path", None, asked, "asked", ("--decode-path",))
    elif obstacle:
        path = Decision("decode_path", None, LAYERED, "forced by traits", (obstacle,))
    else:
        because = "16-bit weights on one GPU: 5 to 9 kernels a layer, each a whole wave, instead of 15 to 25"
        path = Decision("decode_path", None, FUSED, "default", (because, "--decode-path layered forces the other"))
    if path.value != FUSED:
        reason = "only the fused path is captured"
        if args.enforce_eager is False:
            raise PlanError(f"--no-enforce-eager: {reason}, and the decode path is {path.value}; leave the flag out")
        return path, *(Decision(op, None, no, "forced by traits", (reason,)) for op, no in NOTHING_CAPTURED.items())
    if args.enforce_eager:
        return path, *(Decision(op, None, no, "asked", ("--enforce-eager",)) for op, no in NOTHING_CAPTURED.items())
    how: How = "default" if args.enforce_eager is None else "asked"
    because = "one graph a bucket of decode rows: no launch costs" if how == "default" else "--no-enforce-eager"
    return path, Decision("cuda_graphs", None, True, how, (because,)), decide_prompts(kernels, backends)


def decide_prompts(kernels: Sequence[Decision], backends: Sequence[BackendTraits]) -> Decision:
    """`prompt_graphs`, the largest of the captured buckets, of a fused path that is captured."""
    captured, foreign = _prompts(kernels, backends)
    reason = "chunks of up to so many tokens: longer ones take the device longer than the host launches"
    if not foreign:
        return Decision("prompt_graphs", None, PROMPT_TOKENS, "default", (reason,))
    others = ", ".join(f"{d.key} is {d.value}" for d in foreign)
    why = f"but for {others}, whose launches depend on the lengths of each prompt"
    return Decision("prompt_graphs", None, max(captured, default=0), "forced by traits", (reason, why))


def captured_prompts(plan: ExecutionPlan, backends: Sequence[BackendTraits]) -> tuple[int, ...]:
    """Buckets of prompt tokens whose steps the plan captures, smallest first."""
    captured, _ = _prompts(plan.decisions, backends)
    return tuple(sorted(bucket for bucket in captured if bucket <= plan.prompt_graphs))


def _prompts(kernels: Sequence[Decision], backends: Sequence[BackendTraits]) -> tuple[set[int], list[Decision]]:
    """Buckets up to `PROMPT_TOKENS` that our kernels compute, and the decisions for another's: those launch by what a
    prompt's lengths are, which a graph can't."""
    ours = {(backend.op, backend.name) for backend in backends if backend.fused_decode == "inside"}
    computing = [d for d in kernels if d.op in ("attention.prefill", "moe") and (d.bucket or 0) <= PROMPT_TOKENS]
    foreign = [d for d in computing if (d.op.partition(".")[0], str(d.value)) not in ours]
    buckets = {d.bucket for d in computing if d.op == "attention.prefill" and d.bucket is not None}
    return buckets - {d.bucket for d in foreign if d.bucket is not None}, foreign


def _obstacle(
    args: EngineArgs,
    model: ModelTraits,
    device: str,
    ranks: int,
    dtype: str,
    kv_dtype: str,
    kernels: Sequence[Decision],
    backends: Sequence[BackendTraits],
) -> str:
    """Why decode can't be fused; empty when it can."""
    if device != "cuda":
        return f"the fused kernels run on CUDA devices, this is the {device}"
    if ranks > 1:
        return f"{ranks} ranks: the fused kernels know one"
    if dtype not in ("bf16", "fp16") or kv_dtype != dtype:
        return f"the fused kernels compute in bf16 or fp16 with KV of the same type, not in {dtype} with {kv_dtype}"
    if model.mlp_bias:
        return "the MLPs have biases"
    attention, forms = model.attention, model.weights
    if attention.kind == "mla" and attention.bias and attention.q_lora_rank is None:
        return "kv_a_proj has a bias and q_proj has none: the two can't be one product"
    mixable = [forms.attention, forms.dense_mlp, *([forms.shared_experts] if forms.shared_experts else [])]
    packed = next((form for form in mixable if form.scheme not in DENSE), None)
    if packed is not None:
        return f"weights stored as {packed} may differ from matrix to matrix, and the fused kernels read several as one"
    if args.batch_invariant:
        return "--batch-invariant: a row's sums are taken in another order in another bucket"
    usable: set[tuple[str, str]] = {
        (backend.op, backend.name) for backend in backends if backend.fused_decode is not None
    }
    shared: dict[tuple[str, str], str] = {
        (backend.op, backend.name): backend.weight_form for backend in backends if backend.weight_form
    }
    read = {shared[key] for key in usable & shared.keys()}
    largest = max((d.bucket or 0 for d in kernels if d.op == "attention.decode"), default=0)
    for decision in kernels:
        key: tuple[str, str] = (decision.op.partition(".")[0], str(decision.value))
        # Of more tokens than a decode step has, another may multiply the weights that both read.
        aside = (decision.bucket or 0) > largest and key in shared and shared[key] in read
        if decision.op != "attention.prefill" and key not in usable and not aside:
            return f"{decision.key} is {decision.value}, whose weights or cache they do not read"
    return ""

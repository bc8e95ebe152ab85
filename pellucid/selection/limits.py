"""Decides ranks, batch limits, context length and KV pages, with the memory bill. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pellucid.core import PlanError
from pellucid.hardware.facts import Hardware, format_bytes
from pellucid.selection.args import SYNTHETIC, EngineArgs, flag_name
from pellucid.selection.plan import Decision, How, MemoryBill
from pellucid.traits.misfit import Misfit
from pellucid.traits.model import ModelTraits

SEQUENCES = {"cuda": 256, "cpu": 16}
STEP_TOKENS = {"cuda": 8192, "cpu": 2048}
SHORTEST_CONTEXT = 4096
"""A number of ranks counts as enough when one sequence of this length, or of the model's, still fits."""

_FLAGS = {"kv.pages": "--num-kv-pages"}
"""Decisions whose flag has another name."""

Bill = Callable[[int], MemoryBill]
"""The bill for a number of ranks."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Most sequences and tokens of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    decisions: tuple[Decision, ...]


def decide_device(args: EngineArgs, hardware: Hardware) -> Decision:
    """`cpu` or `cuda`. Raises PlanError when a GPU is asked for and there is none."""
    if args.device == "cuda" and not hardware.gpus:
        raise PlanError("--device cuda: this machine shows no CUDA device; leave it out or install the driver")
    if args.device:
        return Decision("device", None, args.device, "asked", ("--device",))
    gpus = len(hardware.gpus)
    because = f"{gpus} GPU{'s' if gpus > 1 else ''} found" if gpus else "no GPU found"
    return Decision("device", None, hardware.device, "default", (because,))


def decide_load_format(args: EngineArgs, model: ModelTraits) -> Decision:
    """Where weights come from. Raises PlanError for synthetic weights of a format that is not drawn."""
    if args.load_format != SYNTHETIC:
        how: How = "default" if args.load_format is None else "asked"
        return Decision("load_format", None, "auto", how, ("weights are read from the model's files",))
    forms = model.weights
    classes = (forms.attention, forms.dense_mlp, forms.routed_experts, forms.shared_experts, forms.lm_head)
    for form in (*classes, forms.embedding):
        if form is not None and form.scheme not in ("bf16", "fp16", "fp32"):
            raise PlanError(
                f"--load-format {SYNTHETIC} draws bf16, fp16 and fp32 weights, and this config stores {form}: "
                "remove its quantization_config, or load real weights"
            )
    reason = f"--load-format: random {forms.attention} weights, drawn on the device from the seed; outputs mean nothing"
    return Decision("load_format", None, SYNTHETIC, "asked", (reason,))


def decide_step(args: EngineArgs, device: str, chunked: bool, max_position: int) -> StepLimits:
    """Sequences and tokens of a step. Decode rows alone must not fill it. Raises PlanError when they would."""
    tokens, sequences = args.max_num_batched_tokens, args.max_num_seqs
    if tokens is not None and sequences is not None and tokens < sequences:
        raise PlanError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {sequences}: decode rows alone would fill a "
            "step; raise the first or lower the second"
        )
    length = args.max_model_len or max_position
    if not chunked and tokens is not None and tokens < length:
        raise PlanError(
            f"--no-enable-chunked-prefill: a prompt of {length} tokens does not fit a step of {tokens}; "
            f"--max-num-batched-tokens {length} or a smaller --max-model-len"
        )
    step = tokens or max(STEP_TOKENS[device], sequences or 0, 0 if chunked else length)
    rows = sequences or min(SEQUENCES[device], step)
    because = f"usual for {device}" if chunked else f"a whole prompt of {length} tokens in one step"
    return StepLimits(
        rows,
        step,
        (
            _limit("max_num_seqs", sequences, rows, f"usual for {device}, and at most the tokens of a step"),
            _limit("max_num_batched_tokens", tokens, step, because),
        ),
    )


def _limit(name: str, asked: int | None, value: int, because: str) -> Decision:
    if asked is not None:
        return Decision(name, None, value, "asked", (_FLAGS.get(name, flag_name(name)),))
    return Decision(name, None, value, "default", (because,))


def decide_ranks(args: EngineArgs, model: ModelTraits, hardware: Hardware, device: str, bill: Bill) -> Decision:
    """Tensor-parallel ranks: asked, or the fewest whose weights leave room for a context.

    Raises:
        PlanError: more ranks than devices, or a number that does not divide the model's widths.
    """
    name, asked = "tensor_parallel_size", args.tensor_parallel_size
    devices = len(hardware.gpus) if device == "cuda" else 1
    possible = [n for n in range(1, devices + 1) if not _uneven(model, n)]
    if asked is not None:
        flag = f"--tensor-parallel-size {asked}"
        if asked > devices:
            raise PlanError(f"{flag}: this machine offers {devices} {device} device(s); {possible[-1]} is the most")
        if asked not in possible:
            raise PlanError(f"{flag}: {_uneven(model, asked)}; possible: {', '.join(map(str, possible))}")
        return Decision(name, None, asked, "asked", (flag, _per_rank(bill(asked))))
    if devices == 1:
        return Decision(name, None, 1, "default", (f"one {device} device", _per_rank(bill(1))))
    context = min(model.max_position, args.max_model_len or SHORTEST_CONTEXT)
    for fewer, ranks in zip((1, *possible), possible, strict=False):
        need = bill(ranks).kv_bytes_per_token * context
        if bill(ranks).kv_budget_bytes > need:
            because = _per_rank(bill(ranks))
            if ranks == 1:
                return Decision(name, None, 1, "default", (f"the model fits one device: {because}",))
            reasons = (f"fewest devices that hold the model: {because}", f"with {fewer}: {_per_rank(bill(fewer))}")
            return Decision(name, None, ranks, "forced by traits", reasons)
    most = possible[-1]
    return Decision(name, None, most, "forced by traits", (f"all that divide the model: {_per_rank(bill(most))}",))


def _per_rank(bill: MemoryBill) -> str:
    return f"{format_bytes(bill.fixed_bytes)} per rank before any KV, of {format_bytes(bill.budget_bytes)}"


def _uneven(model: ModelTraits, ranks: int) -> str:
    """Which width `ranks` does not divide; empty when all are even."""
    widths = {"attention heads": model.attention.num_heads, "MLP width": model.intermediate_size}
    if model.moe is not None:
        widths["expert width"] = model.moe.intermediate_size
    if model.attention.kind == "gqa" and model.attention.num_kv_heads > ranks:
        widths["KV heads"] = model.attention.num_kv_heads
    return ", ".join(f"{name} {width} is not a multiple of {ranks}" for name, width in widths.items() if width % ranks)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The decisions on context length and pages, and why the engine cannot start when they come to nothing."""

    decisions: tuple[Decision, ...]
    blockers: tuple[Misfit, ...]


def decide_capacity(
    args: EngineArgs, model: ModelTraits, device: str, page_size: int, sequences: int, bill: MemoryBill
) -> Capacity:
    """Pages of the KV cache and the longest sequence.

    Raises:
        PlanError: an asked length or number of pages that the model or the memory does not allow.
    """
    if args.max_model_len is not None and args.max_model_len > model.max_position:
        raise PlanError(
            f"--max-model-len {args.max_model_len}: the model's positions end at {model.max_position}; "
            f"--max-model-len {model.max_position} is the most"
        )
    fit = bill.pages_that_fit(page_size)
    wanted = args.max_model_len or model.max_position
    if args.num_kv_pages is not None and 0 < fit < args.num_kv_pages:
        raise PlanError(f"--num-kv-pages {args.num_kv_pages}: {fit} fit; {_left(bill)}")
    if fit == 0:
        return _no_room(args, wanted, bill)
    useful = -(-wanted // page_size) * sequences
    pages = args.num_kv_pages or (fit if device == "cuda" else min(fit, useful))
    length = min(wanted, pages * page_size)
    if args.num_kv_pages is not None and args.max_model_len is not None:
        # Both were asked: a request longer than the pool is then refused one by one, at admission.
        length = args.max_model_len
    elif args.max_model_len is not None and length < args.max_model_len:
        raise PlanError(
            f"--max-model-len {args.max_model_len}: {pages * page_size} tokens of KV fit "
            f"({pages} pages of {page_size}); {_left(bill)}; --max-model-len {length} is the most"
        )
    all_fit = f"all that fit: {_left(bill)} at {bill.kv_bytes_per_token} bytes a token"
    enough = f"{sequences} sequences of {wanted} tokens; {fit} would fit: {_left(bill)}"
    whole = f"the model's positions end at {model.max_position}"
    decisions = (
        _limit("kv.pages", args.num_kv_pages, pages, all_fit if pages == fit else enough),
        _limit(
            "max_model_len",
            args.max_model_len,
            length,
            whole if length == wanted else f"what {pages} pages hold; {whole}",
        ),
    )
    return Capacity((_utilization(args, bill), *decisions), ())


def _no_room(args: EngineArgs, wanted: int, bill: MemoryBill) -> Capacity:
    most = max(bill.items, key=lambda item: item.bytes)
    reason = (
        f"the model does not fit: {_per_rank(bill)} ({bill.budget_formula}); "
        f"the most is {most.name}, {format_bytes(most.bytes)}"
    )
    share = "a larger --gpu-memory-utilization, " if args.gpu_memory_utilization is not None else ""
    blocker = Misfit(reason, f"{share}more devices, or a smaller format of the weights", "memory")
    decisions = (
        Decision("kv.pages", None, 0, "forced by traits", (reason,)),
        _limit("max_model_len", args.max_model_len, wanted, "no page fits; the model's own length is kept"),
    )
    return Capacity((_utilization(args, bill), *decisions), (blocker,))


def _utilization(args: EngineArgs, bill: MemoryBill) -> Decision:
    name, asked = "gpu_memory_utilization", args.gpu_memory_utilization
    if asked is None:
        return Decision(name, None, bill.utilization, "default", (bill.budget_formula,))
    return Decision(name, None, asked, "asked", (f"--gpu-memory-utilization: {bill.budget_formula}",))


def _left(bill: MemoryBill) -> str:
    return f"{format_bytes(bill.kv_budget_bytes)} are left for KV"

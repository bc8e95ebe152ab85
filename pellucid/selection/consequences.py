"""Which decisions follow from others, for plans on which nothing can be tried. Used by `plan_diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pellucid.selection.facts import Key
from pellucid.selection.plan import Decision, ExecutionPlan

FAMILIES = ("attention", "moe", "linear")

FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "max_num_seqs": ("device", "max_num_batched_tokens"),
    "max_num_batched_tokens": ("device", "max_num_seqs", "enable_chunked_prefill", "max_model_len"),
    "gpu_memory_utilization": ("device",),
    "kv.dtype": ("dtype",),
    "batch_invariant": FAMILIES,
    "cuda_graphs": ("decode_path",),
    "prompt_graphs": ("decode_path", "attention.prefill", "moe"),
}
"""What `resolve` derives from other decisions alone where nothing was asked: ops, or families of ops."""

FOLLOWS_ON_ONE_MACHINE: Mapping[str, tuple[str, ...]] = {
    "kv.pages": (
        *("device", "tensor_parallel_size", "dtype", "kv.dtype", "kv.page_size", "max_model_len"),
        *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
    ),
    "max_model_len": ("kv.pages", "kv.page_size"),
    "decode_path": (
        *("device", "tensor_parallel_size", "dtype", "kv.dtype"),
        *("batch_invariant", "attention.decode", "moe", "linear"),
    ),
}
"""The same of what model and machine have a part in: true where those are the same."""

WHERE_ASKED = ("batch_invariant", "max_model_len")
"""What others follow from only where a flag gave it; otherwise it follows itself."""


def followed(key: Key, a: ExecutionPlan, b: ExecutionPlan, differ: Sequence[Key]) -> tuple[Key, ...]:
    """Those of the decisions in `differ` that the one of `key` follows from; none when it stands for itself."""
    left, right = _by_key(a), _by_key(b)
    sides = left.get(key), right.get(key)
    if any(side is not None and side.how == "asked" for side in sides):
        return ()
    op = key[0]
    names = FOLLOWS.get(op, ())
    if (a.model, a.hardware) == (b.model, b.hardware):
        names = (*names, *FOLLOWS_ON_ONE_MACHINE.get(op, ()))
    if None in sides and a.buckets(op) and b.buckets(op) and op.partition(".")[0] in FAMILIES:
        names = ("max_num_seqs",) if op == "attention.decode" else ("max_num_batched_tokens",)
    return tuple(k for k in _changed(left, right, differ) if _is_named(k[0], names) and _counts(k, left, right))


def _by_key(plan: ExecutionPlan) -> dict[Key, Decision]:
    return {(d.op, d.bucket): d for d in plan.decisions}


def _changed(left: Mapping[Key, Decision], right: Mapping[Key, Decision], differ: Sequence[Key]) -> Iterator[Key]:
    """Decisions that both sides have, with another value on each: how it came about changes no other."""
    return (key for key in differ if key in left and key in right and left[key].value != right[key].value)


def _is_named(op: str, names: Sequence[str]) -> bool:
    return op in names or op.partition(".")[0] in names


def _counts(key: Key, left: Mapping[Key, Decision], right: Mapping[Key, Decision]) -> bool:
    return key[0] not in WHERE_ASKED or "asked" in (left[key].how, right[key].how)

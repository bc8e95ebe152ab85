"""Finds one decision of a plan by what a user calls it, and the nearest names where there is none. For `--why`."""

from __future__ import annotations

from difflib import get_close_matches

from pellucid.core import PellucidError
from pellucid.selection.plan import Decision, ExecutionPlan

FLAG_DECISIONS = {
    "kv_cache_dtype": "kv.dtype",
    "block_size": "kv.page_size",
    "page_size": "kv.page_size",
    "num_kv_pages": "kv.pages",
    "kv_layout": "kv.layout",
    "attention_backend": "attention.decode",
    "moe_backend": "moe",
    "enforce_eager": "cuda_graphs",
    "tp": "tensor_parallel_size",
}
"""What users know a decision by, where that is not its name: mostly its flag."""

MOST_NEAREST = 4


def find_decision(plan: ExecutionPlan, key: str) -> Decision:
    """The decision called `attention.decode@8` or `kv.page_size`.

    Any token count may stand after the @; the bucket that holds it answers. Without one, the smallest does. A flag's
    name finds its decision, and `moe.decode` finds `moe`, which is decided for steps of both kinds at once.

    Raises:
        PellucidError: no such decision; the message has the nearest names, and where a candidate of that name stands.
    """
    typed, _, tokens = key.partition("@")
    if typed.removeprefix("--").replace("-", "_") in ("measure", "measure_seconds"):
        raise PellucidError(f"--why {key}: it governs every decision that is not asked or forced; see one, as moe@1")
    known = {d.op: plan.buckets(d.op) for d in plan.decisions}
    op = _op_of(typed, known)
    if op is None:
        listed = ", ".join(f"{name}@{b[0]}..{b[-1]}" if b else name for name, b in known.items())
        raise PellucidError(f"--why {key}: no such decision{_nearest(plan, typed, known)}; known: {listed}")
    buckets = known[op]
    if not buckets:
        if tokens:
            raise PellucidError(f"--why {key}: {op} holds for every step; leave out @{tokens}")
        return plan.decision(op)
    if tokens and not (tokens.isdecimal() and 1 <= int(tokens) <= buckets[-1]):
        raise PellucidError(f"--why {key}: {op} is decided for 1 to {buckets[-1]} tokens, as in {op}@{buckets[-1]}")
    return plan.decision(op, int(tokens or buckets[0]))


def _op_of(typed: str, known: dict[str, tuple[int, ...]]) -> str | None:
    """The op that is meant, when that is certain."""
    name = typed.removeprefix("--").removeprefix("no-").replace("-", "_")
    for candidate in (typed, name, FLAG_DECISIONS.get(name, "")):
        if candidate in known:
            return candidate
    op, _, phase = typed.rpartition(".")
    return op if phase in ("prefill", "decode") and op in known else None


def _nearest(plan: ExecutionPlan, typed: str, known: dict[str, tuple[int, ...]]) -> str:
    """`; nearest: ...`, and where a candidate of that name is decided on; empty when nothing is near."""
    where = [d.op for d in plan.decisions if typed and (typed == d.value or typed in (r.candidate for r in d.rejected))]
    if where:
        return f"; {typed} is a candidate of {', '.join(dict.fromkeys(where))}: --why {where[0]} tells of it"
    parts = [name for name in known if typed and (typed in name or name.partition(".")[0] == typed.partition(".")[0])]
    near = dict.fromkeys([*parts, *get_close_matches(typed, known, MOST_NEAREST, 0.5)])
    return f"; nearest: {', '.join(list(near)[:MOST_NEAREST])}" if near else ""

"""`resolve`: what was asked, what the model is and what the machine is, to one frozen `ExecutionPlan`.

Called by `explain` and by engine start-up, with the same result. Reads no weights and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pellucid.core import PlanError
from pellucid.hardware.facts import Hardware
from pellucid.selection.args import EngineArgs, flag_name, short_dtype
from pellucid.selection.bucket import buckets_up_to
from pellucid.selection.choose import Candidate, Slot, decide
from pellucid.selection.decode_path import decide_decode
from pellucid.selection.evidence import Evidence
from pellucid.selection.limits import decide_capacity, decide_device, decide_load_format, decide_ranks, decide_step
from pellucid.selection.memory import count_weights, memory_bill
from pellucid.selection.misfits import Need
from pellucid.selection.plan import Decision, ExecutionPlan, MemoryBill
from pellucid.selection.registry import discover, fixed_order
from pellucid.selection.slots import describe_model, make_slots
from pellucid.selection.storage import Storage, solve, storage_decisions
from pellucid.traits.backend import BackendTraits, DeviceKind
from pellucid.traits.misfit import Misfit, MisfitKind
from pellucid.traits.model import ModelTraits

CAUSES: Mapping[str, MisfitKind] = {
    "kv_cache_dtype": "kv_dtype",
    "block_size": "page_size",
    "dtype": "dtype",
    "batch_invariant": "batch_invariant",
}
"""Which kind of misfit a flag can be the only cause of."""


def resolve(
    args: EngineArgs,
    model: ModelTraits,
    hardware: Hardware,
    evidence: Evidence | None = None,
    *,
    backends: Sequence[BackendTraits] | None = None,
    stored_bytes: Mapping[str, int] | None = None,
) -> ExecutionPlan:
    """One plan. Equal arguments give equal plans.

    `evidence`: measured results. `backends`: instead of those discovered. `stored_bytes`: bytes of each class of
    weights as found in the checkpoint (names as in `memory.count_weights`), instead of the computed ones.

    Raises:
        PlanError: a flag that does not fit the model or the machine; it names the flag, the reason and the remedy.
    """
    evidence = evidence or {}
    if args.moe_backend is not None and model.moe is None:
        raise PlanError(f"--moe-backend {args.moe_backend}: the model has no experts; leave the flag out")
    load_format = decide_load_format(args, model)
    backends = discover() if backends is None else fixed_order(backends)
    device = decide_device(args, hardware)
    kind: DeviceKind = "cuda" if device.value == "cuda" else "cpu"
    chunked = args.enable_chunked_prefill is not False
    step = decide_step(args, kind, chunked, model.max_position)

    def bill(ranks: int, dtype: str, kv_dtype: str, expanded: Mapping[str, str] | None = None) -> MemoryBill:
        return memory_bill(
            model,
            hardware,
            device=kind,
            tensor_parallel_size=ranks,
            utilization=args.gpu_memory_utilization,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_num_batched_tokens=step.max_num_batched_tokens,
            max_num_seqs=step.max_num_seqs,
            stored=stored_bytes,
            expanded=expanded,
        )

    own = args.dtype or short_dtype(model.dtype)
    ranks = decide_ranks(args, model, hardware, kind, lambda n: bill(n, own, args.kv_cache_dtype or own))
    assert isinstance(ranks.value, int)
    need = Need(model, hardware, kind, own, tensor_parallel_size=ranks.value)
    need = replace(need, batch_invariant=args.batch_invariant is True)
    slots = make_slots(
        args, need, backends, buckets_up_to(step.max_num_seqs), buckets_up_to(step.max_num_batched_tokens)
    )
    storage = solve(args, model, slots, backends, evidence)
    refuse_asked(args, storage)
    kernels = tuple(
        decide(slot, b, storage.candidates[slot.name], evidence) for slot in storage.slots for b in slot.buckets
    )
    chosen = _chosen(kernels, backends, storage)
    memory = bill(ranks.value, storage.dtype, storage.kv_dtype, _expanded(model, chosen, storage.dtype))
    capacity = decide_capacity(args, model, kind, storage.page_size, step.max_num_seqs, memory)
    decisions = (
        device,
        ranks,
        *storage_decisions(args, model, storage, chosen),
        *step.decisions,
        *capacity.decisions,
        load_format,
        *_switches(args, hardware, chosen),
        *decide_decode(args, model, kind, ranks.value, storage.dtype, storage.kv_dtype, kernels, backends),
        *kernels,
    )
    blockers = (*_unserved(storage, kernels), *capacity.blockers)
    machine = (hardware.describe(), *hardware.notes)
    return ExecutionPlan(describe_model(model), machine, decisions, memory, blockers)


def refuse_asked(args: EngineArgs, storage: Storage) -> None:
    """Raises PlanError for a flag that leaves a slot with nothing to run: a flag wins, or the start fails."""
    for slot in storage.slots:
        candidates = storage.candidates[slot.name]
        if slot.asked is not None:
            asked = next(c for c in candidates if c.name == slot.asked)
            if not asked.fits:
                fitting = ", ".join(c.name for c in candidates if c.fits) or "nothing in this version"
                reasons = "; ".join(m.reason for m in asked.misfits)
                remedies = "; ".join(m.remedy for m in asked.misfits if m.remedy)
                remedy = f"; remedy: {remedies}" if remedies else ""
                raise PlanError(
                    f"{flag_name(slot.flag)} {slot.asked} does not fit {slot.name}: {reasons}{remedy}; fits: {fitting}"
                )
        elif not any(c.fits for c in candidates):
            _refuse_cause(args, slot, candidates)


def _refuse_cause(args: EngineArgs, slot: Slot, candidates: Sequence[Candidate]) -> None:
    """Raises PlanError when some candidate would fit but for flags: the flags are named."""
    flags = {kind: name for name, kind in CAUSES.items() if getattr(args, name) is not None}
    for candidate in candidates:
        if all(m.kind in flags for m in candidate.misfits):
            named = ", ".join(_typed(args, flags[m.kind]) for m in candidate.misfits)
            why = "; ".join(str(m) for m in candidate.misfits)
            raise PlanError(f"{named}: nothing runs {slot.name} with it; {candidate.name} {why}")


def _typed(args: EngineArgs, name: str) -> str:
    """A flag as the user typed it."""
    value = getattr(args, name)
    return flag_name(name) if value is True else f"{flag_name(name)} {value}"


def _unserved(storage: Storage, kernels: Sequence[Decision]) -> tuple[Misfit, ...]:
    """One blocker per slot that has no backend, with the reasons of the nearest candidate."""
    found = []
    for slot in storage.slots:
        decision = next(d for d in kernels if d.op == slot.name)
        if decision.value is None:
            nearest = min(storage.candidates[slot.name], key=lambda c: c.nearness, default=None)
            # A candidate without misfits is not taken only where it was measured and gave wrong numbers.
            kind: MisfitKind = "not_built" if nearest is None else "numerics"
            remedy = "--measure full looks again, --measure off takes the default unseen"
            if nearest is None:
                remedy = ""
            elif nearest.misfits:
                kind, remedy = nearest.misfits[0].kind, nearest.misfits[0].remedy
            found.append(Misfit(f"{slot.name} ({slot.traits}): {decision.because[1]}", remedy, kind))
    return tuple(found)


def _chosen(
    kernels: Sequence[Decision], backends: Sequence[BackendTraits], storage: Storage
) -> dict[str, tuple[BackendTraits, ...]]:
    """The backends each slot uses at some bucket, in the fixed order."""
    ops = {slot.name: slot.op for slot in storage.slots}
    taken = {(d.op, d.value) for d in kernels}
    return {name: tuple(b for b in backends if b.op == op and (name, b.name) in taken) for name, op in ops.items()}


def _expanded(model: ModelTraits, chosen: Mapping[str, Sequence[BackendTraits]], dtype: str) -> dict[str, str]:
    """Class of weights -> dtype, where the chosen backend holds another form than the stored one."""
    found = {}
    for weight in count_weights(model):
        slot = "moe" if weight.name == "routed experts" else f"linear.{weight.form.scheme}"
        kept = [b.keeps_packed for b in chosen.get(slot, ()) if b.keeps_packed is not None]
        # The embedding is looked up in its stored form, whatever multiplies.
        if weight.name != "embedding" and any(weight.form.scheme not in schemes for schemes in kept):
            found[weight.name] = dtype
    if model.tied_embeddings:
        scheme = model.weights.embedding.scheme
        backends = chosen.get(f"linear.{scheme}", ())
        if any(b.keeps_packed is not None and scheme not in b.keeps_packed for b in backends):
            found["lm_head"] = dtype
    return found


def _switches(
    args: EngineArgs, hardware: Hardware, chosen: Mapping[str, Sequence[BackendTraits]]
) -> tuple[Decision, ...]:
    every = {b for taken in chosen.values() for b in taken}
    depends = sorted(f"{b.op} {b.name}" for b in every if not b.batch_invariant)
    reason = f"{', '.join(depends)} may depend on the batch" if depends else "every chosen backend is"
    invariant = Decision("batch_invariant", None, bool(every) and not depends, "forced by traits", (reason,))
    if args.batch_invariant is not None:
        invariant = _switch("batch_invariant", args.batch_invariant, reason)
    return (
        _switch("enable_prefix_caching", args.enable_prefix_caching, "equal prefixes need no second prefill"),
        _switch("enable_chunked_prefill", args.enable_chunked_prefill, "a long prompt must not stall decoding"),
        invariant,
        _number("threads", args.threads, hardware.cpu.cores, f"cores of {hardware.cpu.name}"),
        _number("seed", args.seed, 0, "for requests that bring no seed"),
    )


def _switch(name: str, asked: bool | None, because: str) -> Decision:
    if asked is None:
        return Decision(name, None, True, "default", (because,))
    return Decision(name, None, asked, "asked", (flag_name(name if asked else f"no_{name}"),))


def _number(name: str, asked: int | None, default: int, because: str) -> Decision:
    if asked is None:
        return Decision(name, None, default, "default", (because,))
    return Decision(name, None, asked, "asked", (flag_name(name),))

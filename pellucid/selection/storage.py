"""Solves dtype, KV dtype, KV layout and page size jointly, once: prefill and decode share one cache. For `resolve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pellucid.selection.args import EngineArgs, flag_name, short_dtype
from pellucid.selection.choose import Candidate, Slot, assess, pick
from pellucid.selection.evidence import Evidence
from pellucid.selection.misfits import one_of
from pellucid.selection.plan import Decision, How
from pellucid.traits.backend import Anything, BackendTraits, KVLayout
from pellucid.traits.model import ModelTraits

PAGE_SIZES = (64, 32, 128, 16, 256, 1)
"""Pages that are tried, the default first: every decode kernel declared takes 64."""


@dataclass(frozen=True, slots=True)
class Storage:
    """One joint choice, and what each slot's candidates make of it."""

    dtype: str
    kv_dtype: str
    layout: KVLayout
    page_size: int
    slots: tuple[Slot, ...]
    candidates: Mapping[str, tuple[Candidate, ...]]

    def taken(self, slot: Slot, bucket: int, evidence: Evidence) -> str | None:
        """The backend that `slot` takes under this storage."""
        fitting = [c.name for c in self.candidates[slot.name] if c.fits]
        return pick(slot, bucket, fitting, evidence)


def solve(
    args: EngineArgs, model: ModelTraits, slots: Sequence[Slot], backends: Sequence[BackendTraits], evidence: Evidence
) -> Storage:
    """The storage under which every slot gets the backend it would take if it were alone, or as nearly so as can be.

    Fewest slots without any backend first; then fewest that lose their own favourite; then the order of the options.
    """
    options = [_under(option, slots, backends) for option in _options(args, model, slots)]
    favourites = {(s.name, b): _favourite(s, b, options, evidence) for s in slots for b in s.buckets}

    def losses(option: Storage) -> tuple[int, int]:
        taken = {(s.name, b): option.taken(s, b, evidence) for s in option.slots for b in s.buckets}
        nothing = sum(name is None for name in taken.values())
        return nothing, sum(name != favourites[key] for key, name in taken.items())

    return min(options, key=losses)  # min keeps the first of equals: the options' order decides


def _options(args: EngineArgs, model: ModelTraits, slots: Sequence[Slot]) -> list[tuple[str, str, KVLayout, int]]:
    own = short_dtype(model.dtype)
    on_cpu = slots[0].need.device == "cpu"
    dtypes = (args.dtype,) if args.dtype else ("fp32", own) if on_cpu else (own,)
    layouts: tuple[KVLayout, ...] = ("latent_row",) if model.attention.kind == "mla" else ("nhd", "hnd")
    pages = (args.block_size,) if args.block_size else PAGE_SIZES
    return [
        (dtype, args.kv_cache_dtype or dtype, layout, page)
        for dtype, layout, page in product(dict.fromkeys(dtypes), layouts, pages)
    ]


def _under(option: tuple[str, str, KVLayout, int], slots: Sequence[Slot], backends: Sequence[BackendTraits]) -> Storage:
    dtype, kv_dtype, layout, page = option
    placed = tuple(
        replace(s, need=replace(s.need, dtype=dtype, kv_dtype=kv_dtype, kv_layout=layout, page_size=page))
        for s in slots
    )
    return Storage(dtype, kv_dtype, layout, page, placed, {s.name: assess(s, backends) for s in placed})


def _favourite(slot: Slot, bucket: int, options: Sequence[Storage], evidence: Evidence) -> str | None:
    """What the slot would take if it chose the storage alone."""
    fitting = {c.name for option in options for c in option.candidates[slot.name] if c.fits}
    order = [c.name for c in options[0].candidates[slot.name] if c.name in fitting]
    return pick(slot, bucket, order, evidence)


def storage_decisions(
    args: EngineArgs, model: ModelTraits, storage: Storage, chosen: Mapping[str, Sequence[BackendTraits]]
) -> tuple[Decision, ...]:
    """The decisions on dtype and KV cache. `chosen`: the backends taken by each slot."""
    attention = {b.name: b for name, taken in chosen.items() if name.startswith("attention.") for b in taken}
    pages = {name: b.page_sizes for name, b in attention.items()}
    bound = {b.name for taken in chosen.values() for b in taken if b.compute_dtypes == {storage.dtype}}
    return (
        _dtype(args, storage, short_dtype(model.dtype), sorted(bound)),
        _kv_dtype(args, storage),
        Decision(
            "kv.layout",
            None,
            storage.layout,
            "forced by traits",
            (f"{model.attention.kind} attention; read by {' and '.join(sorted(attention)) or 'no backend'}",),
        ),
        _page_size(args, storage, pages),
    )


def _dtype(args: EngineArgs, storage: Storage, own: str, bound: Sequence[str]) -> Decision:
    """`bound`: the chosen backends that compute in no other dtype."""
    stored = f"the weights are meant for {own}"
    if args.dtype:
        return Decision("dtype", None, storage.dtype, "asked", (f"--dtype; {stored}",))
    if bound:
        reasons = (f"{' and '.join(bound)} computes in {storage.dtype} only", stored)
        return Decision("dtype", None, storage.dtype, "forced by traits", reasons)
    return Decision("dtype", None, storage.dtype, "default", (stored,))


def _kv_dtype(args: EngineArgs, storage: Storage) -> Decision:
    if args.kv_cache_dtype:
        return Decision("kv.dtype", None, storage.kv_dtype, "asked", (flag_name("kv_cache_dtype"),))
    return Decision("kv.dtype", None, storage.kv_dtype, "default", (f"that of the activations, {storage.dtype}",))


def _page_size(args: EngineArgs, storage: Storage, pages: Mapping[str, frozenset[int] | Anything]) -> Decision:
    takes = tuple(
        f"{name} takes pages of {'any size' if isinstance(sizes, Anything) else f'{one_of(sizes)} tokens'}"
        for name, sizes in sorted(pages.items())
    )
    if args.block_size:
        return Decision("kv.page_size", None, storage.page_size, "asked", (flag_name("block_size"), *takes))
    forced = any(not isinstance(sizes, Anything) and len(sizes) == 1 for sizes in pages.values())
    how: How = "forced by traits" if forced or storage.page_size != PAGE_SIZES[0] else "default"
    place = "the default" if storage.page_size == PAGE_SIZES[0] else "what prefill and decode both take"
    return Decision("kv.page_size", None, storage.page_size, how, (f"{storage.page_size} is {place}", *takes))

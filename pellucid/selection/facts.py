"""What differs between two models or two machines, fact by fact, and which fact alone changes which decision.

Used by `plan_diff`. Causes are tried, not guessed: a side is planned once more with one fact of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from pellucid.core import PellucidError
from pellucid.hardware.facts import GPU, Hardware, format_bytes, format_sm
from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Evidence
from pellucid.selection.plan import Decision, ExecutionPlan
from pellucid.selection.resolve import resolve
from pellucid.traits.misfit import Misfit
from pellucid.traits.model import ModelTraits, WeightFormat

Key = tuple[str, int | None]
"""Op and bucket of a decision; of a candidate, as `fit_key` gives."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a plan is made for. `stored_bytes` and `evidence` as for `resolve`."""

    args: EngineArgs
    model: ModelTraits
    hardware: Hardware
    stored_bytes: Mapping[str, int] | None = None
    evidence: Evidence | None = None

    def plan(self) -> ExecutionPlan:
        """Raises PlanError as `resolve` does."""
        return resolve(self.args, self.model, self.hardware, self.evidence, stored_bytes=self.stored_bytes)


@dataclass(frozen=True, slots=True)
class Fact:
    """One trait or machine fact with its value on each side, in words. `moves` gives a side the other's value."""

    name: str
    a: str
    b: str
    moves: Callable[[Subject, Subject], Subject]


def differing_facts(a: Subject, b: Subject) -> tuple[Fact, ...]:
    """Every fact that differs: traits of the model first, then the machine."""
    return (*_model_facts(a, b), *_machine_facts(a.hardware, b.hardware))


@dataclass(frozen=True, slots=True)
class Effects:
    """The decisions that one fact changes: `alone` to what the other side has, `partly` to something else."""

    alone: frozenset[Key]
    partly: frozenset[Key]


def effects(a: Subject, b: Subject, facts: tuple[Fact, ...]) -> dict[str, Effects]:
    """What each fact does: A is planned with B's fact, and B with A's.

    A fact that can't be moved alone (the mixture would be no model, or no plan) has no effects by this measure.
    """
    values = outcomes(a.plan()), outcomes(b.plan())
    differ = {key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)}
    found = {}
    for fact in facts:
        alone: set[Key] = set()
        moved_keys: set[Key] = set()
        for (own, other), (before, after) in (((a, b), values), ((b, a), values[::-1])):
            try:
                moved = outcomes(fact.moves(own, other).plan())
            except (PellucidError, ValueError, ZeroDivisionError):
                continue
            changed = {key for key in differ if moved.get(key) != before.get(key)}
            moved_keys |= changed
            alone |= {key for key in changed if moved.get(key) == after.get(key)}
        found[fact.name] = Effects(frozenset(alone), frozenset(moved_keys - alone))
    return found


def outcomes(plan: ExecutionPlan) -> dict[Key, object]:
    """What counts as the result of a plan: each decision's value and how it came, and what keeps candidates out.

    A candidate stands under the key (`attention.decode: flashmla`, None), as the kinds of its misfits.
    """
    found: dict[Key, object] = {}
    for decision in plan.decisions:
        found[decision.op, decision.bucket] = decision.value, decision.how
        for candidate, misfits in prevented(decision).items():
            found.setdefault(fit_key(decision.op, candidate), frozenset(m.kind for m in misfits))
    return found


def fit_key(op: str, candidate: str) -> Key:
    return f"{op}: {candidate}", None


def prevented(decision: Decision) -> dict[str, tuple[Misfit, ...]]:
    """What keeps each candidate of a decision from running; nothing for the one that was taken."""
    found = {r.candidate: tuple(m for m in r.misfits if m.prevents) for r in decision.rejected}
    # Only an op with candidates has one that was taken.
    return {**found, str(decision.value): ()} if found and decision.value is not None else found


# --- traits -------------------------------------------------------------------------------------


def _model_facts(a: Subject, b: Subject) -> Iterator[Fact]:
    if a.model.moe_layers != b.model.moe_layers:
        # One fact: a number of layers without a pattern of that length is no model.
        names = ("num_layers", "moe_layers")
        yield Fact("layers", _layers(a.model), _layers(b.model), _moves_model(lambda x, y: _take(x, y, names)))
    for name, left, right, move in _leaves(a.model, b.model):
        if name not in ("num_layers", "moe_layers", "weights.source"):
            yield Fact(name, left, right, _moves_model(move))
    if a.stored_bytes != b.stored_bytes:
        yield Fact("bytes of the tensors", _stored(a), _stored(b), lambda x, y: replace(x, stored_bytes=y.stored_bytes))


Move = Callable[[Any, Any], Any]


def _leaves(a: Any, b: Any, prefix: str = "") -> Iterator[tuple[str, str, str, Move]]:
    """Fields that differ, as (dotted name, A, B, how to give A's owner the value of B's)."""
    for one in fields(a):
        left, right = getattr(a, one.name), getattr(b, one.name)
        if left == right:
            continue
        name = prefix + one.name
        nested = is_dataclass(left) and type(left) is type(right) and not isinstance(left, WeightFormat)
        if not nested:
            yield name, _show(left), _show(right), _field_move(one.name)
            continue
        for inner, shown_a, shown_b, move in _leaves(left, right, f"{name}."):
            yield inner, shown_a, shown_b, _inner_move(one.name, move)


def _field_move(name: str) -> Move:
    return lambda x, y: replace(x, **{name: getattr(y, name)})


def _inner_move(name: str, move: Move) -> Move:
    return lambda x, y: replace(x, **{name: move(getattr(x, name), getattr(y, name))})


def _moves_model(move: Move) -> Callable[[Subject, Subject], Subject]:
    return lambda x, y: replace(x, model=move(x.model, y.model))


def _take(x: Any, y: Any, names: tuple[str, ...]) -> Any:
    return replace(x, **{name: getattr(y, name) for name in names})


def _layers(model: ModelTraits) -> str:
    experts = sum(model.moe_layers)
    return f"{model.num_layers}" + (f", {experts} of them with experts" if experts else "")


def _stored(subject: Subject) -> str:
    return format_bytes(sum(subject.stored_bytes.values())) if subject.stored_bytes else "none read"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    kind = getattr(value, "kind", None)
    if is_dataclass(value) and not isinstance(value, WeightFormat):
        return str(kind or f"{getattr(value, 'num_experts', '')} experts".strip())
    if isinstance(value, tuple):
        return ", ".join(_show(v) for v in value) or "none"
    return str(value)


# --- machines -----------------------------------------------------------------------------------

_GPU_FACTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("sm", "compute capability", format_sm),
    ("memory_bytes", "memory of a GPU", format_bytes),
    ("smem_optin_bytes", "shared memory per block", lambda size: f"{size} bytes"),
    ("sm_count", "multiprocessors", str),
)


_CPU_FACTS = (
    ("cores", "host's cores"),
    ("isa", "host's vector features"),
    ("memory_bytes", "host's memory"),
    ("available_bytes", "host's free memory"),
    ("compiler", "C++ compiler"),
    ("compiler_version", "C++ compiler's version"),
)


def _machine_facts(a: Hardware, b: Hardware) -> Iterator[Fact]:
    yield from _gpu_facts(a, b)
    for name, label in (("link", "link"), ("driver", "driver"), ("cuda", "CUDA of torch"), ("nvcc", "nvcc")):
        yield from _machine_fact(a, b, name, label)
    for package in sorted(a.packages.keys() | b.packages.keys()):
        left, right = a.packages.get(package), b.packages.get(package)
        if left != right:
            yield Fact(f"package {package}", left or "absent", right or "absent", _moves_package(package))
    for name, label in _CPU_FACTS:
        left, right = getattr(a.cpu, name), getattr(b.cpu, name)
        if left == right:
            continue
        if name == "isa":
            more = tuple(x for x in left if x not in right), tuple(x for x in right if x not in left)
            yield Fact(label, f"has {_show(more[0])}", f"has {_show(more[1])}", _moves_cpu(name))
            continue
        shown = format_bytes if name.endswith("_bytes") else _show
        yield Fact(label, shown(left), shown(right), _moves_cpu(name))


def _gpu_facts(a: Hardware, b: Hardware) -> Iterator[Fact]:
    alike = all(len(set(_nameless(h.gpus))) == 1 for h in (a, b))
    if not alike:
        if _nameless(a.gpus) != _nameless(b.gpus):
            yield Fact("GPUs", _gpus(a), _gpus(b), _moves_gpus(lambda x, y: y))
        return
    if len(a.gpus) != len(b.gpus):
        count = _moves_gpus(lambda x, y: x[:1] * len(y))
        yield Fact("GPUs", str(len(a.gpus)), str(len(b.gpus)), count)
    for name, label, show in _GPU_FACTS:
        left, right = getattr(a.gpus[0], name), getattr(b.gpus[0], name)
        if left != right:
            yield Fact(label, show(left), show(right), _moves_gpus(_gpu_field(name)))


def _gpu_field(name: str) -> Callable[[tuple[GPU, ...], tuple[GPU, ...]], tuple[GPU, ...]]:
    return lambda x, y: tuple(replace(gpu, **{name: getattr(y[0], name)}) for gpu in x)


def _machine_fact(a: Hardware, b: Hardware, name: str, label: str) -> Iterator[Fact]:
    left, right = getattr(a, name), getattr(b, name)
    if left != right:
        yield Fact(label, _version(left), _version(right), _moves_hardware(_field_move(name)))


def _version(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else _show(value)


def _nameless(gpus: tuple[GPU, ...]) -> tuple[GPU, ...]:
    return tuple(replace(gpu, name="") for gpu in gpus)


def _gpus(hardware: Hardware) -> str:
    return hardware.describe() if hardware.gpus else "none"


def _moves_hardware(move: Move) -> Callable[[Subject, Subject], Subject]:
    return lambda x, y: replace(x, hardware=move(x.hardware, y.hardware))


def _moves_gpus(move: Callable[[Any, Any], Any]) -> Callable[[Subject, Subject], Subject]:
    return _moves_hardware(lambda x, y: replace(x, gpus=move(x.gpus, y.gpus)))


def _moves_package(name: str) -> Callable[[Subject, Subject], Subject]:
    def move(x: Hardware, y: Hardware) -> Hardware:
        packages = {k: v for k, v in x.packages.items() if k != name}
        return replace(x, packages={**packages, **({name: y.packages[name]} if name in y.packages else {})})

    return _moves_hardware(move)


def _moves_cpu(name: str) -> Callable[[Subject, Subject], Subject]:
    return _moves_hardware(lambda x, y: replace(x, cpu=_take(x.cpu, y.cpu, (name,))))

"""`ExecutionPlan`: every decision of one engine with its reasons. Made once by `resolve`, frozen, read everywhere.

The engine runs on the object that `explain` prints: nothing is computed again for display.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar, get_args

from pellucid.core import PlanError
from pellucid.selection.bucket import bucket
from pellucid.selection.evidence import Measurement
from pellucid.traits.misfit import Misfit

How = Literal["asked", "forced by traits", "measured", "default"]
Value = str | int | float | bool | None

T = TypeVar("T", str, int, float, bool)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A candidate that was not taken, and every reason. `notes` are facts worth knowing that decide nothing."""

    candidate: str
    misfits: tuple[Misfit, ...]
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it could have run: it only lost to another."""
        return not any(m.prevents for m in self.misfits)

    @property
    def only_not_built(self) -> bool:
        """Whether it would fit this model and machine if this version had it."""
        return [m.kind for m in self.misfits if m.prevents] == ["not_built"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one candidate that fits, as in `Measurement`; no seconds where a wrong one was not timed."""

    candidate: str
    seconds: float | None
    error: float
    right: bool = True
    detail: str = ""
    taken_back: str = ""

    @classmethod
    def of(cls, candidate: str, found: Measurement) -> Measured:
        # JSON has no infinity.
        seconds = found.seconds if math.isfinite(found.seconds) else None
        return cls(candidate, seconds, found.error, found.right, found.detail, found.taken_back)

    @property
    def result(self) -> Measurement:
        seconds = math.inf if self.seconds is None else self.seconds
        return Measurement(seconds, self.error, self.right, self.detail, self.taken_back)


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice. `bucket` is the largest token count it holds for, None when it holds for every step.

    `value` is None when nothing this version has can do it; the plan's `blockers` then say so. `measured` holds every
    result that the choice was made from, or that was taken back, in the fixed order of the candidates.
    """

    op: str
    bucket: int | None
    value: Value
    how: How
    because: tuple[str, ...]
    rejected: tuple[Rejection, ...] = ()
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        if not self.because:
            raise ValueError(f"{self.key}: a decision needs a reason")
        if self.how not in get_args(How):
            raise ValueError(f"{self.key}: unknown provenance {self.how!r}")

    @property
    def key(self) -> str:
        """`attention.decode@8`, or `kv.page_size` for what holds for every step."""
        return self.op if self.bucket is None else f"{self.op}@{self.bucket}"


@dataclass(frozen=True, slots=True)
class BillItem:
    """One line of the memory bill: bytes on one rank, and how they were found."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """What one rank's memory goes to. `budget_bytes` is what the engine may take: `utilization` of the device."""

    utilization: float
    budget_bytes: int
    budget_formula: str
    items: tuple[BillItem, ...]
    kv_bytes_per_token: int
    kv_formula: str

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        return sum(item.bytes for item in self.items)

    @property
    def kv_budget_bytes(self) -> int:
        """What is left for the KV cache; negative when the weights alone are too much."""
        return self.budget_bytes - self.fixed_bytes

    def pages_that_fit(self, page_size: int) -> int:
        """Usable pages of `page_size` tokens, the scratch page already taken off."""
        return max(0, self.kv_budget_bytes // (self.kv_bytes_per_token * page_size) - 1)


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """All decisions for one model on one machine. `model` and `hardware` describe what they were made for.

    `blockers` are reasons why an engine with this plan cannot start; `explain` shows them, `check_startable` raises.
    """

    model: tuple[str, ...]
    hardware: tuple[str, ...]
    decisions: tuple[Decision, ...]
    memory: MemoryBill
    blockers: tuple[Misfit, ...] = ()

    def check_startable(self) -> None:
        """Raises PlanError with the first blocker and its remedy, before any weight is read."""
        if self.blockers:
            others = len(self.blockers) - 1
            more = f" (and {others} more: see `pellucid explain`)" if others else ""
            raise PlanError(f"{self.blockers[0]}{more}")

    def decision(self, op: str, tokens: int | None = None) -> Decision:
        """The decision of `op` for a step of `tokens` tokens. Raises PlanError listing the ops when there is none."""
        wanted = None if tokens is None else bucket(tokens)
        for decision in self.decisions:
            if decision.op == op and decision.bucket in (None, wanted):
                return decision
        known = ", ".join(dict.fromkeys(d.op for d in self.decisions))
        at = "" if tokens is None else f" at {tokens} tokens"
        raise PlanError(f"the plan has no decision {op!r}{at}; it has: {known}")

    def backend(self, op: str, tokens: int) -> str:
        """Name of the backend of `op` (`attention.decode`, `moe`, `linear.bf16`) for a step of `tokens` tokens."""
        value = self.decision(op, tokens).value
        if not isinstance(value, str):
            self.check_startable()
            raise PlanError(f"{op}: this plan has no backend")
        return value

    def backends(self, op: str) -> frozenset[str]:
        """Every backend that `op` uses at some bucket: the ones to prepare weights for."""
        return frozenset(d.value for d in self.decisions if d.op == op and isinstance(d.value, str))

    def buckets(self, op: str) -> tuple[int, ...]:
        """The buckets `op` was decided for, smallest first."""
        return tuple(sorted(d.bucket for d in self.decisions if d.op == op and d.bucket is not None))

    def _value(self, op: str, kind: type[T]) -> T:
        value = self.decision(op).value
        if not isinstance(value, kind):
            raise TypeError(f"{op} is {value!r}, expected {kind.__name__}")
        return value

    @property
    def device(self) -> str:
        return self._value("device", str)

    @property
    def tensor_parallel_size(self) -> int:
        return self._value("tensor_parallel_size", int)

    @property
    def dtype(self) -> str:
        """`bf16`, `fp16` or `fp32`."""
        return self._value("dtype", str)

    @property
    def kv_dtype(self) -> str:
        return self._value("kv.dtype", str)

    @property
    def kv_layout(self) -> str:
        return self._value("kv.layout", str)

    @property
    def page_size(self) -> int:
        return self._value("kv.page_size", int)

    @property
    def num_kv_pages(self) -> int:
        """Usable pages; the scratch page 0 comes on top."""
        return self._value("kv.pages", int)

    @property
    def max_model_len(self) -> int:
        return self._value("max_model_len", int)

    @property
    def max_num_seqs(self) -> int:
        return self._value("max_num_seqs", int)

    @property
    def max_num_batched_tokens(self) -> int:
        return self._value("max_num_batched_tokens", int)

    @property
    def enable_prefix_caching(self) -> bool:
        return self._value("enable_prefix_caching", bool)

    @property
    def enable_chunked_prefill(self) -> bool:
        return self._value("enable_chunked_prefill", bool)

    @property
    def decode_path(self) -> str:
        """`fused` or `layered`."""
        return self._value("decode_path", str)

    @property
    def cuda_graphs(self) -> bool:
        return self._value("cuda_graphs", bool)

    @property
    def prompt_graphs(self) -> int:
        """Tokens of the longest prompt chunk that is launched as a CUDA graph; 0: none is."""
        return self._value("prompt_graphs", int)

    @property
    def batch_invariant(self) -> bool:
        return self._value("batch_invariant", bool)

    @property
    def threads(self) -> int:
        return self._value("threads", int)

    @property
    def seed(self) -> int:
        return self._value("seed", int)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives back an equal plan."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ExecutionPlan:
        """The plan that `to_json` wrote. Raises KeyError or TypeError on anything else."""
        memory = values["memory"]
        return cls(
            model=tuple(values["model"]),
            hardware=tuple(values["hardware"]),
            decisions=tuple(_decision(d) for d in values["decisions"]),
            memory=MemoryBill(**{**memory, "items": tuple(BillItem(**item) for item in memory["items"])}),
            blockers=tuple(Misfit(**m) for m in values["blockers"]),
        )


def _decision(values: Mapping[str, Any]) -> Decision:
    rejected = tuple(
        Rejection(r["candidate"], tuple(Misfit(**m) for m in r["misfits"]), tuple(r["notes"]))
        for r in values["rejected"]
    )
    # Plans stored before anything was measured have no such field.
    measured = tuple(Measured(**m) for m in values.get("measured", ()))
    return Decision(**{**values, "because": tuple(values["because"]), "rejected": rejected, "measured": measured})

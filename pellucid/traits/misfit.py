"""`Misfit`: why a backend or a flag does not fit, and what to do about it.

Made by `selection.misfits` and `selection.resolve`; printed by `explain` and by the errors of a refused start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

MisfitKind = Literal[
    "not_built",
    "device",
    "compute_capability",
    "shared_memory",
    "phase",
    "attention",
    "head_dims",
    "num_heads",
    "query_len",
    "page_size",
    "kv_dtype",
    "kv_layout",
    "dtype",
    "weights",
    "tensor_parallel",
    "package",
    "toolkit",
    "compiler",
    "batch_invariant",
    "memory",
    "context_length",
    "numerics",
    "slower",
    "order",
    "not_asked",
]
"""`not_built`: this version has only the declaration. `slower`, `order`, `not_asked`: it fits, another was taken."""

PREFERENCE_KINDS: frozenset[MisfitKind] = frozenset({"slower", "order", "not_asked"})


@dataclass(frozen=True, slots=True)
class Misfit:
    """One reason against a candidate. `reason` names the fact and the limit; `remedy` what would change it.

    `remedy` is empty when nothing the user can do on this machine with this model would help.
    """

    reason: str
    remedy: str
    kind: MisfitKind

    def __post_init__(self) -> None:
        if self.kind not in get_args(MisfitKind):
            raise ValueError(f"unknown kind of misfit: {self.kind!r}")
        if not self.reason:
            raise ValueError("a misfit needs a reason")

    @property
    def prevents(self) -> bool:
        """Whether the candidate could not run, as opposed to: could, but another was taken."""
        return self.kind not in PREFERENCE_KINDS

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason

"""Measured results and the tie rule. `tuning` fills an `Evidence`; `choose` reads it; empty means not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIE_SHARE = 0.02
"""Two medians this close are a tie whatever their errors: such a gap does not outlast the next driver."""

STEP_TIE_SHARE = 0.005
"""The same where what is timed is a whole step, and what changes in it is one of its launches."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One backend on one op and bucket: median seconds and the half width of its 95 % interval.

    `right` is the verdict of the numeric gate, which comes before speed; `detail` says where it failed. `taken_back`
    says why a figure decides nothing though it is right: the whole step was not faster with what it led to.
    """

    seconds: float
    error: float
    right: bool = True
    detail: str = ""
    taken_back: str = ""

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.1f} us"


def is_tile_op(op: str) -> bool:
    """Whether what is chosen is the tile of a launch within fused steps: its figures are those of whole steps."""
    return op.startswith(("projection.", "experts.", "mla.", "gqa.")) or op == "lm_head"


def tie_share(op: str) -> float:
    """The share for figures of an op."""
    return STEP_TIE_SHARE if is_tile_op(op) or op.startswith("step.") else TIE_SHARE


Evidence = Mapping[tuple[str, int, str], Measurement]
"""Keyed by op (`attention.decode`), bucket and backend name."""


def is_tie(a: Measurement, b: Measurement, share: float = TIE_SHARE) -> bool:
    """Whether the gap is within the combined 95 % error, or within a share of the faster."""
    gap = abs(a.seconds - b.seconds)
    return gap <= max(math.hypot(a.error, b.error), share * min(a.seconds, b.seconds))


def fastest(order: Sequence[str], measured: Mapping[str, Measurement], share: float = TIE_SHARE) -> str | None:
    """The first name of `order` that ties with the fastest; None when nothing can be concluded.

    Nothing is concluded unless the first of `order`, the default, was measured too: a winner has to beat it.
    """
    if not order or order[0] not in measured:
        return None
    best = min((measured[name] for name in order if name in measured), key=lambda m: m.seconds)
    return next(name for name in order if name in measured and is_tie(measured[name], best, share))

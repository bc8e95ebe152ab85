"""Compares candidates by sampling them in turns: a pure algorithm over abstract trials. Called by `tuning.session`.

    warm-up    one sample of each, thrown away
    screening  rounds over all, back and forth; who is clearly behind is dropped
    leaders    rounds over those that are left, in one window; only these samples decide. More of them while a gap
               may lie on either side of the tie rule's share

Given the same samples it comes to the same result. It knows neither clocks of devices nor what is timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pellucid.selection.evidence import TIE_SHARE, Measurement, fastest

SCREENING_ROUNDS = 6
LEADER_ROUNDS = 15
LEADER_WINDOWS = 4
"""Most windows of leader rounds; one is enough unless the gap is near the edge of a tie."""

FEWEST_ROUNDS = 6
"""With fewer samples no interval around a median holds it with 95 %."""

NEAR_SHARE = 0.10
"""A leader's median is within this of the best; so is every candidate that the next driver may put first."""


@dataclass(frozen=True, slots=True)
class Question:
    """Which of `order`, the fixed one whose first is the default, is fastest for an op at a bucket?

    `traits`: what of model and plan the figures depend on. `given`: choices (op, name) in force while measuring.
    """

    op: str
    bucket: int
    order: tuple[str, ...]
    traits: str = ""
    given: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        return f"{self.op}@{self.bucket}"


def turn(bucket: int) -> tuple[int, int]:
    """Sorts 1, 8, 64 ... before 2, 16, 128 ... before 4, 32, 256: time may be up before every bucket had its turn."""
    return (bucket.bit_length() - 1) % 3, bucket


class TrialFailedError(Exception):
    """A candidate crashed, hung, raised, or gave wrong numbers: it can't be chosen. The message says which."""


class CannotMeasureError(Exception):
    """Nothing is said of any candidate: the machine could not run them now, for want of memory for one thing."""


class Trial(Protocol):
    """One candidate, ready to run."""

    @property
    def name(self) -> str: ...

    def sample(self) -> float:
        """Seconds of one run. Raises TrialFailedError, or CannotMeasureError."""
        ...


@dataclass(slots=True)
class Budget:
    """Seconds that measuring may take in all, from its making on. `clock` gives seconds."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    begin: float = field(init=False)
    excused: float = 0.0

    def __post_init__(self) -> None:
        self.begin = self.clock()

    def part(self, share: float) -> Budget:
        """The first share of it, on the same clock."""
        part = Budget(self.seconds * share, self.clock)
        part.begin = self.begin
        return part

    def excuse(self, seconds: float) -> None:
        """Not to count these seconds."""
        self.begin += seconds
        self.excused += seconds

    @property
    def used(self) -> float:
        return self.clock() - self.begin

    @property
    def left(self) -> float:
        return self.seconds - self.used


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of a question: figures of each candidate by name, and the samples that they rest on.

    Figures are there for the default and others, or (time was up, or only one is right) for none but the failed.
    """

    results: Mapping[str, Measurement]
    samples: Mapping[str, tuple[float, ...]]
    out_of_time: bool = False

    def winner(self, order: Sequence[str]) -> str | None:
        """By the tie rule, among those that are right; None when nothing can be concluded."""
        failed = {name for name, m in self.results.items() if not m.right}
        right = [name for name in order if name not in failed]
        return fastest(right, {name: self.results[name] for name in right if name in self.results})


def compare(trials: Sequence[Trial], budget: Budget, tie_share: float = TIE_SHARE) -> Comparison:
    """Measures all in turns, the default first in `trials`. Nothing is concluded where the default has no samples.

    `tie_share`: of the rule that will decide; gaps near it are measured longer.

    Raises CannotMeasureError as a trial does.
    """
    field_ = _Field(trials, budget)
    field_.run_round(keep=False)
    screened = field_.run_rounds(SCREENING_ROUNDS, drop=True)
    failed = {name: Measurement(math.inf, 0.0, False, why) for name, why in field_.failed.items()}
    order = [trial.name for trial in trials if trial.name not in failed]
    if len(order) < 2 or screened < FEWEST_ROUNDS:
        return Comparison(failed, {}, out_of_time=len(order) > 1)
    screening = {name: tuple(values) for name, values in field_.samples.items() if name in order}
    field_.keep_leaders()
    paired = 0
    for _ in range(LEADER_WINDOWS):
        paired += field_.run_rounds(LEADER_ROUNDS, drop=False)
        if paired < LEADER_ROUNDS or field_.failed or _is_clear(conclude(order, field_.samples), tie_share):
            break
    failed = {name: Measurement(math.inf, 0.0, False, why) for name, why in field_.failed.items()}
    order = [name for name in order if name not in failed]
    if len(order) < 2:
        return Comparison(failed, {})
    if order[0] not in field_.samples:
        # The default failed late, and what takes its place was not among the leaders.
        return Comparison({**conclude(order, screening), **failed}, screening)
    # Too few rounds of the leaders add to the screening; otherwise they alone count, or a lucky sample would stay.
    samples = dict(screening)
    for name, values in field_.samples.items():
        if name in order:
            samples[name] = tuple(values) if paired >= FEWEST_ROUNDS else screening[name] + tuple(values)
    losers = [name for name in order if name not in field_.samples]
    results = conclude(order, {name: samples[name] for name in order if name not in losers})
    if losers:
        # Against what the default took in the same rounds.
        anchored = conclude(order, {name: screening[name] for name in (order[0], *losers)})
        scale = results[order[0]].seconds / anchored[order[0]].seconds
        for name in losers:
            m = anchored[name]
            results[name] = replace(m, seconds=m.seconds * scale, error=m.error * scale)
    return Comparison({**results, **failed}, {name: samples[name] for name in order})


def conclude(order: Sequence[str], samples: Mapping[str, Sequence[float]]) -> dict[str, Measurement]:
    """Figures from samples taken in rounds, the i-th of each name in round i; the first of `order` is the anchor.

    A candidate's time is the anchor's median times the median of its ratios to the anchor, round by round, so that
    what slows all of a round (a clock, a neighbour) cancels. Errors are half 95 % intervals: `hypot` of two of them is
    the interval of their ratio, as the tie rule takes it. A candidate that left early is compared in its rounds.

    Without samples of the anchor there are no figures.
    """
    names = [name for name in order if samples.get(name)]
    if not names or names[0] != order[0]:
        return {}
    anchor = samples[names[0]]
    median = statistics.median(anchor)
    if len(names) == 1:
        low, high = median_interval(anchor)
        return {names[0]: Measurement(median, (high - low) / 2)}
    ratios = {name: [a / b for a, b in zip(samples[name], anchor, strict=False)] for name in names[1:]}
    pair = {}
    for name, values in ratios.items():
        low, high = median_interval(values)
        pair[name] = median * (high - low) / 2
    low, high = median_interval(anchor)
    # Half of the narrowest pair's, unless the anchor's own is narrower: what is uncertain is then the other.
    own = min(min(pair.values()) / math.sqrt(2), (high - low) / 2)
    found = {names[0]: Measurement(median, own)}
    for name, values in ratios.items():
        error = math.sqrt(max(pair[name] ** 2 - own**2, 0.0))
        found[name] = Measurement(median * statistics.median(values), error)
    return found


def _is_clear(results: Mapping[str, Measurement], tie_share: float) -> bool:
    """Whether every gap to the best is surely less than the tie rule's share, or surely more."""
    best = min(results.values(), key=lambda m: m.seconds)
    edge = tie_share * best.seconds
    return all(abs(m.seconds - best.seconds - edge) > math.hypot(m.error, best.error) for m in results.values())


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by order statistics, free of any distribution; all values when they are few.

    The k-th smallest and largest hold the median unless fewer than k of n values fall on one side: a binomial tail.
    """
    ordered, n = sorted(values), len(values)
    k, tail, term = 0, 0.0, 0.5**n
    while k < n // 2 and tail + term <= 0.025:
        tail += term
        term *= (n - k) / (k + 1)
        k += 1
    first = max(k - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def agree(gathered: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, ...]]:
    """Samples of all ranks as those of one: a round takes as long as on its slowest rank.

    A candidate that some rank has no samples of (it failed there) has none; rounds that some rank lacks are left out.
    Rank 0 concludes from it, and sends the others its plan.
    """
    common = [name for name in gathered[0] if all(samples.get(name) for samples in gathered)]
    return {name: tuple(map(max, zip(*(samples[name] for samples in gathered), strict=False))) for name in common}


class _Field:
    """The candidates that are still in, and their samples. The default never leaves unless it fails."""

    def __init__(self, trials: Sequence[Trial], budget: Budget) -> None:
        self._active, self._budget = list(trials), budget
        self.samples: dict[str, list[float]] = {trial.name: [] for trial in trials}
        self.failed: dict[str, str] = {}
        self._forward = True

    def run_round(self, keep: bool) -> bool:
        """One sample of each, in the other direction every time; False when time is up, and the round is forgotten."""
        found = {}
        for trial in self._active if self._forward else self._active[::-1]:
            if self._budget.left <= 0:
                return False
            try:
                found[trial.name] = trial.sample()
            except TrialFailedError as error:
                self.failed[trial.name] = str(error)
        self._active = [trial for trial in self._active if trial.name not in self.failed]
        self._forward = not self._forward
        if keep:
            for name, seconds in found.items():
                self.samples[name].append(seconds)
        return True

    def run_rounds(self, count: int, drop: bool) -> int:
        """How many were complete."""
        for done in range(count):
            if not self._active or not self.run_round(keep=True):
                return done
            if drop:
                self._drop_losers()
        return count

    def keep_leaders(self) -> None:
        """Begin anew with the default and those near the best."""
        best = min(self._median(trial) for trial in self._active)
        near = [t for t in self._active[1:] if self._median(t) <= best * (1 + NEAR_SHARE)]
        if not near and len(self._active) > 1:
            near = [min(self._active[1:], key=self._median)]
        self._active = [self._active[0], *near]
        self.samples = {trial.name: [] for trial in self._active}

    def _drop_losers(self) -> None:
        """Who never came near the best: by less, the more rounds say so. Two stay, and the default."""
        if len(self._active) < 3:
            return
        best = min(self._active, key=self._median)
        share = 1 + max(2 / len(self.samples[best.name]), NEAR_SHARE)
        worst_of_best = max(self.samples[best.name])
        behind = [
            trial
            for trial in self._active[1:]
            if min(self.samples[trial.name]) > worst_of_best and self._median(trial) > share * self._median(best)
        ]
        for trial in sorted(behind, key=self._median, reverse=True):
            if len(self._active) > 2:
                self._active.remove(trial)

    def _median(self, trial: Trial) -> float:
        return statistics.median(self.samples[trial.name])

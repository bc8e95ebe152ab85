"""The seconds of `doctor --kernels`: they bound all of gate and timing, and end a candidate that runs past them.

Called by `doctor.kernels`. A start excuses what the engine needs too, and leaves candidates their own deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread
from typing import TypeVar

from pellucid.tuning.gate import Bench, Probe
from pellucid.tuning.measure import Budget, CannotMeasureError, Question, TrialFailedError
from pellucid.tuning.session import OUT_OF_TIME

AGAIN_S = 0.1
"""Between kills after the end: a child may have been about to start."""

T = TypeVar("T")


@dataclass(slots=True)
class WholeBudget(Budget):
    """Nothing is excused: no engine waits for the default's kernels here."""

    def excuse(self, seconds: float) -> None:
        """These seconds count like all others."""


class InTime:
    """A `Bench` until its budget ends. From then on every method raises CannotMeasureError with `OUT_OF_TIME`.

    So does what was asked before and fails after the end: `ended_with` may have killed it, and nothing is said of it.
    """

    def __init__(self, bench: Bench, budget: Budget) -> None:
        self._bench, self._budget = bench, budget

    def start(self) -> None:
        self._in_time(self._bench.start)

    def check(self, question: Question, candidate: str) -> str:
        return self._in_time(partial(self._bench.check, question, candidate))

    def sample(self, question: Question, candidate: str) -> float:
        return self._in_time(partial(self._bench.sample, question, candidate))

    def _in_time(self, ask: Callable[[], T]) -> T:
        if self._budget.left <= 0:
            raise CannotMeasureError(OUT_OF_TIME)
        try:
            return ask()
        except (TrialFailedError, CannotMeasureError):
            if self._budget.left <= 0:
                raise CannotMeasureError(OUT_OF_TIME) from None
            raise


@contextmanager
def ended_with(budget: Budget, probes: Sequence[Probe]) -> Iterator[None]:
    """While it is open, the end of the budget kills the children of `probes`, whatever their deadlines."""
    over = Event()

    def watch() -> None:
        while not over.wait(max(budget.left, AGAIN_S)):
            if budget.left <= 0:
                for probe in probes:
                    probe.kill()

    watcher = Thread(target=watch, name="doctor-seconds", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()

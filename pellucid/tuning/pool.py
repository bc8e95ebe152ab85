"""Several children that take candidates through the gate at once: most of its time is a compiler's, on one core each.

Made by `tuning.start`, asked by `tuning.session` before it measures. Nothing is timed while they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from types import TracebackType

from pellucid.tuning.gate import Probe, gate
from pellucid.tuning.measure import CannotMeasureError, Question

MOST = 12
"""Children; each has a CUDA context of half a gigabyte."""

Pair = tuple[Question, str]


class ProbePool:
    """`check_all` gives verdicts as `gate` does; children start when they are first needed."""

    def __init__(self, make: Callable[[], Probe], cores: int | None = None) -> None:
        count = len(os.sched_getaffinity(0)) if cores is None else cores
        self._probes = [make() for _ in range(max(1, min(MOST, count - 1)))]
        self._stack = ExitStack()

    def __enter__(self) -> ProbePool:
        for probe in self._probes:
            self._stack.enter_context(probe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def check_all(self, pairs: Sequence[Pair], go_on: Callable[[], bool]) -> dict[Pair, str]:
        """Verdicts of `pairs`, begun in their order while `go_on()`. What had no room has none: it is asked again."""
        waiting: SimpleQueue[Pair] = SimpleQueue()
        for pair in pairs:
            waiting.put(pair)
        verdicts: dict[Pair, str] = {}

        def work(probe: Probe) -> None:
            while go_on():
                try:
                    question, candidate = waiting.get_nowait()
                except Empty:
                    return
                try:
                    verdicts[question, candidate] = gate(probe, question, candidate)
                except CannotMeasureError:
                    return

        probes = self._probes[: len(pairs)]
        with ThreadPoolExecutor(max(1, len(probes))) as threads:
            for done in [threads.submit(work, probe) for probe in probes]:
                done.result()
        return verdicts

"""Several children that take candidates through the gate at once: most of its time is a compiler's, on one core each.

Made by `doctor.kernels`, before anything is timed. A session that measures has its candidates compiled by processes
without a GPU instead (`runner.compile_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Event
from types import TracebackType

from pellucid.tuning.gate import Probe, gate
from pellucid.tuning.measure import CannotMeasureError, Question
from pellucid.utils.process import children_for

MOST = 12
BYTES_EACH = 8 << 30
"""Of the device's memory for each child: its context and what it imports take a gigabyte, while steps are timed too."""

Pair = tuple[Question, str]


class ProbePool:
    """`check_all` gives verdicts as `gate` does; children start when they are first needed.

    `cores` and `memory`, the device's bytes, bound how many there are.
    """

    def __init__(self, make: Callable[[], Probe], cores: int, memory: int) -> None:
        self._probes = [make() for _ in range(children_for(cores, max(1, min(MOST, memory // BYTES_EACH))))]
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
        stopped = Event()

        def work(probe: Probe) -> None:
            while not stopped.is_set() and go_on():
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
            working = [threads.submit(work, probe) for probe in probes]
            try:
                for done in working:
                    done.result()
            except BaseException:
                # Ctrl-C, above all: nobody waits for the candidates that are left.
                stopped.set()
                for probe in probes:
                    probe.kill()
                raise
        return verdicts

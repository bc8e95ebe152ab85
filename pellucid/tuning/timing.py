"""How long calls take: CUDA graphs of them on a card, else the host's clock. Used by `tuning.problems` and `steps`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pellucid.runner.cuda_graphs import capture_graph

if TYPE_CHECKING:
    import torch

SAMPLE_S = 1e-3
"""Least duration of a sample: calls are repeated that often, so that the timer's own cost is small beside it."""

COLD_BYTES = 192 << 20
"""What the copies of a call's operands are together, at least: more than the L2 cache of any card."""

MAX_COPIES = 32

BUSY_CYCLES = 1_000_000
"""Of the device, half a millisecond: longer than a host takes to launch a graph of four steps."""


class Timer:
    """`sample()` gives seconds a call of all `calls` in turn. Warmed up, and captured in a graph with `capture`.

    With `required`, what can't be captured raises RuntimeError, as it would when an engine starts.

    Calls on different copies of their operands find them in memory and not in the cache, as in a step.
    """

    def __init__(
        self, calls: Sequence[Callable[[], Any]], device: torch.device, capture: bool, required: bool = False
    ) -> None:
        self._calls, self._device, self._cuda = calls, device, device.type == "cuda"
        for call in calls[:2]:
            call()
        # Not a bound method: a timer that refers to itself keeps its graph until the collector comes by.
        self._run: Callable[[], None] = partial(_launch_all, calls)
        if capture and self._cuda:
            import torch

            try:
                self._run = captured(self._run)
            except RuntimeError as error:
                # What can't be captured is launched from the host when it is served, too; but where memory is short, or
                # a step has no other form, that is an answer.
                if required or isinstance(error, torch.OutOfMemoryError):
                    raise
        self._repeats = 1
        self._repeats = max(1, round(SAMPLE_S / max(self._time(), 1e-6)))

    def sample(self) -> float:
        return self._time() / self._repeats / len(self._calls)

    def _time(self) -> float:
        if not self._cuda:
            begin_s = time.perf_counter()
            for _ in range(self._repeats):
                self._run()
            return time.perf_counter() - begin_s
        import torch

        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        # So that the first launch does not find an idle device, which would wait for the host and count it.
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(self._repeats):
            self._run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def _launch_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


@dataclass(frozen=True, slots=True)
class Captured:
    """A CUDA graph, and what launched it: the graph writes to buffers that nothing else may keep."""

    launch: Callable[[], None]
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


def captured(launch: Callable[[], None]) -> Captured:
    """`launch` as a CUDA graph, which it must have run before."""
    import torch

    torch.cuda.synchronize()
    return Captured(launch, capture_graph(launch))


def copies_for(num_bytes: int, device: torch.device) -> int:
    """Copies of operands of `num_bytes` that no cache can hold; one on a CPU, which is not timed so finely."""
    return 1 if device.type == "cpu" else max(1, min(MAX_COPIES, -(-COLD_BYTES // max(num_bytes, 1))))

"""CUDA graphs: how one is captured, and those of decode steps. Used by `runner.gpu_runner` and by measurements."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def capture_graph(launch: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What `launch` launches, which it must have launched before. `pool`: of another graph, to share its memory.

    Nothing is collected meanwhile: a graph or an event that is freed during a capture breaks it off.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            launch()
    finally:
        if collects:
            gc.enable()
    return graph


class CudaGraphs:
    """`replay(rows)` runs what `launch(rows)` launched when it was captured. Largest first: they share a pool."""

    def __init__(self, launch: Callable[[int], None], buckets: Iterable[int]) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for rows in sorted(buckets, reverse=True):
            graph = capture_graph(partial(launch, rows), pool)
            pool = pool or graph.pool()
            self._graphs[rows] = graph

    def replay(self, rows: int) -> None:
        self._graphs[rows].replay()

"""One CUDA graph per bucket of decode rows. Used by `runner.gpu_runner`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CudaGraphs:
    """`replay(rows)` runs what `launch(rows)` launched when it was captured. Largest first: they share a pool."""

    def __init__(self, launch: Callable[[int], None], buckets: Iterable[int]) -> None:
        import torch

        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for rows in sorted(buckets, reverse=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                launch(rows)
            pool = pool or graph.pool()
            self._graphs[rows] = graph

    def replay(self, rows: int) -> None:
        self._graphs[rows].replay()

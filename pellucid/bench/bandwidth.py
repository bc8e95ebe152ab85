"""What the device of this run reads per second, and what it multiplies: the speeds that a floor is stated for.

Measured in the same run as what is compared with it, by `bench offline` and `profile`: a published figure is of
another machine, and a copy's half of it is writing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pellucid.bench.provenance import spread
from pellucid.core import PellucidError
from pellucid.hardware.facts import Speeds

if TYPE_CHECKING:
    import torch

GPU_BYTES, CPU_BYTES = 2 << 30, 256 << 20
GPU_WIDTH, CPU_WIDTH = 8192, 1024
"""Far beyond the caches of either, and the side of a product that keeps it busy."""

LEAST_GPU_BYTES = 256 << 20
"""Whole blocks of the kernel, and beyond every cache."""

PROGRAMS_PER_SM = 8

CALLS = 10
"""Launches that a GPU is timed over: the host is slower than the first, and faster than the rest."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeeds:
    """Bytes read and operations done per second, one figure a repetition."""

    read: tuple[float, ...]
    matrix: tuple[float, ...]
    method: str

    def speeds(self) -> Speeds:
        """Medians, for `roofline.step_floor`."""
        return Speeds(
            statistics.median(self.read), statistics.median(self.matrix), f"measured in this run: {self.method}"
        )

    def to_json(self) -> dict[str, object]:
        return {"read_bandwidth": spread(self.read), "matrix_flops": spread(self.matrix), "method": self.method}


def measure_speeds(
    device: torch.device, dtype: torch.dtype, *, nbytes: int | None = None, width: int | None = None, runs: int = 7
) -> MeasuredSpeeds:
    """Sums `nbytes`, less on a GPU that is nearly full, and multiplies matrices `width` wide; `runs` times each.

    Raises:
        PellucidError: a GPU without memory left.
    """
    import torch

    on_gpu = device.type == "cuda"
    width = width or (GPU_WIDTH if on_gpu else CPU_WIDTH)
    if on_gpu:
        nbytes = min(nbytes or GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 2)
        if nbytes < LEAST_GPU_BYTES:
            raise PellucidError("no memory is left to measure the bandwidth in: lower --gpu-memory-utilization")
        source = torch.randint(
            -1000, 1000, (nbytes // LEAST_GPU_BYTES * LEAST_GPU_BYTES // 4,), dtype=torch.int32, device=device
        )
        programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        sums = torch.empty(programs, dtype=torch.int32, device=device)
        from pellucid.kernels.triton.read import read

        scan: Callable[[], object] = partial(read, source, sums)
        method = f"a kernel that only reads {source.nbytes / 1e9:.2f} GB"
    else:
        source = torch.ones((nbytes or CPU_BYTES) // 4)
        scan = source.sum
        method = f"torch's sum of {source.nbytes / 1e9:.2f} GB"
    reads = [source.nbytes / seconds for seconds in _times(scan, device, runs)]
    del source, scan
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    products = _times(lambda: torch.mm(left, right), device, runs)
    name = str(dtype).removeprefix("torch.")
    return MeasuredSpeeds(
        tuple(reads),
        tuple(2 * width**3 / seconds for seconds in products),
        f"{method}, and a {name} product of {width} x {width} x {width}",
    )


def _times(work: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Seconds of each of `runs`, after two that are not counted; on a GPU by its own clock."""
    import torch

    seconds = []
    for turn in range(runs + 2):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(CALLS):
                work()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) / 1e3 / CALLS
        else:
            started = time.perf_counter()
            work()
            taken = time.perf_counter() - started
        if turn >= 2:
            seconds.append(taken)
    return seconds

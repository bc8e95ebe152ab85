"""Each launch of a fused decode step alone, against the bytes it must read and the library call it replaces.

Called by `pellucid bench kernels`. A step is run once with every launcher recorded; then each kind of launch is
replayed by itself, over all layers in one CUDA graph, so that weights come from memory and not from the L2 cache.
"""

from __future__ import annotations

import importlib
import inspect
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from pellucid.layers.fused_step import FusedStep
from pellucid.runner.cuda_graphs import capture_graph

if TYPE_CHECKING:
    import torch

    from pellucid.runner.gpu_runner import GPURunner

LAUNCHERS = {
    "mla_decode": ("absorb_rope_write", "split_decode", "combine_project"),
    "gqa_attend": ("attend",),
    "moe_small": ("router_and_shared", "small_experts_up", "small_experts_down"),
    "moe_grouped": ("sort_by_expert", "grouped_up", "grouped_down", "reduce_pairs"),
    "routing": ("route_topk",),
    "head": ("begin_step", "small_head", "partial_best"),
    "token_filters": ("sampling_bins",),
}
REPEATS = 7


class Launch(NamedTuple):
    """A call that can be repeated, also with other options (a tile)."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self, **other: Any) -> None:
        self.function(*self.args, **self.options | other)


@dataclass(slots=True)
class Recorded:
    """Launches of one kind, the bytes that all of them must move, and the library's way."""

    name: str
    launches: list[Launch] = field(default_factory=list)
    library: list[Launch] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kind of launch at `rows` rows. Times are microseconds a launch: the median, and half the quartiles' distance.

    `floor_us`: its bytes at the bandwidth given. `library_us` is None where no single library call does the same.
    """

    rows: int
    name: str
    launches: int
    megabytes: float
    floor_us: float
    us: float
    spread_us: float
    library_us: float | None

    @property
    def share(self) -> float:
        """Of the floor; above 1 where what is read was left in the cache by the launch before."""
        return self.floor_us / self.us


def measure_kernels(runner: GPURunner, rows: int, context: int, bandwidth: float) -> list[KernelTime]:
    """Every kind of launch of a step of `rows` rows that see `context` keys. `bandwidth` in bytes per second."""
    import torch

    with torch.inference_mode():
        runner.fill_state(rows, context)
        recorded = record_step(runner, rows)
        found = []
        for kind in recorded.values():
            us, spread = time_graph([launch.run for launch in kind.launches])
            library = time_graph([launch.run for launch in kind.library])[0] if kind.library else None
            count = len(kind.launches)
            floor = kind.num_bytes / count / bandwidth * 1e6
            found.append(KernelTime(rows, kind.name, count, kind.num_bytes / count / 1e6, floor, us, spread, library))
    return found


def record_step(runner: GPURunner, rows: int) -> dict[str, Recorded]:
    """One step of the fused decoder, by kind of launch in the order they first come."""
    kinds: dict[str, Recorded] = {}

    def note(name: str, launch: Launch, num_bytes: int, library: Launch | None) -> None:
        kind = kinds.setdefault(name, Recorded(name))
        kind.launches.append(launch)
        kind.num_bytes += num_bytes
        if library is not None:
            kind.library.append(library)

    with _recording(note):
        runner.fused.step(rows)
    return kinds


@contextmanager
def _recording(note: Callable[..., None]) -> Iterator[None]:
    project = FusedStep.project

    def recorded_project(step: FusedStep, x: Any, weight: Any, out: Any, **options: Any) -> Any:
        import torch

        plain = torch.empty(step.rows, weight.shape[0], dtype=x.dtype, device=x.device)
        note(
            f"project {weight.shape[1]}->{weight.shape[0]}",
            Launch(project, (step, x, weight, out), options),
            weight.nbytes + x.nbytes + out.nbytes,
            Launch(torch.mm, (x, weight.t()), {"out": plain}),
        )
        return project(step, x, weight, out, **options)

    def recorded(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)

        def launch(*args: Any, **options: Any) -> None:
            function(*args, **options)
            bound = signature.bind(*args, **options).arguments
            note(function.__name__, Launch(function, args, options), _bytes_moved(bound), None)

        return launch

    with ExitStack() as stack:
        stack.enter_context(patch.object(FusedStep, "project", recorded_project))
        for name, launchers in LAUNCHERS.items():
            module = importlib.import_module(f"pellucid.kernels.triton.{name}")
            for launcher in launchers:
                stack.enter_context(patch.object(module, launcher, recorded(getattr(module, launcher))))
        yield


def _bytes_moved(arguments: dict[str, Any]) -> int:
    """What a launch must read of weights and cache, by the names of its arguments. Activations are small beside it."""
    import torch

    total = 0
    chosen = arguments.get("experts")
    if chosen is None and "blocks" in arguments:
        blocks = arguments["blocks"]
        chosen = blocks.block_experts[: int(blocks.count)]
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in ("gate_up", "down") and chosen is not None:
            # -1 is nobody: a padded row's.
            total += len(chosen[chosen >= 0].unique()) * value[0].nbytes
        elif name in ("latent", "keys", "values") and "partial" in arguments:
            total += int(arguments["context"].sum()) * value.shape[-1] * value.itemsize
        elif name in ("absorb", "value_up", "gate", "shared_gate_up", "shared_down", "weight", "partial", "pair_out"):
            total += value.nbytes
        elif name == "embedding":
            total += arguments["x"].nbytes
    return total


def time_graph(launches: list[Callable[[], None]]) -> tuple[float, float]:
    """Microseconds a launch: median over replays of one graph of all of them, and half the quartiles' distance."""
    import torch

    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()

    def launch_all() -> None:
        for launch in launches:
            launch()

    graph = capture_graph(launch_all)
    # A short graph is replayed several times between two events, so that their own cost is small beside it.
    replays = max(1, 64 // len(launches))
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = _timer(), _timer()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays / len(launches))
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), (high - low) / 2


def _timer() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

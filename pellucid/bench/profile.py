"""Where the time of a decode step goes: every kernel by its kind of work, beside what that work must take.

Called by `pellucid profile`. A kernel is told by its name alone, so a product that attention or the shared experts
have from cuBLAS counts as dense; its floor is where the work belongs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from pellucid.bench.bandwidth import measure_speeds
from pellucid.bench.idle import Window
from pellucid.bench.roofline import StepFloor, step_floor
from pellucid.engine.engine import Engine
from pellucid.quantization.weight import dtype_of

CLASSES = (
    "attention",
    "moe",
    "dense gemm",
    "norm, rope, elementwise",
    "sampling",
    "embedding",
    "all-reduce",
    "copies",
    "other",
)

OWN: Mapping[str, tuple[str, ...]] = {
    "attention": ("_absorb_rope_write", "_attend", "_combine", "_combine_project", "_prefill", "_split_decode"),
    "moe": (
        "_count_experts", "_down_row_kernel", "_down_rows_kernel", "_experts_up_kernel", "_grouped_down",
        "_grouped_up", "_place_pairs", "_reduce_kernel", "_reduce_pairs", "_route_kernel", "_router_shared_kernel",
    ),
    "dense gemm": ("_dot_head_kernel", "_dot_kernel", "_gemv_head_kernel", "_gemv_kernel", "_rows_kernel"),
    "norm, rope, elementwise": (
        "_latent_write_kernel", "_norm_rope_write", "_rms_norm_kernel", "_silu_mul_kernel",
    ),
    "sampling": ("_finish_step_kernel", "_partial_best_kernel", "_sampling_bins_kernel"),
    "embedding": ("_begin_step_kernel",),
}  # fmt: skip
"""Our kernels by name; the rules are for those of libraries."""

_OWN_CLASS = {kernel: kind for kind, kernels in OWN.items() for kernel in kernels}

_RULES: tuple[tuple[str, str], ...] = (
    ("all-reduce", r"nccl|all_?reduce|allgather|reduce_scatter|one_shot|two_shot|multimem"),
    ("copies", r"^mem(cpy|set)|copy_kernel|copy_device|catarray|direct_copy|fillfunctor"),
    ("embedding", r"embedding|indexselect|index_select|gatherkernel|vectorized_gather"),
    ("sampling", r"argmax|sampl|distribution|multinomial"),
    # Before the products: they have names of products in them.
    ("attention", r"flash|fmha|_mla|mla_|xqa|paged_?attention|batchdecode|batchprefill|mergestate"),
    ("moe", r"expert|grouped_?gemm|router|topk|moe|bitonicsort|radixsort|sort_"),
    ("dense gemm", r"gemm|nvjet|cutlass|gemv|splitk"),
    (
        "norm, rope, elementwise",
        r"rms_?norm|rope|rotary|silu|elementwise|reduce_kernel|softmax|norm|index_?put|index_kernel|scatter|masked"
        r"|cumsum|scan",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _RULES)

FLOOR_OPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention over the cache", "kv_b, absorbed"),
    "moe": ("router", "shared experts", "routed experts"),
    "dense gemm": ("qkv", "o", "q, kv_a", "q_a, kv_a", "q_b", "dense MLP", "lm_head"),
}
"""Class of kernels -> the roofline's ops that are its work."""

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999999", "#555555", "#e4e4e4")


def classify(name: str) -> str:
    """The class of a kernel, of `CLASSES`: ours by name, others by the first rule that fits."""
    return _OWN_CLASS.get(name) or next((kind for kind, pattern in _COMPILED if pattern.search(name)), "other")


@dataclass(frozen=True, slots=True)
class ClassTime:
    """One class in a step: microseconds of its kernels (they may overlap others), share of the step, launches.

    `floor_us` is None where no least time is known. `kernels`: name -> microseconds a step, the longest first.
    """

    name: str
    us: float
    share: float
    launches: float
    floor_us: float | None
    kernels: dict[str, float]


@dataclass(frozen=True, slots=True)
class Profile:
    """A decode step of `concurrency` sequences; `gaps_us` is what is left of it when nothing runs."""

    concurrency: int
    steps: float
    step_us: float
    gaps_us: float
    floor_us: float
    classes: tuple[ClassTime, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def floor_of(engine: Engine, batch: int, context: int) -> StepFloor:
    """At the speeds measured now, on the engine's device."""
    import torch

    plan = engine.plan
    dtype = dtype_of(plan.dtype)
    speeds = measure_speeds(torch.device(plan.device), dtype).speeds()
    ranks, kv_dtype = plan.tensor_parallel_size, plan.kv_dtype
    return step_floor(engine.traits, speeds, batch=batch, context=context, ranks=ranks, kv_dtype=kv_dtype)


def class_times(kernels: Iterable[tuple[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Class -> kernel name -> durations, from (name, duration)."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, duration in kernels:
        found.setdefault(classify(name), {}).setdefault(name, []).append(duration)
    return found


def profile_of(window: Window, floor: StepFloor) -> Profile:
    """The window's kernels by class, for one step."""
    steps, wall = window.steps, window.wall_us
    found = class_times((kernel.name, kernel.end_us - kernel.start_us) for kernel in window.kernels)
    floors = {op.name: op.seconds(floor.speeds) * 1e6 for op in floor.ops}
    classes = []
    for name in CLASSES:
        kernels = {kernel: sum(durations) / steps for kernel, durations in found.get(name, {}).items()}
        ops = [floors[op] for op in FLOOR_OPS.get(name, ()) if op in floors]
        least = (
            floor.all_reduce_seconds * 1e6 if name == "all-reduce" and floor.all_reduce else sum(ops) if ops else None
        )
        if not kernels and least is None:
            continue
        us = sum(kernels.values())
        launches = sum(map(len, found.get(name, {}).values())) / steps
        longest = dict(sorted(kernels.items(), key=lambda item: -item[1]))
        classes.append(ClassTime(name, us, us * steps / wall, launches, least, longest))
    gaps = (wall - window.busy_us) / steps
    return Profile(window.concurrency, steps, wall / steps, gaps, floor.seconds * 1e6, tuple(classes))


def render(profile: Profile) -> str:
    """A table for people; the longest kernels of each class below it."""
    lines = [
        f"decode step of {profile.concurrency} sequences: {profile.step_us:.1f} us while profiled, floor "
        f"{profile.floor_us:.1f} us, mean of {profile.steps:.0f} steps",
        f"{'':26} {'us':>9} {'share':>7} {'launches':>9} {'floor us':>9}",
    ]
    for one in profile.classes:
        least = f"{one.floor_us:.1f}" if one.floor_us is not None else ""
        lines.append(f"{one.name:26} {one.us:>9.1f} {one.share:>7.1%} {one.launches:>9.1f} {least:>9}")
    lines.append(f"{'gaps: nothing runs':26} {profile.gaps_us:>9.1f} {profile.gaps_us / profile.step_us:>7.1%}")
    for one in profile.classes:
        lines += [f"  {one.name}: {us:.1f} us {kernel[:90]}" for kernel, us in list(one.kernels.items())[:3]]
    return "\n".join(lines)


def bar_svg(profiles: Sequence[Profile], title: str) -> str:
    """Stacked bars, one a profile: classes, then the gaps; a line marks the floor."""
    width, left, height, top = 720, 70, 34, 40
    parts: list[str] = []
    for row, profile in enumerate(profiles):
        y, x = top + row * (height + 14), float(left)
        times = [(one.name, one.us) for one in profile.classes if one.us] + [("gaps", profile.gaps_us)]
        # Where kernels overlap, the bar would be longer than the step.
        scale = width / max(profile.step_us, sum(us for _, us in times))
        parts.append(f'<text x="{left - 8}" y="{y + height / 2 + 4}" text-anchor="end">C={profile.concurrency}</text>')
        for name, us in times:
            label = escape(f"{name}: {us:.1f} us")
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{us * scale:.2f}" height="{height}" fill="{_colour(name)}">'
                f"<title>{label}</title></rect>"
            )
            x += us * scale
        at = left + profile.floor_us * scale
        parts.append(f'<line x1="{at:.2f}" x2="{at:.2f}" y1="{y - 4}" y2="{y + height + 4}" stroke="black"/>')
        parts.append(f'<text x="{left + width + 8}" y="{y + height / 2 + 4}">{profile.step_us:.0f} us</text>')
    y = top + len(profiles) * (height + 14) + 16
    shown = [name for name in (*CLASSES, "gaps") if any(_has(profile, name) for profile in profiles)]
    for index, name in enumerate(shown):
        x, line = left + index % 4 * 180, y + index // 4 * 20
        parts.append(f'<rect x="{x}" y="{line - 10}" width="12" height="12" fill="{_colour(name)}"/>')
        parts.append(f'<text x="{x + 17}" y="{line}">{escape(name)}</text>')
    total = y + (len(shown) - 1) // 4 * 20 + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 90} {total}" '
        f'font-family="sans-serif" font-size="12"><text x="{left}" y="20" font-size="14">{escape(title)}</text>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _colour(name: str) -> str:
    return COLOURS[CLASSES.index(name) if name in CLASSES else -1]


def _has(profile: Profile, name: str) -> bool:
    return name == "gaps" or any(one.name == name and one.us for one in profile.classes)

"""The launches of fused decode steps as measured choices, projections above all: their candidates and decisions.

Called by `tuning.session`'s callers. A tile alone (own graph, cold L2) and the same within a step can rank otherwise,
because launches overlap there: alone they are only sorted out, and the time of the whole step decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pellucid.kernels.device import DeviceLimits
from pellucid.layers.step_tiles import PREFIX, Projection, tile_name
from pellucid.selection.bucket import buckets_up_to
from pellucid.selection.evidence import STEP_TIE_SHARE, Measurement, fastest, is_tie
from pellucid.selection.plan import Decision, ExecutionPlan, Measured, Rejection
from pellucid.traits.misfit import Misfit
from pellucid.traits.model import ModelTraits
from pellucid.tuning.measure import Question, turn
from pellucid.tuning.step_choices import Given, Tiles, traits_of
from pellucid.tuning.store import APART

if TYPE_CHECKING:
    from pellucid.kernels.triton.linear import LinearTile
    from pellucid.kernels.triton.rows_linear import RowsTile

APART_SHARE = 0.10
"""Alone within this of the best, a tile may be the best in a step."""

MOST_IN_A_STEP = 4
"""Candidates whose step is timed, the default among them: each is a graph to capture. Besides, those that differ from
the default in what they fetch ahead alone, of which only a step can tell."""

AHEAD = (0, 128, 256, 512, 1024, 2048, 4096)
"""Columns that a tile may fetch ahead; neighbours are two places away."""

BOTH_WAYS_ROWS = 4
"""Steps of so few rows may multiply on fp32 lanes or on the tensor cores."""

MAX_ROWS = 128
"""Steps of more rows are the library's, as in `kernels.triton.rows_linear`."""

Answer = Callable[[Question], Mapping[str, Measurement]]
Candidates = Callable[[Projection, int], Sequence[str]]
Others = Callable[[int], Iterable[tuple[str, Sequence[str]]]]


def projections_of(traits: ModelTraits, rows: int) -> tuple[Projection, ...]:
    """The distinct projections of a fused step of `rows` rows, those of most weights in all layers first."""
    from pellucid.layers.fused_step import FEW_ROWS

    hidden, attention = traits.hidden_size, traits.attention
    counts: dict[Projection, int] = {}

    def add(layers: int, *found: Projection) -> None:
        for one in found if layers else ():
            counts[one] = counts.get(one, 0) + layers

    if attention.kind == "mla":
        queries, heads = attention.num_heads * attention.qk_head_dim, attention.num_heads
        low = attention.q_lora_rank
        add(traits.num_layers, Projection((low or queries) + attention.latent_head_size, hidden))
        if low is not None:
            add(traits.num_layers, Projection(queries, low))
        add(traits.num_layers, Projection(hidden, heads * attention.v_head_dim))
    else:
        width = attention.head_dim
        add(traits.num_layers, Projection((attention.num_heads + 2 * attention.num_kv_heads) * width, hidden))
        add(traits.num_layers, Projection(hidden, attention.num_heads * width))
    dense = traits.intermediate_size
    add(traits.num_dense_layers, Projection(2 * dense, hidden, True), Projection(hidden, dense))
    # Of few rows, shared experts are computed beside the router.
    if traits.moe is not None and traits.moe.num_shared_experts and rows > FEW_ROWS:
        shared = traits.moe.shared_intermediate_size
        add(traits.num_layers - traits.num_dense_layers, Projection(2 * shared, hidden, True),
            Projection(hidden, shared))  # fmt: skip
    return tuple(sorted(counts, key=lambda p: -p.rows * p.columns * counts[p]))


def tile_candidates(projection: Projection, rows: int, limits: DeviceLimits) -> tuple[str, ...]:
    """Names of tiles that a step of `rows` rows can take here, the default first, then the library.

    Neighbours of the default: half and twice its weight rows and its columns, less and more that it fetches ahead.
    """
    from pellucid.kernels.triton import linear, rows_linear
    from pellucid.layers.fused_step import FUSED_NORM_ROWS, projection_tile

    n, k, pair = projection
    default = projection_tile(n, k, rows, pair, limits)
    found: list[linear.LinearTile | rows_linear.RowsTile | None] = [default, None]
    if rows <= linear.MAX_ROWS:
        base = default if isinstance(default, linear.LinearTile) else linear.linear_tile(n, k, rows)
        near = [base, *_small_neighbours(base, k, pair)]
        if 1 < rows <= BOTH_WAYS_ROWS:
            # The default of the other way to multiply: which is faster is near a tie here.
            near.append(linear.linear_tile(n, k, 1 if base.dot else linear.MAX_ROWS))
        if rows > FUSED_NORM_ROWS and (pair or n > k):
            # Those behind a norm.
            near.append(base._replace(norms=True))
        found += [one for one in near if pipeline_bytes(one, rows) <= limits.shared_memory]
    found += [] if default is None else [default._replace(ahead=columns) for columns in _ahead(default, k)]
    # Copies by descriptors want rows of whole 16 bytes.
    if 1 < rows <= rows_linear.MAX_ROWS and k % 8 == 0:
        found += _rows_tiles(projection, rows, limits)
    return tuple(dict.fromkeys(tile_name(one) for one in found))


def decode_buckets(plan: ExecutionPlan) -> tuple[int, ...]:
    """Of the steps whose tiles are measured, those far apart first: time may be up early."""
    return tuple(sorted((b for b in buckets_up_to(plan.max_num_seqs) if b <= MAX_ROWS), key=turn))


def measure_tiles(
    plan: ExecutionPlan,
    traits: ModelTraits,
    candidates: Candidates,
    answer: Answer,
    others: Others = lambda _: (),
    beside: Callable[[int], Given] = lambda _: (),
) -> Tiles:
    """Coordinate descent, bucket by bucket: each launch's tile by the step's time, the chosen ones in force.

    Projections of all buckets come before `others`, ops of a step that are none, with their candidates: they gain
    most. `beside`: in what steps of so many rows differ from the default's already.
    """
    found: list[tuple[Question, Mapping[str, Measurement]]] = []
    about = traits_of(plan, "step")
    buckets = decode_buckets(plan)
    given: dict[int, list[tuple[str, str]]] = {rows: list(beside(rows)) for rows in buckets}

    def decide(op: str, rows: int, order: Sequence[str]) -> None:
        if len(order) < 2:
            return
        question = Question(op, rows, tuple(order), about, tuple(given[rows]))
        results = answer(question)
        chosen = winner(order, results)
        if chosen is not None:
            found.append((question, results))
            if chosen != order[0]:
                given[rows].append((f"{op}@{rows}", chosen))

    for rows in buckets:
        named = [(projection, tuple(candidates(projection, rows))) for projection in projections_of(traits, rows)]
        apart = [(p.op, Question(APART + p.op, rows, names, about)) for p, names in named if len(names) > 1]
        for op, alone in apart:
            decide(op, rows, _promising(alone.order, answer(alone)))
    for rows in buckets:
        for op, order in others(rows):
            decide(op, rows, order)
    return Tiles(tuple(found))


def winner(order: Sequence[str], results: Mapping[str, Measurement]) -> str | None:
    """By the tie rule, among those that are right; None when nothing can be concluded."""
    right = [name for name in order if name not in results or results[name].right]
    return fastest(right, {name: m for name, m in results.items() if m.right}, STEP_TIE_SHARE)


def tile_decision(question: Question, results: Mapping[str, Measurement]) -> Decision:
    """The measured choice of one projection at one bucket, from figures of the whole step."""
    chosen = winner(question.order, results)
    assert chosen is not None, "only concluded questions become decisions"
    default, mine = question.order[0], results[chosen]
    verdict = f"measured {mine} a step"
    if chosen != default and results[default].right:
        verdict += f", with the default {default} {results[default]}"
    rejected = []
    for name in question.order:
        m = results.get(name)
        if name == chosen or m is None:
            continue
        if not m.right:
            misfit = Misfit(f"fails the numeric gate: {m.detail}", "", "numerics")
        elif is_tie(m, mine, STEP_TIE_SHARE):
            misfit = Misfit(f"fits; after {chosen} in the fixed order; measured as a tie", "", "order")
        else:
            misfit = Misfit(f"fits; measured {m} a step against {mine}", "", "slower")
        rejected.append(Rejection(name, (misfit,)))
    shape = "a launch of the fused step"
    if question.op.startswith(PREFIX):
        projection = Projection.of(question.op)
        shape = f"weight [{projection.rows}, {projection.columns}]{', gate and up' if projection.pair else ''}"
    table = tuple(Measured.of(name, results[name]) for name in question.order if name in results)
    return Decision(question.op, question.bucket, chosen, "measured", (shape, verdict), tuple(rejected), table)


def _promising(order: tuple[str, ...], apart: Mapping[str, Measurement]) -> tuple[str, ...]:
    """The default, the fastest of those that alone are near the best, and what differs in what it fetches ahead; nobody
    else without figures."""
    right = {name: m for name, m in apart.items() if m.right}
    if order[0] not in right:
        return order[:1]
    best = min(m.seconds for m in right.values())
    alike = {name for name in order[1:] if name in right and _but_ahead(name) == _but_ahead(order[0])}
    near = [name for name in order[1:] if name in right and right[name].seconds <= best * (1 + APART_SHARE)]
    others = sorted((name for name in near if name not in alike), key=lambda name: right[name].seconds)
    kept = alike.union(others[: MOST_IN_A_STEP - 1])
    return (order[0], *(name for name in order if name in kept))


def _but_ahead(name: str) -> str:
    return re.sub(r"-a\d+", "", name)


def _small_neighbours(base: LinearTile, k: int, pair: bool) -> Iterator[LinearTile]:
    widest = 1 << max(k - 1, 1).bit_length()
    least = 16 if base.dot else 2 if pair else 1
    for block_n in (base.block_n // 2, base.block_n * 2):
        if block_n >= least:
            yield base._replace(block_n=block_n)
    for block_k in (base.block_k // 2, base.block_k * 2):
        # Each warp keeps the columns that it has: half as many warps, or parts, for half the columns.
        shrinks = block_k < base.block_k
        if 128 <= block_k <= widest and not base.dot:
            yield base._replace(block_k=block_k, warps=max(1, base.warps // 2) if shrinks else min(base.warps * 2, 16))
        elif 128 <= block_k <= widest:
            parts = max(1, base.split // 2) if shrinks else min(base.split * 2, 8)
            yield base._replace(block_k=block_k, split=parts, warps=parts)
    if base.dot:
        yield base._replace(stages=2)


def _ahead(tile: LinearTile | RowsTile, k: int) -> Iterator[int]:
    """Other columns to fetch than the tile's, as far as there are any."""
    from pellucid.kernels.triton.linear import LinearTile

    there = k - tile.block_k if isinstance(tile, LinearTile) else k // tile.split
    at = AHEAD.index(tile.ahead)
    for other in (AHEAD[i] for i in (at - 2, at + 2) if 0 <= i < len(AHEAD)):
        if min(other, there) != min(tile.ahead, there):
            yield other


def pipeline_bytes(tile: LinearTile, rows: int) -> int:
    """Shared memory of the pipeline's buffers: weights, and rows padded to 8 or 16. fp32 lanes have none."""
    padded = 8 if rows <= 8 else 16
    return tile.stages * (tile.block_n + padded) * tile.block_k * 2 if tile.dot else 0


def _rows_tiles(projection: Projection, rows: int, limits: DeviceLimits) -> Iterator[RowsTile]:
    """Tiles of `rows_linear` that fill the device in one wave, each with as deep a pipeline as fits."""
    from pellucid.kernels.triton.rows_linear import RowsTile, tile_bytes

    n, k, _ = projection
    # Of more than 64 rows, stages of 128 x 128 are too few.
    shapes = ((64, 128, 4), (128, 64, 8) if rows > 64 else (128, 128, 4), (256, 64, 8))
    for block_n, block_k, warps in shapes:
        tiles = -(-n // block_n)
        for split in (1, 2, 4, 8):
            if split > 1 and (tiles * split > limits.sm_count or 3 * split * block_k > k):
                continue
            if split == 1 and 2 * tiles < limits.sm_count and 6 * block_k <= k:
                continue
            tile = RowsTile(block_n, block_k, split, warps, 8, 128, limits.tma, split > 1)
            while tile.stages > 2 and tile_bytes(tile, rows) > limits.shared_memory:
                tile = tile._replace(stages=tile.stages - 1)
            if tile_bytes(tile, rows) <= limits.shared_memory:
                yield tile

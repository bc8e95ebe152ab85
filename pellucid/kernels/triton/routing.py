# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="import-untyped"
"""The router of a MoE layer: logits beside the shared experts (at most 16 rows), top-k (any rows). Called by the step.

The choice follows the same rule as `layers.moe.route`; equal scores go to the lowest expert (and the lowest group).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pellucid.kernels.triton.chain import wait_for_input
from pellucid.kernels.triton.few_rows import (
    MAX_ROWS,
    SmallTile,
    fetch_ahead,
    fit_block_k,
    gate_up_rows,
    inverse_rms,
    normed_tile,
    project,
    store_silu_mul,
)
from pellucid.traits.model import GroupRule, MoETraits, Scoring

_ROUTER_EXPERTS = {True: 4, False: 16}  # experts a router program scores: of one row, of several


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How router logits become experts and weights. The fields mean what they mean in `MoETraits`."""

    top_k: int
    scoring: Scoring
    normalize: bool
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_rule: GroupRule = "none"

    @classmethod
    def of(cls, traits: MoETraits) -> RoutingRule:
        """The rule of a model whose scoring is known, as it is once tensor headers were read."""
        scoring = traits.scoring or "softmax"
        groups = (traits.num_groups, traits.topk_groups, traits.group_rule)
        return cls(traits.top_k, scoring, traits.normalize, traits.scaling, *groups)

    def constants(self, num_experts: int, rows: int) -> dict[str, object]:
        """The compile-time arguments of `choose_experts`. At most 2048 scores are held at once: 16 a thread."""
        groups = 1 if self.group_rule == "none" else self.num_groups
        group_size = num_experts // groups
        padded_groups, padded_size = triton.next_power_of_2(groups), triton.next_power_of_2(group_size)
        at_once = min(triton.next_power_of_2(rows), max(1, 2048 // (padded_groups * padded_size)))
        return {
            "EXPERTS": num_experts,
            "TOP_K": self.top_k,
            "SIGMOID": self.scoring == "sigmoid",
            "NORMALIZE": self.normalize,
            "SCALING": self.scaling,
            "GROUPS": groups,
            "TOPK_GROUPS": self.topk_groups,
            "GROUP_BEST": {"none": 0, "max": 1, "top2_sum": min(2, group_size)}[self.group_rule],
            "PADDED_GROUPS": padded_groups,
            "PADDED_SIZE": padded_size,
            "PADDED_K": triton.next_power_of_2(self.top_k),
            "ROWS_AT_ONCE": at_once,
        }


def route_topk(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction_bias: torch.Tensor | None,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    context: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """experts int32 and weights fp32, both [rows, top_k], from router logits [rows, num_experts]; any rows.

    All are contiguous, logits of any float dtype; correction_bias [num_experts] or None. With `context` int32 [rows], a
    row of context 0 (padding) gets expert -1 and weight 0 everywhere.
    """
    rows, num_experts = logits.shape
    constants = rule.constants(num_experts, 1)
    # One warp a row: every reduction stays within it.
    _route_kernel[(rows,)](
        logits, correction_bias, context, experts, weights, **constants, PDL=pdl, num_warps=1, launch_pdl=pdl
    )


def route(
    logits: torch.Tensor, traits: MoETraits, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layers.moe.route` in one launch; experts int32."""
    experts = torch.empty(logits.shape[0], traits.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=logits.device)
    route_topk(logits, RoutingRule.of(traits), correction_bias, experts, weights)
    return experts, weights


def shared_tile(hidden: int, rows: int) -> SmallTile:
    """Of `router_and_shared`. Small programs: an expert of 2816 must keep 132 SMs busy."""
    if rows == 1:
        return SmallTile(4, fit_block_k(hidden, 512), warps=2)
    return SmallTile(16, fit_block_k(hidden, 128), stages=4)


def router(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    gate: torch.Tensor,
    logits: torch.Tensor,
    normed: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """logits fp32 [rows, experts] = rms_norm(x) @ gate.T, and the normed rows themselves where `normed` is given.

    x, normed [rows, hidden] with any row stride, not the same; gate [experts, hidden]; norm None: x is normed already.
    """
    _launch_router(x, norm, eps, gate, logits, normed, None, None, (None,) * 6, None, pdl)


def router_and_shared(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    gate: torch.Tensor,
    logits: torch.Tensor,
    shared_gate_up: torch.Tensor | None,
    shared_act: torch.Tensor | None,
    *,
    correction_bias: torch.Tensor | None,
    rule: RoutingRule,
    experts_out: torch.Tensor,
    weights_out: torch.Tensor,
    counter: torch.Tensor,
    normed: torch.Tensor | None = None,
    context: torch.Tensor | None = None,
    pdl: bool = False,
    tile: SmallTile | None = None,
) -> None:
    """The router, its top-k, and shared_act = silu(gate) * up of the shared experts, in one launch.

    logits fp32 [rows, experts] is scratch. shared_gate_up [2 * shared, hidden], gate above up, and shared_act
    [rows, shared], any row stride, are both None where there are no shared experts. experts_out int32 and weights_out
    fp32 [rows, top_k]. counter int32 [1] is 0, and is 0 again afterwards. `normed` and norm as in `router`; `context`
    as in `route_topk`. The router's programs come first, so that the choice is made while the shared weights are read.
    """
    choice = (rule, correction_bias, context, experts_out, weights_out, counter)
    _launch_router(x, norm, eps, gate, logits, normed, shared_gate_up, shared_act, choice, tile, pdl)


def _launch_router(x, norm, eps, gate, logits, normed, shared_gate_up, shared_act, choice, tile, pdl) -> None:
    (rows, hidden), num_experts = x.shape, gate.shape[0]
    tile = tile or shared_tile(hidden, rows)
    rule, bias, context, experts, weights, counter = choice
    shared, act_stride = (0, 0) if shared_act is None else (shared_act.shape[1], shared_act.stride(0))
    block_e = _ROUTER_EXPERTS[rows == 1]
    routers = triton.cdiv(num_experts, block_e)
    norming = 0 if normed is None else rows
    constants = (rule or RoutingRule(1, "softmax", False)).constants(num_experts, rows)
    _router_shared_kernel[(routers + norming + triton.cdiv(shared, tile.block_n),)](
        x, x.stride(0), rows, norm, eps, gate, logits, bias, context, experts, weights, counter,
        normed, norming and normed.stride(0), shared_gate_up, shared_act, act_stride,
        **constants, CHUNKS=triton.cdiv(rows, constants["ROWS_AT_ONCE"]),
        HIDDEN=hidden, SHARED=shared, BLOCK_R=1 if rows == 1 else MAX_ROWS, BLOCK_E=block_e, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, ROUTER_K=fit_block_k(hidden, 2048 if rows == 1 else 256), PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _ordered(bits):
    """The bits of fp32 values as int32 that compare as the values do. Its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(values, tie):
    """int64 that order by fp32 value, then by the lower `tie`, which is below 2**31."""
    ordered = _ordered(values.to(tl.int32, bitcast=True)).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - tie)


@triton.jit
def _keep_best_groups(
    choice, TOPK_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """choice [ROWS, PADDED_GROUPS * PADDED_SIZE] with -inf in every group but the best TOPK_GROUPS."""
    grouped = tl.reshape(choice, (ROWS, PADDED_GROUPS, PADDED_SIZE))
    ranked, best = tl.max(grouped, axis=2, return_indices=True, return_indices_tie_break_left=True)
    if GROUP_BEST == 2:
        member = tl.arange(0, PADDED_SIZE)
        others = tl.where(member[None, None, :] == best[:, :, None], float("-inf"), grouped)
        ranked += tl.max(others, axis=2)
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    keys = tl.where(group < GROUPS, _keys(ranked, group), -0x7FFFFFFFFFFFFFFF)
    kept = tl.zeros((ROWS, PADDED_GROUPS), tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        taken = keys == tl.max(keys, axis=1)[:, None]
        kept = tl.where(taken, 1, kept)
        keys = tl.where(taken, -0x7FFFFFFFFFFFFFFF, keys)
    grouped = tl.where(kept[:, :, None] != 0, grouped, float("-inf"))
    return tl.reshape(grouped, (ROWS, PADDED_GROUPS * PADDED_SIZE))


@triton.jit
def choose_experts(
    logits, correction_bias, context, experts, weights, first_row, rows,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr, PADDED_K: tl.constexpr, ROWS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Experts and weights of ROWS_AT_ONCE rows from `first_row`, in the calling program."""
    WIDTH: tl.constexpr = PADDED_GROUPS * PADDED_SIZE
    GROUP_SIZE: tl.constexpr = EXPERTS // GROUPS
    row = first_row + tl.arange(0, ROWS_AT_ONCE)
    column = tl.arange(0, WIDTH)  # a group starts at a multiple of PADDED_SIZE
    expert = column // PADDED_SIZE * GROUP_SIZE + column % PADDED_SIZE
    real = (column // PADDED_SIZE < GROUPS) & (column % PADDED_SIZE < GROUP_SIZE)
    inside = (row < rows)[:, None] & real[None, :]
    # Past L1: other programs of the same launch may have written them.
    scores = tl.load(logits + row[:, None] * EXPERTS + expert[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    scores = scores.to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        scores = tl.where(real[None, :], scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    choice = scores
    if correction_bias is not None:
        choice += tl.load(correction_bias + expert, mask=real, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(real[None, :], choice, float("-inf"))
    if GROUP_BEST > 0:
        choice = _keep_best_groups(
            choice, TOPK_GROUPS, GROUP_BEST, GROUPS, ROWS_AT_ONCE, PADDED_GROUPS, PADDED_SIZE
        )  # fmt: skip
    # Padding is below every real key, and so is what was taken.
    keys = tl.where(real[None, :], _keys(choice, column[None, :]), -0x7FFFFFFFFFFFFFFF)
    rank = tl.arange(0, PADDED_K)[None, :]
    chosen = tl.zeros((ROWS_AT_ONCE, PADDED_K), tl.int32)
    weight = tl.zeros((ROWS_AT_ONCE, PADDED_K), tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, axis=1)
        taken = keys == best[:, None]
        at = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
        best_expert = at // PADDED_SIZE * GROUP_SIZE + at % PADDED_SIZE
        if correction_bias is None and GROUP_BEST == 0:
            best_score = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            best_score = tl.sum(tl.where(taken, scores, 0.0), axis=1)
        chosen = tl.where(rank == place, best_expert[:, None], chosen)
        weight = tl.where(rank == place, best_score[:, None], weight)
        keys = tl.where(taken, -0x7FFFFFFFFFFFFFFF, keys)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, axis=1)[:, None] + 1e-20)
    weight *= SCALING
    if context is not None:
        padding = tl.load(context + row, mask=row < rows, other=0)[:, None] == 0
        chosen = tl.where(padding, -1, chosen)
        weight = tl.where(padding, 0.0, weight)
    out = row[:, None] * TOP_K + rank
    tl.store(experts + out, chosen, mask=(row < rows)[:, None] & (rank < TOP_K))
    tl.store(weights + out, weight, mask=(row < rows)[:, None] & (rank < TOP_K))


@triton.jit
def _route_kernel(
    logits, correction_bias, context, experts, weights,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr, PADDED_K: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    choose_experts(
        logits, correction_bias, context, experts, weights, row, row + 1, EXPERTS, TOP_K, SIGMOID, NORMALIZE, SCALING,
        GROUPS, TOPK_GROUPS, GROUP_BEST, PADDED_GROUPS, PADDED_SIZE, PADDED_K, ROWS_AT_ONCE,
    )  # fmt: skip


@triton.jit
def _router_shared_kernel(
    x, x_stride, rows, norm, eps, gate, logits, correction_bias, context, experts, weights, counter,
    normed, normed_stride, shared_gate_up, shared_act, act_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALING: tl.constexpr,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr, PADDED_K: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, CHUNKS: tl.constexpr,
    HIDDEN: tl.constexpr, SHARED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROUTER_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs in this order: BLOCK_E experts' logits each, one row to norm each, BLOCK_N shared outputs each."""
    ROUTERS: tl.constexpr = (EXPERTS + BLOCK_E - 1) // BLOCK_E
    program = tl.program_id(0)
    row = tl.arange(0, BLOCK_R)
    if program < ROUTERS:
        expert = program * BLOCK_E + tl.arange(0, BLOCK_E)
        first = fetch_ahead(gate, expert, expert < EXPERTS, HIDDEN, ROUTER_K, BLOCK_R, PDL)
        wait_for_input(PDL)
        scores = project(
            first, gate, expert, expert < EXPERTS, x, row * x_stride, row < rows, norm, eps,
            HIDDEN, BLOCK_E, BLOCK_R, ROUTER_K,
        )  # fmt: skip
        inside = (expert < EXPERTS)[:, None] & (row < rows)[None, :]
        tl.store(logits + row[None, :] * EXPERTS + expert[:, None], scores, mask=inside)
        if counter is not None:
            # All threads' logits are stored before one of them says so.
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == ROUTERS - 1:
                tl.store(counter, 0)
                for chunk in tl.range(0, CHUNKS):
                    choose_experts(
                        logits, correction_bias, context, experts, weights, chunk * ROWS_AT_ONCE, rows, EXPERTS, TOP_K,
                        SIGMOID, NORMALIZE, SCALING, GROUPS, TOPK_GROUPS, GROUP_BEST, PADDED_GROUPS, PADDED_SIZE,
                        PADDED_K, ROWS_AT_ONCE,
                    )  # fmt: skip
    else:
        other = program - ROUTERS
        if normed is not None:
            if other < rows:
                wait_for_input(PDL)
                one = tl.arange(0, 1)
                offsets, target = one + other * x_stride, normed + other * normed_stride
                scale = 1.0
                if norm is not None:
                    scale = inverse_rms(x, offsets, one == 0, eps, HIDDEN, 1, 1024)
                for k in tl.static_range(0, HIDDEN, BLOCK_K):
                    columns = k + tl.arange(0, BLOCK_K)[None, :]
                    values = normed_tile(x, offsets, one == 0, norm, scale, k, HIDDEN, BLOCK_K)
                    tl.store(target + columns, values, mask=columns < HIDDEN)
            other -= rows
        if SHARED > 0:  # noqa: SIM102 (joined, the branch would be compiled without shared experts too)
            if other >= 0:
                m, mask = gate_up_rows(other, SHARED, BLOCK_N)
                first = fetch_ahead(shared_gate_up, m, mask, HIDDEN, BLOCK_K, BLOCK_R, PDL)
                wait_for_input(PDL)
                both = project(
                    first, shared_gate_up, m, mask, x, row * x_stride, row < rows, norm, eps,
                    HIDDEN, 2 * BLOCK_N, BLOCK_R, BLOCK_K,
                )  # fmt: skip
                out_row = tl.where(row < rows, row, -1)
                store_silu_mul(both, shared_act, act_stride, out_row, other, SHARED, BLOCK_N, BLOCK_R)

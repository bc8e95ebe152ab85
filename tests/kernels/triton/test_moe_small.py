"""One MoE layer of at most 16 rows against fp64: router, choice, shared experts, routed experts up and down."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
moe = pytest.importorskip("pellucid.kernels.triton.moe_small", reason="triton is for Linux")

from pellucid.layers.moe import route  # noqa: E402
from pellucid.traits.model import MoETraits  # noqa: E402

EPS = 1e-6
SMALL = moe.SmallTile(16, 32)  # few programs, more than one step of K


def near(got, expected, dtype):
    got, expected = got.double().cpu(), expected.double().cpu()
    error = (got - expected).norm() / expected.norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 3e-3)  # NaN fails


def rows_of(rows, width, device, dtype, fill=None):
    """[rows, width] with a row stride above the width."""
    wide = torch.randn(rows, width + 8, device=device).to(dtype)
    if fill is not None:
        wide.fill_(fill)
    return wide[:, :width]


def weight(*shape, device, dtype):
    return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)


def normed64(x, norm):
    x = x.double().cpu()
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double().cpu()


def silu_mul64(both):
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def nan(*shape, device, dtype=torch.float32):
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("with_norm", [True, False])
def test_router_logits_are_the_normed_rows_times_the_gate(rows, with_norm, device, dtype):
    x, norm = rows_of(rows, 72, device, dtype), weight(72, device=device, dtype=dtype) + 1
    gate = weight(21, 72, device=device, dtype=dtype)
    logits, normed = nan(rows, 21, device=device), rows_of(rows, 72, device, dtype, float("nan"))
    moe.router(x, norm if with_norm else None, EPS, gate, logits, normed)
    expected = normed64(x, norm) if with_norm else x.double().cpu()
    near(normed, expected, dtype)
    near(logits, expected @ gate.double().cpu().T, dtype)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("shared", [0, 40])
def test_one_launch_scores_chooses_and_runs_the_shared_experts(rows, shared, device, dtype):
    hidden, num_experts, top_k = 96, 20, 3
    traits = MoETraits(num_experts, top_k, 8, 0, 0, "sigmoid", True, True, 2.5, 5, 3, "top2_sum")
    x, norm = rows_of(rows, hidden, device, dtype), weight(hidden, device=device, dtype=dtype) + 1
    gate = weight(num_experts, hidden, device=device, dtype=dtype)
    bias = torch.randn(num_experts, device=device)
    gate_up = weight(2 * shared, hidden, device=device, dtype=dtype) if shared else None
    act = rows_of(rows, shared, device, dtype, float("nan")) if shared else None
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    logits = nan(rows, num_experts, device=device)
    # Twice: the second launch finds the counter as the first left it.
    for _ in range(2):
        experts = torch.full((rows, top_k), -7, dtype=torch.int32, device=device)
        weights = nan(rows, top_k, device=device)
        moe.router_and_shared(
            x, norm, EPS, gate, logits, gate_up, act, correction_bias=bias, rule=moe.RoutingRule.of(traits),
            experts_out=experts, weights_out=weights, counter=counter, tile=moe.SmallTile(8, 64),
        )  # fmt: skip
        expected_experts, expected_weights = route(logits.cpu(), traits, bias.cpu())
        assert counter.item() == 0
        assert experts.tolist() == expected_experts.tolist()
        torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-5, atol=1e-7)
    reference = normed64(x, norm)
    near(logits, reference @ gate.double().cpu().T, dtype)
    if shared:
        near(act, silu_mul64(reference @ gate_up.double().cpu().T), dtype)


def choice_of(rows, top_k, num_experts, device):
    """Distinct experts in a row, repeated among rows; the last row of several is padding."""
    experts = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)]).int()
    if rows > 1:
        experts[1] = experts[0].flip(0)
        experts[-1] = -1
    return experts.to(device)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("with_norm", [True, False])
def test_up_gives_silu_mul_of_each_pair(rows, with_norm, device, dtype):
    hidden, intermediate, top_k, num_experts = 72, 24, 3, 6
    x, norm = rows_of(rows, hidden, device, dtype), weight(hidden, device=device, dtype=dtype) + 1
    gate_up = weight(num_experts, 2 * intermediate, hidden, device=device, dtype=dtype)
    experts = choice_of(rows, top_k, num_experts, device)
    act = rows_of(rows * top_k, intermediate, device, dtype, float("nan"))
    moe.small_experts_up(x, norm if with_norm else None, EPS, experts, gate_up, act, tile=SMALL)
    reference = normed64(x, norm) if with_norm else x.double().cpu()
    chosen = experts.cpu().flatten().long()
    live = (chosen >= 0).nonzero()[:, 0]
    both = torch.einsum("pnk,pk->pn", gate_up.double().cpu()[chosen[live]], reference[live // top_k])
    near(act.cpu()[live], silu_mul64(both), dtype)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("shared", [0, 56])
def test_down_adds_the_weighted_pairs_and_the_shared_experts_to_the_residual(rows, shared, device, dtype):
    hidden, intermediate, top_k, num_experts = 40, 72, 3, 6
    experts, weights = choice_of(rows, top_k, num_experts, device), torch.rand(rows, top_k, device=device) + 0.5
    act = rows_of(rows * top_k, intermediate, device, dtype)
    down = weight(num_experts, hidden, intermediate, device=device, dtype=dtype)
    shared_act = rows_of(rows, shared, device, dtype) if shared else None
    shared_down = weight(hidden, shared, device=device, dtype=dtype) if shared else None
    residual = rows_of(rows, hidden, device, dtype)
    expected = residual.double().cpu()
    if shared:
        expected += shared_act.double().cpu() @ shared_down.double().cpu().T
    for row, chosen in enumerate(experts.tolist()):
        for j, expert in enumerate(chosen):
            if expert < 0:
                act[row * top_k + j] = float("nan")  # what nobody computed must not be read
            else:
                output = down[expert].double().cpu() @ act[row * top_k + j].double().cpu()
                expected[row] += weights[row, j].double().cpu() * output
    pair_out = nan(rows * top_k + rows, hidden, device=device)
    moe.small_experts_down(act, experts, weights, down, shared_act, shared_down, residual, pair_out, tile=SMALL)
    near(residual, expected, dtype)


def test_a_row_that_chose_nobody_gets_the_shared_experts_only(device, dtype):
    experts = torch.full((1, 2), -1, dtype=torch.int32, device=device)
    act, residual = nan(2, 16, device=device, dtype=dtype), rows_of(1, 16, device, dtype)
    shared_act, shared_down = rows_of(1, 16, device, dtype), weight(16, 16, device=device, dtype=dtype)
    down = weight(3, 16, 16, device=device, dtype=dtype)
    before = residual.double().cpu()
    moe.small_experts_up(residual, None, EPS, experts, weight(3, 32, 16, device=device, dtype=dtype), act)
    moe.small_experts_down(act, experts, nan(1, 2, device=device), down, shared_act, shared_down, residual)
    near(residual, before + shared_act.double().cpu() @ shared_down.double().cpu().T, dtype)


@pytest.mark.parametrize("hidden, intermediate", [(2048, 1408), (2048, 768), (7168, 2048), (256, 64)])
@pytest.mark.parametrize("rows", [1, 16])
def test_default_tiles_are_powers_of_two_and_no_wider_than_needed(hidden, intermediate, rows):
    shared, up, down = moe.shared_tile(hidden, rows), moe.up_tile(hidden, rows), moe.down_tile(intermediate, rows)
    for tile, columns in ((shared, hidden), (up, hidden), (down, intermediate)):
        for size in (tile.block_n, tile.block_k, tile.warps):
            assert size & (size - 1) == 0
        assert tile.block_k < 2 * columns

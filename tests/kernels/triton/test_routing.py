"""Top-k routing in one kernel against `layers.moe.route` in fp64 terms: the same experts, the same weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
routing = pytest.importorskip("pellucid.kernels.triton.routing", reason="triton is for Linux")

from pellucid.layers.moe import route  # noqa: E402
from pellucid.traits.model import MoETraits  # noqa: E402


def traits_of(num_experts, top_k, scoring, normalize=False, scaling=1.0, groups=(1, 1, "none")):
    return MoETraits(num_experts, top_k, 8, 0, 0, scoring, None, normalize, scaling, *groups)


def run(logits, traits, bias=None, context=None):
    """The kernel's experts and weights, on the CPU; what it does not write stays NaN, or -7."""
    rows, device = logits.shape[0], logits.device
    experts = torch.full((rows, traits.top_k), -7, dtype=torch.int32, device=device)
    weights = torch.full((rows, traits.top_k), float("nan"), device=device)
    routing.route_topk(logits, routing.RoutingRule.of(traits), bias, experts, weights, context=context)
    return experts.cpu(), weights.cpu()


CASES = {
    "softmax of 64": (traits_of(64, 6, "softmax"), False),
    "normalized, scaled": (traits_of(128, 8, "softmax", True, 2.5), False),
    "sigmoid with bias, not a power of two": (traits_of(24, 5, "sigmoid", True, 2.827), True),
    "three groups of ten, the best one": (traits_of(30, 4, "softmax", False, 16.0, (3, 2, "max")), False),
    "groups by their two largest biased scores": (traits_of(32, 8, "sigmoid", True, 2.5, (8, 4, "top2_sum")), True),
    "groups of one": (traits_of(4, 2, "sigmoid", True, 1.0, (4, 3, "top2_sum")), True),
    "all experts": (traits_of(5, 5, "softmax"), False),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_and_weights_are_those_of_the_reference(case, device):
    traits, biased = CASES[case]
    logits = torch.randn(3, traits.num_experts, device=device) * 3
    bias = torch.randn(traits.num_experts, device=device) if biased else None
    experts, weights = run(logits, traits, bias)
    expected_experts, expected_weights = route(logits.cpu(), traits, None if bias is None else bias.cpu())
    assert experts.tolist() == expected_experts.tolist()
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_equal_scores_go_to_the_lowest_experts_and_groups(device):
    logits = torch.zeros(1, 12, device=device)
    logits[0, 7] = 1.0
    assert run(logits, traits_of(12, 3, "softmax"))[0].tolist() == [[7, 0, 1]]
    # Groups 0 (experts 0-3), 1 (4-7), 2 (8-11): 1 is the best, 0 the first of the others.
    assert run(logits, traits_of(12, 6, "softmax", groups=(3, 2, "max")))[0].tolist() == [[7, 0, 1, 2, 3, 4]]


def test_negative_biased_scores_inside_a_kept_group_beat_groups_left_out(device):
    logits = torch.zeros(1, 8, device=device)
    bias = torch.tensor([-3.0, -1.0, -2.0, -2.5, -1.2, -1.3, -9.0, -9.0], device=device)
    traits = traits_of(8, 2, "sigmoid", groups=(2, 1, "top2_sum"))
    # Group 1's two largest (-1.2, -1.3) beat group 0's (-1, -2), though expert 1 alone is the best.
    assert run(logits, traits, bias)[0].tolist() == [[4, 5]]


def test_padded_rows_choose_nobody_and_other_rows_are_unmoved(device):
    traits = traits_of(16, 4, "softmax", True)
    logits = torch.randn(3, 16, device=device)
    logits[1] = float("nan")
    experts, weights = run(logits, traits, context=torch.tensor([5, 0, 1], dtype=torch.int32, device=device))
    assert experts[1].tolist() == [-1] * 4
    assert weights[1].tolist() == [0.0] * 4
    expected_experts, expected_weights = route(logits[[0, 2]].cpu(), traits, None)
    assert experts[[0, 2]].tolist() == expected_experts.tolist()
    torch.testing.assert_close(weights[[0, 2]], expected_weights)


def test_logits_that_are_not_numbers_still_give_experts_that_exist(device):
    logits = torch.full((1, 6), float("nan"), device=device)
    experts, _ = run(logits, traits_of(6, 4, "softmax"))
    assert len(set(experts[0].tolist())) == 4
    assert all(0 <= expert < 6 for expert in experts[0].tolist())

"""`layers.moe.route` against the reference gating, and on inputs made to mislead it."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest

from pellucid.layers.moe import route
from pellucid.traits.model import GroupRule, MoETraits, Scoring
from tests.reference import gate

Array = npt.NDArray[np.float64]

EXPERTS, TOP_K, GROUPS, TOPK_GROUPS = 16, 4, 4, 2
RULES: list[tuple[Scoring, GroupRule]] = [
    ("softmax", "none"), ("softmax", "max"), ("sigmoid", "none"), ("sigmoid", "top2_sum")
]  # fmt: skip


def _traits(scoring: Scoring, rule: GroupRule, *, normalize: bool = True, scaling: float = 2.5) -> MoETraits:
    return MoETraits(
        num_experts=EXPERTS,
        top_k=TOP_K,
        intermediate_size=1,
        num_shared_experts=0,
        shared_intermediate_size=0,
        scoring=scoring,
        correction_bias=scoring == "sigmoid",
        normalize=normalize,
        scaling=scaling,
        num_groups=GROUPS if rule != "none" else 1,
        topk_groups=TOPK_GROUPS if rule != "none" else 1,
        group_rule=rule,
    )


def _run(logits: Array, traits: MoETraits, bias: Array | None) -> tuple[npt.NDArray[np.int64], Array]:
    import torch

    given = None if bias is None else torch.from_numpy(bias).float()
    experts, weights = route(torch.from_numpy(logits).float(), traits, given)
    assert experts.dtype == torch.int64
    assert weights.dtype == torch.float32
    return experts.numpy(), weights.double().numpy()


def _reference(logits: Array, traits: MoETraits, bias: Array | None) -> tuple[npt.NDArray[np.int64], Array]:
    routing = gate(
        logits.astype(np.float32).astype(np.float64),
        top_k=traits.top_k,
        scoring=str(traits.scoring),
        bias=None if bias is None else bias.astype(np.float32).astype(np.float64),
        num_groups=traits.num_groups,
        topk_groups=traits.topk_groups,
        group_rule=traits.group_rule,
        normalize=traits.normalize,
        scaling=traits.scaling,
    )
    clear = routing.margin > 1e-6
    return np.where(clear[:, None], routing.experts, -1), routing.weights


def _sorted(experts: npt.NDArray[np.int64], weights: Array) -> tuple[npt.NDArray[np.int64], Array]:
    order = np.argsort(experts, axis=-1)
    return np.take_along_axis(experts, order, -1), np.take_along_axis(weights, order, -1)


@pytest.mark.parametrize("mean_bias", [0.0, -0.6, -5.0, 5.0])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("scoring", "rule"), RULES)
def test_routing_equals_the_reference_whatever_the_sign_of_the_biased_scores(
    scoring: Scoring, rule: GroupRule, normalize: bool, mean_bias: float
) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((400, EXPERTS)) * 3
    bias = mean_bias + 0.3 * rng.standard_normal(EXPERTS) if scoring == "sigmoid" else None
    traits = _traits(scoring, rule, normalize=normalize)

    wanted, wanted_weights = _reference(logits, traits, bias)
    clear = (wanted >= 0).all(-1)
    assert clear.mean() > 0.9

    experts, weights = _sorted(*_run(logits[clear], traits, bias))
    wanted, wanted_weights = _sorted(wanted[clear], wanted_weights[clear])
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_allclose(weights, wanted_weights, rtol=2e-6)


@pytest.mark.parametrize(("scoring", "rule"), RULES)
def test_ties_are_broken_in_some_valid_way(scoring: Scoring, rule: GroupRule) -> None:
    rng = np.random.default_rng(2)
    logits = rng.integers(-1, 2, (200, EXPERTS)).astype(np.float64)
    logits[:3] = np.array([-200.0, 0.0, 200.0])[:, None]  # all equal, at both ends and in the middle
    traits = _traits(scoring, rule, normalize=False, scaling=1.0)
    bias = np.full(EXPERTS, -2.0) if scoring == "sigmoid" else None

    experts, weights = _run(logits, traits, bias)

    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else np.exp(logits - logits.max(-1, keepdims=True))
    if scoring == "softmax":
        scores /= scores.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(scores, experts, -1), rtol=1e-6, atol=1e-30)
    for row, chosen in zip(scores.round(9), experts, strict=True):
        assert _is_valid_choice(row, set(chosen.tolist()), rule)


def _is_valid_choice(scores: Array, chosen: set[int], rule: GroupRule) -> bool:
    """By trying every set of groups: `chosen` are the best of some best groups."""
    if len(chosen) != TOP_K:
        return False
    groups = 1 if rule == "none" else GROUPS
    members = np.arange(EXPERTS).reshape(groups, -1)
    best = np.sort(scores[members], -1)[:, ::-1]
    rank = best[:, 0] if rule != "top2_sum" else best[:, :2].sum(-1)
    for kept in combinations(range(groups), 1 if rule == "none" else TOPK_GROUPS):
        outside = [rank[group] for group in range(groups) if group not in kept]
        if outside and min(rank[list(kept)]) < max(outside):
            continue
        eligible = set(members[list(kept)].ravel().tolist())
        if chosen <= eligible and all(scores[other] <= min(scores[list(chosen)]) for other in eligible - chosen):
            return True
    return False


def test_weights_stay_finite_when_every_score_vanishes() -> None:
    """Sigmoids of -200 are 0 in fp32: the normaliser must not divide 0 by 0."""
    _, weights = _run(np.full((3, EXPERTS), -200.0), _traits("sigmoid", "top2_sum"), np.zeros(EXPERTS))
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("experts", [8, 12, 16, 72])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_is_routed_alike_whatever_it_is_batched_with(scoring: Scoring, experts: int) -> None:
    import torch

    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((67, experts))).float()
    bias = torch.from_numpy(rng.standard_normal(experts)).float() if scoring == "sigmoid" else None
    traits = replace(_traits(scoring, "none"), num_experts=experts)
    together = route(logits, traits, bias)
    for rows in (slice(0, 1), slice(5, 8), slice(30, 67)):
        alone = route(logits[rows], traits, bias)
        assert torch.equal(alone[0], together[0][rows])
        assert torch.equal(alone[1], together[1][rows])

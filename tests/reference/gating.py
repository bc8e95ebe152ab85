"""The router of a MoE layer in fp64: softmax or sigmoid, group rules, correction bias, normalisation, scaling.

Sources: https://arxiv.org/abs/2405.04434 section 2.2 (softmax, device-limited by the largest score of a group) and
https://arxiv.org/abs/2412.19437 section 2.1.2 (sigmoid, a bias that moves the choice only, groups ranked by the sum
of their two largest biased scores).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Routing(NamedTuple):
    """`experts`, `weights` [tokens, top_k]; `choice` [tokens, experts] is what was ranked, -inf where excluded.

    `margin` [tokens]: how far the nearest excluded group or expert was from being taken instead.
    """

    experts: npt.NDArray[np.int64]
    weights: Array
    choice: Array
    margin: Array


def gate(
    logits: Array,
    *,
    top_k: int,
    scoring: str = "softmax",
    bias: Array | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_rule: str = "none",
    normalize: bool = False,
    scaling: float = 1.0,
    left_out: float = -np.inf,
) -> Routing:
    """Routing of router logits [tokens, experts]. `group_rule` is none, max or top2_sum; ties go to the lower id.

    `left_out` is what experts of groups that are not kept score; anything but -inf is an error, made on purpose.
    """
    tokens, experts = logits.shape
    scores = _sigmoid(logits) if scoring == "sigmoid" else _softmax(logits)
    choice = scores.copy() if bias is None else scores + bias
    margin = np.full(tokens, np.inf)
    if group_rule != "none":
        grouped = choice.reshape(tokens, num_groups, experts // num_groups)
        best = -np.sort(-grouped, axis=-1)
        rank = best[..., 0] if group_rule == "max" else best[..., :2].sum(-1)
        order = np.argsort(-rank, axis=-1, kind="stable")
        margin = _gap(np.take_along_axis(rank, order, -1), topk_groups, margin)
        for token in range(tokens):
            grouped[token, order[token, topk_groups:]] = left_out
    order = np.argsort(-choice, axis=-1, kind="stable")
    margin = _gap(np.take_along_axis(choice, order, -1), top_k, margin)
    taken = order[:, :top_k]
    weights = np.take_along_axis(scores, taken, -1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(taken, weights * scaling, choice, margin)


def _gap(ranked: Array, count: int, margin: Array) -> Array:
    """The smaller of `margin` and the distance between the last taken and the first left out."""
    if count >= ranked.shape[-1]:
        return margin
    return np.minimum(margin, ranked[:, count - 1] - ranked[:, count])


def _sigmoid(z: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-z))


def _softmax(z: Array) -> Array:
    powers = np.exp(z - z.max(-1, keepdims=True))
    scores: Array = powers / powers.sum(-1, keepdims=True)
    return scores

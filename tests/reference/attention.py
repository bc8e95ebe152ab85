"""Causal attention in fp64, one whole sequence at a time: GQA, and MLA in its naive and absorbed forms.

MLA after https://arxiv.org/abs/2405.04434 section 2.1: keys and values are W_UK c and W_UV c of one latent c per
token, plus one rotated key shared by all heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def causal_weights(scores: Array) -> Array:
    """Softmax of scores [heads, queries, keys] over the keys up to each query."""
    tokens = scores.shape[-1]
    future = np.triu(np.ones((tokens, tokens), dtype=bool), 1)
    visible = np.where(future, -np.inf, scores)
    powers = np.exp(visible - visible.max(-1, keepdims=True))
    weights: Array = powers / powers.sum(-1, keepdims=True)
    return weights


def gqa(q: Array, k: Array, v: Array, scale: float) -> Array:
    """q [tokens, heads, d]; k, v [tokens, kv_heads, d] -> [tokens, heads, d]. Head h reads kv head h // group."""
    group = q.shape[1] // k.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        weights = causal_weights((q[:, head] @ k[:, head // group].T * scale)[None])[0]
        out[:, head] = weights @ v[:, head // group]
    return out


def mla_naive(q_nope: Array, q_rope: Array, c: Array, k_rope: Array, kv_b: Array, scale: float) -> Array:
    """Keys and values of every head are built.

    q_nope [tokens, heads, nope], q_rope [tokens, heads, rope], c [tokens, rank], k_rope [tokens, rope],
    kv_b [heads, nope + v, rank] -> [tokens, heads, v].
    """
    tokens, heads, nope = q_nope.shape
    expanded = (c @ kv_b.reshape(-1, c.shape[1]).T).reshape(tokens, heads, -1)
    keys, values = expanded[..., :nope], expanded[..., nope:]
    out = np.empty_like(values)
    for head in range(heads):
        scores = (q_nope[:, head] @ keys[:, head].T + q_rope[:, head] @ k_rope.T) * scale
        out[:, head] = causal_weights(scores[None])[0] @ values[:, head]
    return out


def mla_absorbed(q_nope: Array, q_rope: Array, c: Array, k_rope: Array, kv_b: Array, scale: float) -> Array:
    """The same result with W_UK moved to the query and W_UV to the output: every head reads the rows [c | k_rope]."""
    nope = q_nope.shape[-1]
    rows = np.concatenate([c, k_rope], axis=-1)
    out = np.empty((*q_nope.shape[:2], kv_b.shape[1] - nope))
    for head, up in enumerate(kv_b):
        query = np.concatenate([q_nope[:, head] @ up[:nope], q_rope[:, head]], axis=-1)
        weights = causal_weights((query @ rows.T * scale)[None])[0]
        out[:, head] = (weights @ c) @ up[nope:].T
    return out

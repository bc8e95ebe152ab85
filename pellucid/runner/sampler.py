"""Chooses the next token from logits: penalties, filters, seeds, logprobs. Called by `runner.model_runner`.

Rows are handled one by one and a row's random number depends on its own seed and position only, so that a
request's tokens never depend on what it is batched with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pellucid.core import InvalidRequestError, Logprob, PellucidError, Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import torch

NUCLEUS_GUESS = 512
"""Most likely tokens looked at first for top-p; the whole vocabulary is sorted only if they do not cover it."""


class Constraint(Protocol):
    """The form one request's output must have, followed as far as its tokens go. Made above: see `tokenizer`.

    Both methods raise PellucidError when it can't be followed any further.
    """

    def allowed(self) -> bytes:
        """Bit i % 8 of byte i // 8 says whether token i may come next; end tokens may where the output may end."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by the token that was taken."""
        ...

    @property
    def finished(self) -> bool:
        """Whether an end token was accepted."""
        ...


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a request says of single tokens, as tensors on the device of its logits.

    `forbidden`: [vocab] booleans, None where every token is allowed. `bias` [k] belongs to the ids `biased` [k].
    `eos` are the request's end tokens, `ends` all that would end it.
    """

    forbidden: torch.Tensor | None
    biased: torch.Tensor
    bias: torch.Tensor
    eos: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, request: Request, logits: torch.Tensor) -> TokenRules:
        """For logits [vocab]."""
        import torch

        params, device = request.params, logits.device

        def ids(token_ids: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(token_ids), dtype=torch.long, device=device)

        forbidden = None
        if params.allowed_token_ids is not None:
            forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=device)
            forbidden[ids(params.allowed_token_ids)] = False
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
        eos = () if params.ignore_eos else request.eos_token_ids
        ends = ids({*eos, *params.stop_token_ids})
        return cls(forbidden, ids(params.logit_bias), bias, ids(request.eos_token_ids), ends)


@dataclass(slots=True)
class SamplingState:
    """What sampling needs to know of one request: its parameters, its seed, its tokens so far."""

    request: Request
    seed: int
    constraint: Constraint | None = None
    output_token_ids: list[int] = field(default_factory=list)
    output_counts: Counter[int] = field(default_factory=Counter)
    _rules: TokenRules | None = field(default=None, init=False, repr=False)

    def rules(self, logits: torch.Tensor) -> TokenRules:
        """Made from the first logits [vocab], and kept: the lists behind them may be as long as the vocabulary."""
        if self._rules is None:
            self._rules = TokenRules.of(self.request, logits)
        return self._rules

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    def append(self, token_id: int) -> None:
        """Raises PellucidError when the constraint can't follow."""
        if self.constraint is not None:
            self.constraint.accept(token_id)
        self.output_token_ids.append(token_id)
        self.output_counts[token_id] += 1

    @property
    def rewrites_logits(self) -> bool:
        """Whether anything but temperature and filters touches the logits at this position."""
        p = self.params
        return (
            p.repetition_penalty != 1.0
            or p.presence_penalty != 0.0
            or p.frequency_penalty != 0.0
            or bool(p.logit_bias)
            or p.allowed_token_ids is not None
            or self.bans_end
            or self.constraint is not None
        )

    @property
    def bans_end(self) -> bool:
        """Whether no token that would end the request may be chosen yet: fewer than `min_tokens` are there."""
        return len(self.output_token_ids) < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`logprobs` is there when the request asked for it."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken | PellucidError]:
    """One token per row of logits [rows, vocab], fp32.

    A row without a finite maximum, or whose constraint fails, gives an error that names its request, so that it costs
    no other row its token.
    """
    import torch

    failures: dict[int, PellucidError] = {}
    if all(state.params.greedy and not state.rewrites_logits for state in states):
        top = logits.max(dim=-1)
        chosen, best = top.indices.tolist(), top.values
    else:
        rows = []
        for index, (row, state) in enumerate(zip(logits, states, strict=True)):
            try:
                rows.append(_rewrite(row, state) if state.rewrites_logits else row)
            except PellucidError as error:
                failures[index] = error
                rows.append(row)
        chosen = [_choose(row, state) for row, state in zip(rows, states, strict=True)]
        best = torch.stack([row.max() for row in rows])
    found: list[SampledToken | PellucidError] = []
    for index, (token, row, finite, state) in enumerate(
        zip(chosen, logits, best.isfinite().tolist(), states, strict=True)
    ):
        count = state.params.logprobs
        if index in failures:
            found.append(failures[index])
        elif finite:
            found.append(SampledToken(token, None if count is None else logprobs_of(row, token, count)))
        else:
            found.append(_why_not_finite(row, state))
    return found


def logprobs_of(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log-probabilities of the model itself, before penalties and temperature, from logits [vocab]."""
    values = logits.log_softmax(-1)
    own = values[token_id]
    chosen = Logprob(token_id, float(own), int((values > own).sum()) + 1)
    best = values.topk(min(count, values.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprobs(chosen, tuple(Logprob(token, value, rank) for rank, (token, value) in enumerate(pairs, 1)))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): splitmix64, the same on every machine and device."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & mask
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def _why_not_finite(logits: torch.Tensor, state: SamplingState) -> PellucidError:
    """The model's fault, or the request's own: its bans and its bias together left no token."""
    name = state.request.request_id
    if bool(logits.max().isfinite()):
        given = ("allowed_token_ids", "logit_bias", "structured_outputs")
        return InvalidRequestError(
            f"request {name!r} leaves no token to choose from; loosen allowed_token_ids, logit_bias, min_tokens or "
            "structured_outputs",
            next((param for param in given if getattr(state.params, param)), "min_tokens"),
        )
    return not_finite(state)


def not_finite(state: SamplingState) -> PellucidError:
    """Why a request ends whose logits are NaN or infinite."""
    name = state.request.request_id
    return PellucidError(f"the model's logits for request {name!r} are not finite; check the weights and the dtype")


def _rewrite(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Bans, bias and penalties, in vLLM's order; a new [vocab] tensor. Raises PellucidError if the constraint does."""
    import torch

    params, rules = state.params, state.rules(logits)
    given, logits = logits, logits.clone()
    if rules.forbidden is not None:
        logits.masked_fill_(rules.forbidden, float("-inf"))
    if params.logit_bias:
        logits[rules.biased] += rules.bias
    permitted = None if state.constraint is None else _unpack(state.constraint.allowed(), logits)
    if permitted is not None:
        logits.masked_fill_(~permitted, float("-inf"))
        if params.ignore_eos:
            logits[rules.eos] = float("-inf")
    if state.bans_end:
        logits[rules.ends] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*state.request.prompt_token_ids, *state.output_counts}), device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if state.output_counts and (params.presence_penalty or params.frequency_penalty):
        tokens = torch.tensor(list(state.output_counts), device=logits.device)
        counts = torch.tensor(list(state.output_counts.values()), dtype=logits.dtype, device=logits.device)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    if permitted is not None and not bool(logits.max().isfinite()):
        # What has the form asked for, and can't go on, ends: no ban keeps it from that.
        ends = [token_id for token_id in state.request.eos_token_ids if permitted[token_id]]
        logits[ends] = given[ends]
    return logits


def _unpack(bits: bytes, logits: torch.Tensor) -> torch.Tensor:
    """[vocab] booleans, on the device of `logits` [vocab], from `Constraint.allowed`; False beyond its end."""
    import numpy as np
    import torch

    packed = np.frombuffer(bits, dtype=np.uint8)
    unpacked = np.unpackbits(packed, count=min(8 * len(bits), logits.shape[-1]), bitorder="little")
    permitted = torch.from_numpy(unpacked).view(torch.bool).to(logits.device)
    return torch.nn.functional.pad(permitted, (0, logits.shape[-1] - permitted.shape[-1]))


def _choose(logits: torch.Tensor, state: SamplingState) -> int:
    """Temperature, then min-p, top-k, top-p, then the inverse of the cumulative distribution."""
    params = state.params
    if params.greedy:
        return int(logits.argmax())
    # fp64: a cumulative sum over a large vocabulary must not lose the tail. The maximum first: no overflow.
    logits = logits.double()
    probabilities = ((logits - logits.max()) / params.temperature).softmax(-1)
    if params.min_p > 0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
    point = uniform(state.seed, len(state.output_token_ids))
    if params.top_k == 0 and params.top_p >= 1:
        return _invert(probabilities, point)
    kept, tokens = _nucleus(probabilities, params.top_k or probabilities.shape[-1], params.top_p)
    return int(tokens[_invert(kept, point)])


def _nucleus(probabilities: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` most likely tokens, of those the fewest that reach `top_p` of their mass; best first."""
    vocab = probabilities.shape[-1]
    top_k = min(top_k, vocab)
    values, tokens = probabilities.topk(min(top_k, NUCLEUS_GUESS))
    total = probabilities.sum() if top_k == vocab else values.sum()
    if top_k > NUCLEUS_GUESS and (top_k < vocab or values.sum() < top_p * total):
        values, tokens = probabilities.topk(top_k)
        total = values.sum()
    before = values.cumsum(-1) - values
    return values.where(before < top_p * total, 0.0), tokens


def _invert(weights: torch.Tensor, point: float) -> int:
    """Index at which the cumulative weight passes `point` of the total; never one of weight 0."""
    import torch

    cumulative = weights.cumsum(-1)
    target = point * cumulative[-1:]
    index = int(torch.searchsorted(cumulative, target, right=True))
    return index if index < weights.shape[-1] and weights[index] > 0 else int(weights.argmax())

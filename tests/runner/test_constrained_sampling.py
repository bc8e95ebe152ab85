"""Sampling under a constraint: the same choice among what is allowed, an end that nothing bars, errors that stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import InvalidRequestError, PellucidError, Request, SamplingParams
from pellucid.runner.model_runner import StepResult, keep
from pellucid.runner.sampler import SampledToken, SamplingState, sample

VOCAB, EOS, STOP = 12, 3, 5


class Listed:
    """Allows the `steps[i]` after i tokens. Beyond the list it fails, as it does on a token that was not allowed."""

    def __init__(self, *steps: Iterable[int], size: int = VOCAB) -> None:
        self.steps, self.accepted, self.size = [set(step) for step in steps], list[int](), size

    def allowed(self) -> bytes:
        if len(self.accepted) >= len(self.steps):
            raise PellucidError("too complex")
        packed = bytearray((self.size + 7) // 8)
        for token_id in self.steps[len(self.accepted)]:
            packed[token_id // 8] |= 1 << token_id % 8
        return bytes(packed)

    def accept(self, token_id: int) -> None:
        if token_id not in self.steps[len(self.accepted)]:
            raise PellucidError("not allowed")
        self.accepted.append(token_id)

    @property
    def finished(self) -> bool:
        return self.accepted[-1:] == [EOS]


def state_of(constraint: Listed | None, name: str = "r", seed: int = 0, **params: Any) -> SamplingState:
    request = Request(name, (0, 1, 7), SamplingParams(**params), eos_token_ids=(EOS,))
    return SamplingState(request, seed, constraint)


def token(found: SampledToken | PellucidError) -> int:
    assert isinstance(found, SampledToken), found
    return found.token_id


def choose(logits: torch.Tensor, constraint: Listed, **params: Any) -> SampledToken | PellucidError:
    [found] = sample(logits.unsqueeze(0), [state_of(constraint, **params)])
    return found


LOGITS = torch.tensor([2.0, -0.5, 0.7, 3.0, 0.1, 2.5, -1.0, 0.4, 1.1, -0.2, 1.9, 0.3])


@settings(max_examples=60, deadline=None)
@given(
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    filters=st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}]),
    seed=st.integers(0, 1000),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), max_size=3),
)
def test_the_choice_is_that_of_a_request_for_which_the_others_were_banned(
    allowed: set[int], temperature: float, filters: dict[str, Any], seed: int, bias: dict[int, float]
) -> None:
    params = {"temperature": temperature, "logit_bias": bias, **filters}
    found = sample(LOGITS.unsqueeze(0), [state_of(Listed(allowed), seed=seed, **params)])
    expected = sample(LOGITS.unsqueeze(0), [state_of(None, seed=seed, allowed_token_ids=tuple(allowed), **params)])
    assert found == expected
    assert token(found[0]) in allowed


def test_greedy_rows_without_a_constraint_are_untouched_by_one_in_their_batch() -> None:
    rows = LOGITS.repeat(3, 1)
    found = sample(
        rows, [state_of(None, temperature=0), state_of(Listed({6}), temperature=0), state_of(None, temperature=0)]
    )
    assert [token(one) for one in found] == [EOS, 6, EOS]


def test_logprobs_are_the_models_own() -> None:
    plain = choose(LOGITS, Listed(range(VOCAB)), temperature=0, logprobs=2, allowed_token_ids=(6,))
    held = choose(LOGITS, Listed({6}), temperature=0, logprobs=2)
    assert isinstance(plain, SampledToken)
    assert held == plain


@pytest.mark.parametrize("size", [8, 4096], ids=["shorter", "longer"])
def test_a_mask_may_be_shorter_or_longer_than_the_models_rows(size: int) -> None:
    assert token(choose(LOGITS, Listed({6, 7}, size=size), temperature=0)) == 7
    assert isinstance(choose(LOGITS, Listed({size - 1, 2}, size=size), temperature=0), SampledToken)


def test_what_the_request_allows_and_bans_holds_within_the_constraint() -> None:
    assert token(choose(LOGITS, Listed({0, 2, 8}), temperature=0, allowed_token_ids=(2, 8, 10))) == 8
    assert token(choose(LOGITS, Listed({0, 2, 8}), temperature=0, logit_bias={0: -100, 8: -100})) == 2
    assert token(choose(LOGITS, Listed({2, EOS}), temperature=0, min_tokens=1)) == 2
    assert token(choose(LOGITS, Listed({2, EOS}), temperature=0, ignore_eos=True)) == 2
    assert token(choose(LOGITS, Listed({2, STOP}), temperature=0, min_tokens=1, stop_token_ids=(STOP,))) == 2


@pytest.mark.parametrize(
    "bans",
    [
        {"min_tokens": 5},
        {"ignore_eos": True},
        {"min_tokens": 5, "ignore_eos": True, "stop_token_ids": (EOS,)},
        {"allowed_token_ids": (2, 8)},
        {"logit_bias": {EOS: float("-inf")}},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_complete_output_ends_whatever_bars_the_end(bans: dict[str, Any], temperature: float) -> None:
    assert token(choose(LOGITS, Listed({EOS}), temperature=temperature, **bans)) == EOS
    assert token(choose(LOGITS, Listed({EOS, 9}), temperature=temperature, logit_bias={}, min_tokens=5)) == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_left_that_request_alone_ends_with_an_error(temperature: float) -> None:
    states = [
        state_of(Listed({1}), "a", temperature=temperature),
        state_of(Listed({1, 2}), "b", temperature=temperature, allowed_token_ids=(7, EOS)),
        state_of(None, "c", temperature=0),
    ]
    first, second, third = sample(LOGITS.repeat(3, 1), states)
    assert (token(first), token(third)) == (1, EOS)
    assert isinstance(second, InvalidRequestError)
    assert "'b' leaves no token" in str(second)


def test_a_constraint_that_fails_costs_its_own_request_alone() -> None:
    states = [state_of(Listed({4}), "a", temperature=0), state_of(Listed(), "b"), state_of(None, "c", temperature=0)]
    result = StepResult()
    for state, found in zip(states, sample(LOGITS.repeat(3, 1), states), strict=True):
        keep(state, found, result)
    assert {name: one.token_id for name, one in result.sampled.items()} == {"a": 4, "c": EOS}
    assert str(result.failed["b"]) == "too complex"
    assert states[1].output_token_ids == []


def test_a_token_that_the_constraint_does_not_take_is_not_kept() -> None:
    state, result = state_of(Listed({4})), StepResult()
    keep(state, SampledToken(5, None), result)
    assert str(result.failed["r"]) == "not allowed"
    assert not result.sampled
    assert not state.output_counts


def test_a_constraint_goes_on_by_each_kept_token_once() -> None:
    constraint = Listed({4}, {6, EOS}, {EOS})
    state = state_of(constraint, temperature=0, ignore_eos=True)
    results = []
    for _ in range(3):
        results.append(StepResult())
        # Asking twice changes nothing: only a token that is kept does.
        sample(LOGITS.unsqueeze(0), [state])
        keep(state, sample(LOGITS.unsqueeze(0), [state])[0], results[-1])
    assert constraint.accepted == [4, 6, EOS] == state.output_token_ids
    assert [result.ended for result in results] == [set(), set(), {"r"}]


def test_broken_logits_are_the_models_fault() -> None:
    found = choose(torch.full((VOCAB,), float("nan")), Listed({1, EOS}), temperature=0)
    assert "not finite" in str(found)
    assert not isinstance(found, InvalidRequestError)

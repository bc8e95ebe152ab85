"""The sampler against a brute force that is written out with sorted lists and loops, and its random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import InvalidRequestError, PellucidError, Request, SamplingParams
from pellucid.runner.sampler import NUCLEUS_GUESS, SampledToken, SamplingState, logprobs_of, sample, uniform

Array = npt.NDArray[np.float64]

EOS, STOP = 3, 5
PROMPT = (0, 1, 1, 7)


def state_of(params: SamplingParams, output: tuple[int, ...] = (), seed: int = 0, name: str = "r") -> SamplingState:
    state = SamplingState(Request(name, PROMPT, params, eos_token_ids=(EOS,)), seed)
    for token_id in output:
        state.append(token_id)
    return state


def draw(logits: Array, params: SamplingParams, output: tuple[int, ...] = (), draws: int = 1) -> list[int]:
    """Tokens of `draws` requests that differ in their seed alone."""
    rows = torch.from_numpy(logits).float().repeat(draws, 1)
    found = sample(rows, [state_of(params, output, seed) for seed in range(draws)])
    return [token(one).token_id for one in found]


def token(found: SampledToken | PellucidError) -> SampledToken:
    assert isinstance(found, SampledToken), found
    return found


def rewritten(logits: Array, params: SamplingParams, output: tuple[int, ...]) -> list[float]:
    """Bans, bias, then repetition, presence and frequency penalties: vLLM's order, one token at a time."""
    banned = {EOS, *params.stop_token_ids} if len(output) < params.min_tokens else set()
    if params.ignore_eos and len(output) < params.min_tokens:
        banned = set(params.stop_token_ids)
    values = []
    for token_id, logit in enumerate(logits.astype(np.float32).tolist()):
        allowed = params.allowed_token_ids is None or token_id in params.allowed_token_ids
        value = logit + params.logit_bias.get(token_id, 0.0)
        if not allowed or token_id in banned:
            value = -math.inf
        if token_id in PROMPT or token_id in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token_id)
        value -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
        values.append(value)
    return values


def distribution(logits: Array, params: SamplingParams, output: tuple[int, ...] = ()) -> Array:
    """The probability of every token to be the next one."""
    values = rewritten(logits, params, output)
    ranked = sorted(range(len(values)), key=lambda i: -values[i])
    chances = [0.0] * len(values)
    if params.temperature == 0:
        chances[ranked[0]] = 1.0
        return np.array(chances)
    for i, value in enumerate(values):
        chances[i] = math.exp((value - values[ranked[0]]) / params.temperature)
    total = sum(chances)
    kept = [i for i in ranked if chances[i] >= params.min_p * chances[ranked[0]] and chances[i] > 0]
    kept = kept[: params.top_k or None]
    total, mass, nucleus = sum(chances[i] for i in kept), 0.0, []
    for i in kept:
        if mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += chances[i]
    return np.array([chances[i] / mass if i in nucleus else 0.0 for i in range(len(values))])


def assert_drawn_from(expected: Array, drawn: list[int]) -> None:
    """Chi-square within four standard deviations of its mean, and no token of probability 0."""
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    wanted = expected[likely] * len(drawn)
    assert wanted.min() >= 5, "too few draws for a test"
    freedom = likely.sum() - 1
    chi_square = float(((counts[likely] - wanted) ** 2 / wanted).sum())
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 1e-9


LOGITS = np.array([1.5, -0.5, 0.7, 1.9, 0.1, 2.0, -1.0, 0.4, 1.1, -0.2])
OUTPUT = (5, 8, 8)
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": {2: 3.0, 5: -4.0}},
    "allowed": {"allowed_token_ids": (1, 4, 6, 7)},
    "min tokens": {"min_tokens": 4, "stop_token_ids": (STOP,)},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 2.5, 8: 2.0},
        "allowed_token_ids": (1, 3, 4, 5, 7, 8),
        "min_tokens": 9,
        "stop_token_ids": (STOP,),
    },
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 1.8},
    "cold": {"temperature": 0.7},
    "top_k": {"top_k": 4},
    "top_k of 1": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p of almost nothing": {"top_p": 1e-6},
    "min_p": {"min_p": 0.3},
    "top_k and top_p": {"top_k": 5, "top_p": 0.75, "temperature": 1.5},
    "top_k and top_p and min_p": {"top_k": 6, "top_p": 0.8, "min_p": 0.2, "temperature": 1.3},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_greedy_takes_the_maximum_of_the_rewritten_logits(name: str) -> None:
    params = SamplingParams(temperature=0, **PENALTIES[name])
    expected = int(np.argmax(rewritten(LOGITS, params, OUTPUT)))
    assert draw(LOGITS, params, OUTPUT) == [expected]


@pytest.mark.parametrize("name", FILTERS)
def test_sampled_tokens_follow_the_filtered_distribution(name: str) -> None:
    params = SamplingParams(**FILTERS[name])
    assert_drawn_from(distribution(LOGITS, params), draw(LOGITS, params, draws=2000))


@pytest.mark.parametrize("name", PENALTIES)
def test_sampled_tokens_follow_the_rewritten_and_filtered_distribution(name: str) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, **PENALTIES[name])
    assert_drawn_from(distribution(LOGITS, params, OUTPUT), draw(LOGITS, params, OUTPUT, draws=1500))


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.95), (700, 1.0), (700, 0.9), (0, 0.2), (100, 0.9)])
def test_filters_that_keep_more_tokens_than_are_looked_at_first_keep_exactly_those(top_k: int, top_p: float) -> None:
    vocabulary = 3 * NUCLEUS_GUESS
    logits = np.random.default_rng(5).permutation(np.linspace(0, 1, vocabulary))
    params = SamplingParams(top_k=top_k, top_p=top_p)
    expected = distribution(logits, params)
    drawn = draw(logits, params, draws=800)
    assert (expected[drawn] > 0).all()
    # Eight bands of rank: the tail of a flat distribution must not lose its mass.
    band = np.minimum(np.argsort(np.argsort(-logits)) * 8 // max((expected > 0).sum(), 1), 7)
    by_band = np.bincount(band, weights=expected, minlength=8)
    assert_drawn_from(by_band, band[drawn].tolist())


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=10, max_size=10, unique=True),
    output=st.lists(st.integers(0, 9), max_size=5),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            "top_k": st.integers(0, 12),
            "top_p": st.sampled_from([0.1, 0.5, 0.9, 1.0]),
            "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.0, 1.5]),
            "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
            "frequency_penalty": st.sampled_from([-0.7, 0.0, 0.9]),
            "logit_bias": st.dictionaries(st.integers(0, 9), st.sampled_from([-3.25, 2.125]), max_size=3),
            "min_tokens": st.integers(0, 6),
        }
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_no_parameters_let_a_token_of_probability_0_through(
    logits: list[int], output: list[int], params: dict[str, Any], seed: int
) -> None:
    values = np.array(logits) / 8
    chosen = SamplingParams(**params, stop_token_ids=(STOP,))
    expected = distribution(values, chosen, tuple(output))
    [found] = sample(torch.from_numpy(values).float()[None], [state_of(chosen, tuple(output), seed)])
    # Values that tie after the penalties, or a mass that lands on top_p itself, may fall either way by one rounding.
    ranked = np.sort(rewritten(values, chosen, tuple(output)))
    if (np.diff(ranked[np.isfinite(ranked)]) > 1e-4).all():
        assert expected[token(found).token_id] > 0 or _is_at_an_edge(values, chosen, tuple(output))


def _is_at_an_edge(logits: Array, params: SamplingParams, output: tuple[int, ...]) -> bool:
    """Whether a hair more or less of a filter keeps other tokens."""
    supports = set()
    for nudge in (-1e-5, 0, 1e-5):
        top_p, min_p = (min(max(value + nudge, 1e-6), 1.0) for value in (params.top_p, params.min_p))
        nudged = replace(params, top_p=top_p, min_p=min_p if params.min_p else 0.0)
        supports.add(tuple(distribution(logits, nudged, output) > 0))
    return len(supports) > 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_a_temperature_of_almost_0_is_greedy(temperature: float) -> None:
    assert set(draw(LOGITS, SamplingParams(temperature=temperature), draws=20)) == {5}


@pytest.mark.parametrize(("ignore_eos", "outputs", "banned"), [
    (False, 0, True), (False, 2, True), (False, 3, False), (True, 0, False),
])  # fmt: skip
def test_min_tokens_bans_what_would_end_the_request_until_that_many_tokens_are_there(
    ignore_eos: bool, outputs: int, banned: bool
) -> None:
    params = SamplingParams(temperature=0, min_tokens=3, ignore_eos=ignore_eos)
    logits = np.zeros(10)
    logits[[EOS, 8]] = 5, 1
    assert draw(logits, params, (8,) * outputs) == [8 if banned else EOS]


def test_min_tokens_bans_stop_tokens_even_where_eos_is_ignored() -> None:
    logits = np.zeros(10)
    logits[[STOP, EOS]] = 9, 5
    params = SamplingParams(temperature=0, min_tokens=1, ignore_eos=True, stop_token_ids=(STOP,))
    assert draw(logits, params) == [EOS]


@pytest.mark.parametrize("count", [0, 1, 3, 10, 64])
def test_logprobs_are_those_of_the_model_before_penalties_and_temperature(count: int) -> None:
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={6: 9.0}, repetition_penalty=2.0, logprobs=count)
    [found] = sample(torch.from_numpy(LOGITS).float()[None], [state_of(params, OUTPUT)])
    expected = LOGITS - np.log(np.exp(LOGITS).sum())
    logprobs = token(found).logprobs
    assert logprobs is not None
    assert token(found).token_id == 6
    assert logprobs.chosen.token_id == 6
    assert logprobs.chosen.logprob == pytest.approx(expected[6], abs=1e-5)
    assert logprobs.chosen.rank == 10, "the least likely of ten before the bias"
    best = np.argsort(-LOGITS)[:count].tolist()
    assert [one.token_id for one in logprobs.top] == best
    assert [one.rank for one in logprobs.top] == list(range(1, len(best) + 1))
    assert [one.logprob for one in logprobs.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_logprobs_are_given_only_to_requests_that_ask() -> None:
    rows = torch.from_numpy(np.stack([LOGITS, LOGITS])).float()
    asked, silent = sample(rows, [state_of(SamplingParams(logprobs=0)), state_of(SamplingParams())])
    assert token(asked).logprobs == logprobs_of(rows[0], token(asked).token_id, 0)
    assert token(silent).logprobs is None


COMPANIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"top_k": 3, "min_p": 0.1},
    {"temperature": 1.4, "allowed_token_ids": (1, 2, 3), "logprobs": 5},
]


def test_a_row_gets_the_same_token_and_logprobs_whatever_it_is_batched_with() -> None:
    rng = np.random.default_rng(11)
    rows = torch.from_numpy(rng.normal(size=(40, 10)) * 2).float()
    states = [
        state_of(SamplingParams(**COMPANIONS[i % 5]), (1, 8)[: i % 3], seed=int(rng.integers(2**40))) for i in range(40)
    ]
    alone = [sample(rows[i : i + 1], [states[i]])[0] for i in range(40)]
    assert sample(rows, states) == alone
    order = rng.permutation(40).tolist()
    assert sample(rows[order], [states[i] for i in order]) == [alone[i] for i in order]
    greedy = [i for i in range(40) if i % 5 == 0]
    assert sample(rows[greedy], [states[i] for i in greedy]) == [alone[i] for i in greedy]


@pytest.mark.parametrize("companion", [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_an_error_that_names_its_request_and_spares_the_others(
    bad: float, companion: dict[str, Any]
) -> None:
    rows = torch.from_numpy(np.stack([LOGITS, LOGITS, LOGITS])).float()
    params = SamplingParams(**companion)
    states = [state_of(params, seed=9, name=name) for name in ("a", "poor", "c")]
    healthy = sample(rows, states)
    rows[1, 4] = bad
    found = sample(rows, states)
    assert isinstance(found[1], PellucidError)
    assert "'poor'" in str(found[1])
    assert "weights" in str(found[1])
    assert (found[0], found[2]) == (healthy[0], healthy[2])


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (EOS,), "min_tokens": 2},
        {"allowed_token_ids": (1,), "logit_bias": {1: -math.inf}},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_bans_every_token_is_told_so_and_not_that_the_weights_are_bad(
    temperature: float, params: dict[str, Any]
) -> None:
    state = state_of(SamplingParams(temperature=temperature, **params), name="strict")
    [found] = sample(torch.from_numpy(LOGITS).float()[None], [state])
    assert isinstance(found, InvalidRequestError)
    assert "'strict'" in str(found)
    assert "allowed_token_ids" in str(found)


def test_uniform_is_splitmix64() -> None:
    """Its published first outputs from state 0; our state is seed * gamma plus a term that is 0 at position -1."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [uniform(seed, -1) for seed in (1, 2, 3)] == [(value >> 11) / 2**53 for value in published]


def test_uniform_gives_the_same_numbers_on_every_machine() -> None:
    golden = {
        (0, 0): 0.5079605879681605,
        (0, 1): 0.4224192380508798,
        (1, 0): 0.17601256256594233,
        (42, 7): 0.39175588486644874,
        (-1, 0): 0.8330499542681375,
        (2**63 - 1, 100000): 0.7112145820700424,
    }
    assert {key: uniform(*key) for key in golden} == golden


@pytest.mark.parametrize("pairs", [
    [(seed, 0) for seed in range(20000)],
    [(7, position) for position in range(20000)],
    [(seed, seed) for seed in range(-10000, 10000)],
    [(seed << 40, 3) for seed in range(20000)],
], ids=["seeds", "positions", "diagonal", "high bits"])  # fmt: skip
def test_uniform_is_uniform_and_neighbours_are_independent(pairs: list[tuple[int, int]]) -> None:
    values = np.array([uniform(*pair) for pair in pairs])
    assert values.min() >= 0
    assert values.max() < 1
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by one uniform sample in a thousand.
    gap = np.abs(np.sort(values) - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert gap < 1.95 / math.sqrt(len(values))
    cells, _, _ = np.histogram2d(values[:-1], values[1:], bins=8, range=[[0, 1], [0, 1]])
    wanted = (len(values) - 1) / 64
    assert ((cells - wanted) ** 2 / wanted).sum() < 63 + 4 * math.sqrt(126)


def test_the_random_number_moves_with_the_position() -> None:
    """One seed, flat logits, growing output: the draws are those of `uniform` at each position, not one repeated."""
    state = state_of(SamplingParams(temperature=1.0), seed=5)
    flat = torch.zeros(1, 1000)
    drawn = []
    for position in range(20):
        [found] = sample(flat, [state])
        assert isinstance(found, SampledToken)
        drawn.append(found.token_id)
        assert abs(found.token_id - 1000 * uniform(5, position)) <= 1
        state.append(found.token_id)
    assert len(set(drawn)) > 15


def test_long_lists_of_ids_are_read_once_for_a_request_and_not_for_every_token() -> None:
    reads: list[str] = []

    class Ids(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            reads.append("ids")
            return super().__iter__()

    class Bias(dict[int, float]):
        def items(self) -> Any:
            reads.append("bias")
            return super().items()

        def values(self) -> Any:
            reads.append("bias")
            return super().values()

    params = SamplingParams(seed=1, min_tokens=99, max_tokens=99)
    for name, value in (
        ("allowed_token_ids", Ids((1, 2, 4, STOP))), ("stop_token_ids", Ids((STOP,))), ("logit_bias", Bias({4: 1.0}))
    ):  # fmt: skip
        object.__setattr__(params, name, value)
    state = state_of(params)
    logits = torch.zeros(1, 10)
    state.append(token(sample(logits, [state])[0]).token_id)
    first = len(reads)
    for _ in range(20):
        state.append(token(sample(logits, [state])[0]).token_id)
    assert set(state.output_token_ids) == {1, 2, 4}
    assert 0 < first == len(reads)

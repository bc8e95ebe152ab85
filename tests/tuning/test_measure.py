"""Comparing candidates: the faster one wins where it clearly is, ties and noise keep the default, time is kept to."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.selection.evidence import fastest, is_tie
from pellucid.tuning.gate import GatedTrial
from pellucid.tuning.measure import Budget, Comparison, Question, agree, compare, conclude, median_interval
from tests.tuning.simulated import Clock, SimulatedBench

ORDER = ("default", "other", "third")


def compared(bench: SimulatedBench, order: tuple[str, ...] = ORDER, seconds: float = 60.0) -> Comparison:
    question = Question("op", 1, order)
    return compare([GatedTrial(bench, question, name) for name in order], Budget(seconds, bench.clock))


def test_a_clearly_faster_candidate_wins_and_its_figure_is_its_median():
    found = compared(SimulatedBench({"default": 100, "other": 80, "third": 120}, noise=0.01))
    assert found.winner(ORDER) == "other"
    assert found.results["other"].seconds == pytest.approx(80e-6, rel=0.01)
    assert 0 < found.results["other"].error < 2e-6
    assert found.results["third"].seconds == pytest.approx(120e-6, rel=0.05)


def test_the_default_stays_when_it_is_best_and_when_the_others_tie():
    assert compared(SimulatedBench({"default": 80, "other": 100, "third": 90})).winner(ORDER) == "default"
    assert compared(SimulatedBench({"default": 81, "other": 80, "third": 80.5})).winner(ORDER) == "default"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.015])
def test_twenty_noisy_runs_never_flip_a_tie(share):
    for seed in range(20):
        bench = SimulatedBench({"default": 100, "other": 100 * (1 - share), "third": 100}, noise=0.005, seed=seed)
        assert compared(bench).winner(ORDER) == "default", seed


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_twenty_noisy_runs_find_a_candidate_that_is_a_fifth_faster(noise):
    for seed in range(20):
        bench = SimulatedBench({"default": 100, "other": 80, "third": 100}, noise=noise, seed=seed)
        assert compared(bench).winner(ORDER) == "other", seed


def test_what_slows_all_candidates_alike_makes_no_winner():
    """Every sample takes longer than the last: whoever is measured first must not win by it."""
    found = compared(SimulatedBench({"default": 100, "other": 100}, drift=0.01), ORDER[:2])
    assert found.winner(ORDER[:2]) == "default"
    gap = found.results["default"].seconds - found.results["other"].seconds
    assert abs(gap) < 0.02 * found.results["default"].seconds


def test_a_lucky_screening_is_forgotten_once_the_leaders_are_measured_again():
    bench = SimulatedBench({"default": 100, "other": 100})
    lucky = iter([1.0] + [0.92] * 6)
    ordinary = bench.sample

    def sample(question, candidate):
        seconds = ordinary(question, candidate)
        return seconds * next(lucky, 1.0) if candidate == "other" else seconds

    bench.sample = sample
    found = compared(bench, ORDER[:2])
    assert found.winner(ORDER[:2]) == "default"
    assert found.results["other"].seconds == pytest.approx(100e-6)


def test_clear_losers_are_not_sampled_to_the_end_but_two_stay():
    bench = SimulatedBench({"default": 100, "other": 98, "third": 5000})
    found = compared(bench)
    counts = {name: sum(candidate == name for _, candidate in bench.asked) for name in ORDER}
    assert counts["third"] <= 3 < counts["other"] == counts["default"]
    assert found.results["third"].seconds == pytest.approx(5000e-6)
    alone = SimulatedBench({"default": 100, "other": 5000})
    assert compared(alone, ORDER[:2]).results.keys() == {"default", "other"}


def test_a_slow_default_is_measured_to_the_end_so_that_it_can_be_beaten():
    found = compared(SimulatedBench({"default": 900, "other": 100, "third": 110}))
    assert found.winner(ORDER) == "other"
    assert len(found.samples["default"]) == len(found.samples["other"])


def test_when_time_is_up_early_nothing_is_concluded_and_later_what_is_there_counts():
    early = compared(SimulatedBench({"default": 100, "other": 50}), ORDER[:2], seconds=0.01)
    assert early.out_of_time
    assert early.results == {}
    assert early.winner(ORDER[:2]) is None
    later = compared(SimulatedBench({"default": 100, "other": 50}), ORDER[:2], seconds=0.034)
    assert not later.out_of_time
    assert later.winner(ORDER[:2]) == "other"


def test_no_sample_is_begun_once_time_is_up():
    clock = Clock()
    bench = SimulatedBench({}, clock=clock)
    compared(bench, seconds=0.05)
    assert clock.now <= 0.05 + 0.002 + 1e-9


@pytest.mark.parametrize("failing", [("default",), ("other",), ("default", "third")])
def test_a_candidate_that_fails_while_it_is_timed_is_not_right_and_the_others_are_compared(failing):
    bench = SimulatedBench({"default": 100, "other": 80, "third": 60}, {f"{name} later": "crashed" for name in failing})
    found = compared(bench)
    left = [name for name in ORDER if name not in failing]
    assert {name for name, m in found.results.items() if not m.right} == set(failing)
    assert all(found.results[name].detail == "crashed" for name in failing)
    assert found.winner(ORDER) == (min(left, key=lambda name: bench.times[name]) if len(left) > 1 else None)


def test_a_default_that_fails_among_the_leaders_gives_way():
    bench = SimulatedBench({"default": 100, "other": 200, "third": 99})
    ordinary, count = bench.sample, iter(range(99))

    def sample(question, candidate):
        if candidate == "default" and next(count) > 8:
            bench.wrong = {"default later": "crashed"}
        return ordinary(question, candidate)

    bench.sample = sample
    found = compared(bench)
    assert not found.results["default"].right
    assert found.winner(ORDER) == "third"


def test_equal_samples_give_equal_figures():
    first, second = (compared(SimulatedBench({"other": 48}, noise=0.03, seed=5)) for _ in range(2))
    assert first == second


def test_without_the_default_there_are_no_figures():
    assert conclude(("default", "other"), {"other": [1.0] * 9}) == {}
    assert conclude((), {}) == {}


@given(st.integers(0, 10**6), st.floats(0.6, 1.6))
def test_two_errors_together_are_the_interval_of_their_ratio(seed, factor):
    """Brute force: the tie rule says what the interval around the paired ratios says, the 2 % aside."""
    rng = random.Random(seed)
    base = [rng.lognormvariate(0, 0.02) for _ in range(15)]
    other = [x * factor * rng.lognormvariate(0, 0.02) for x in base]
    found = conclude(("default", "other"), {"default": base, "other": other})
    median = statistics.median(base)
    low, high = median_interval([a / b for a, b in zip(other, base, strict=True)])
    together = math.hypot(found["default"].error, found["other"].error)
    assert together == pytest.approx(median * (high - low) / 2)
    assert found["other"].seconds == pytest.approx(median * statistics.median(a / b for a, b in zip(other, base)))  # noqa: B905


def test_the_interval_holds_the_median_as_often_as_it_says():
    rng = random.Random(7)
    for count in (6, 9, 15, 40):
        inside = 0
        for _ in range(600):
            low, high = median_interval([rng.gauss(0, 1) for _ in range(count)])
            inside += low <= 0 <= high
        assert inside / 600 > 0.93, count


def test_few_values_have_all_of_them_as_their_interval():
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([2.0, 1.0, 5.0]) == (1.0, 5.0)


def test_a_round_takes_as_long_as_on_its_slowest_rank():
    rank0 = {"default": [10.0] * 9, "other": [8.0] * 9}
    rank1 = {"default": [10.0] * 9, "other": [13.0] * 9}
    alone = conclude(("default", "other"), rank0)
    assert fastest(("default", "other"), alone) == "other"
    together = agree([rank0, rank1])
    assert together == {"default": (10.0,) * 9, "other": (13.0,) * 9}
    assert fastest(("default", "other"), conclude(("default", "other"), together)) == "default"


def test_a_candidate_that_failed_on_one_rank_is_nobodys():
    together = agree([{"default": [1.0] * 9, "other": [0.5] * 9}, {"default": [1.0] * 8, "other": []}])
    assert together == {"default": (1.0,) * 8}
    assert agree([{"default": [1.0]}, {}]) == {}


@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3), min_size=1, max_size=4))
def test_ranks_agree_whatever_their_order(values):
    gathered = [{"default": samples} for samples in values]
    assert agree(gathered) == agree(gathered[::-1])


def test_the_tie_band_is_that_of_the_plan():
    found = compared(SimulatedBench({"default": 100, "other": 98.5}), ORDER[:2])
    assert is_tie(found.results["default"], found.results["other"])

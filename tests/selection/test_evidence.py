"""Measured results change a choice when they clearly should, and only then."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.selection.args import EngineArgs
from pellucid.selection.evidence import Measurement, fastest, is_tie
from pellucid.selection.resolve import resolve
from tests.selection.models import V2_LITE, kinds, machine, rejection

ORDER = ("first", "second", "third")


def measured(*seconds: float, error: float = 0.0) -> dict[str, Measurement]:
    return {name: Measurement(s, error) for name, s in zip(ORDER, seconds, strict=False)}


@pytest.mark.parametrize(
    ("seconds", "error", "winner"),
    [
        ((100.0, 90.0, 95.0), 0.0, "second"),
        ((100.0, 98.5, 120.0), 0.0, "first"),  # within 2 %
        ((100.0, 97.9, 120.0), 0.0, "second"),
        ((100.0, 95.0, 120.0), 4.0, "first"),  # within the combined error, 5.66
        ((100.0, 94.0, 120.0), 4.0, "second"),
        ((100.0, 90.0, 89.9), 0.0, "second"),  # the tie is broken by the fixed order, not by the median
    ],
)
def test_the_first_in_order_wins_among_those_that_tie_with_the_fastest(seconds, error, winner):
    assert fastest(ORDER, measured(*seconds, error=error)) == winner


def test_nothing_is_concluded_when_the_default_was_not_measured():
    assert fastest(ORDER, {"second": Measurement(1.0, 0.0)}) is None
    assert fastest((), {}) is None


@given(st.lists(st.tuples(st.floats(1e-6, 1e-3), st.floats(0, 1e-4)), min_size=1, max_size=3))
def test_the_winner_is_never_clearly_slower_than_any_other(values):
    results = {name: Measurement(s, e) for name, (s, e) in zip(ORDER, values, strict=False)}
    winner = fastest(ORDER[: len(results)], results)
    best = min(results.values(), key=lambda m: m.seconds)
    assert winner is not None
    gap = results[winner].seconds - best.seconds
    assert gap <= max(math.hypot(results[winner].error, best.error), 0.02 * best.seconds)
    for a, b in itertools.combinations(results.values(), 2):
        assert is_tie(a, b) == is_tie(b, a)


def chosen(bucket: int, **results: Measurement):
    evidence = {("moe", bucket, name): m for name, m in results.items()}
    return resolve(EngineArgs("model"), V2_LITE, machine("cpu"), evidence).decision("moe", bucket)


def test_a_faster_backend_is_taken_in_its_bucket_alone():
    fast = {"cpu_native": Measurement(80e-6, 1e-6), "reference": Measurement(40e-6, 1e-6)}
    decision = chosen(4, **fast)
    assert (decision.value, decision.how) == ("reference", "measured")
    assert any("40.0 us" in line and "80.0 us" in line for line in decision.because)
    assert kinds(decision, "cpu_native") == {"slower"}
    evidence = {("moe", 4, name): m for name, m in fast.items()}
    other = resolve(EngineArgs("model"), V2_LITE, machine("cpu"), evidence).decision("moe", 8)
    assert (other.value, other.how) == ("cpu_native", "default")


def test_a_tie_keeps_the_fixed_order_and_says_so():
    decision = chosen(1, cpu_native=Measurement(80e-6, 1e-6), reference=Measurement(79e-6, 1e-6))
    assert (decision.value, decision.how) == ("cpu_native", "measured")
    assert any("tie" in line for line in decision.because)
    assert kinds(decision, "reference") == {"order"}


def test_a_backend_that_is_wrong_is_not_taken_however_fast():
    wrong = Measurement(1e-6, 0.0, right=False, detail="differs by 3.2 at bucket 1")
    decision = chosen(1, cpu_native=Measurement(80e-6, 1e-6), reference=wrong)
    assert decision.value == "cpu_native"
    misfit = rejection(decision, "reference").misfits[0]
    assert misfit.kind == "numerics"
    assert "differs by 3.2" in misfit.reason


def test_a_default_that_is_wrong_gives_way():
    decision = chosen(1, cpu_native=Measurement(1e-6, 0.0, right=False, detail="NaN"))
    assert (decision.value, decision.how) == ("reference", "measured")
    assert any("numeric gate" in line for line in decision.because)


def test_where_all_that_fit_are_wrong_nothing_runs_and_the_start_says_what_to_do():
    wrong = {("moe", 1, name): Measurement(1e-6, 0.0, False, "gives NaN") for name in ("cpu_native", "reference")}
    plan = resolve(EngineArgs("model"), V2_LITE, machine("cpu"), wrong)
    assert plan.decision("moe", 1).value is None
    blocker = next(b for b in plan.blockers if b.kind == "numerics")
    assert "failed the numeric gate here: cpu_native gives NaN" in blocker.reason
    assert "--measure off" in blocker.remedy


def test_evidence_without_the_default_changes_nothing_and_says_why():
    decision = chosen(1, reference=Measurement(1e-6, 0.0))
    assert (decision.value, decision.how) == ("cpu_native", "default")
    assert any("was not measured" in line for line in decision.because)


def test_an_asked_backend_wins_over_evidence():
    evidence = {
        ("moe", 1, "cpu_native"): Measurement(10e-6, 0.0),
        ("moe", 1, "reference"): Measurement(90e-6, 0.0),
    }
    found = resolve(EngineArgs("model", moe_backend="reference"), V2_LITE, machine("cpu"), evidence)
    assert (found.decision("moe", 1).value, found.decision("moe", 1).how) == ("reference", "asked")

"""A candidate that crashes, hangs, raises or is wrong becomes a reason, and this process goes on."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.tuning.gate import GatedTrial, Probe, differs, gate
from pellucid.tuning.measure import Budget, CannotMeasureError, Question, TrialFailedError, compare
from tests.tuning.simulated import DoesNotStart, Misbehaving

QUESTION = Question("op", 1, ("fast", "slow"))


@pytest.fixture(scope="module")
def probe():
    with Probe(Misbehaving(), check_deadline_s=20.0, sample_deadline_s=0.5) as probe:
        yield probe


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ("wrong", "row 2 differs"),
        ("raises", "raised ValueError: not for this shape"),
        ("crashes", "crashed: signal SIGABRT"),
        ("leaves", "crashed: exit code 7"),
        ("fast", ""),
    ],
)
def test_the_gate_says_what_is_wrong_with_a_candidate(probe, candidate, reason):
    found = gate(probe, QUESTION, candidate)
    assert found.startswith(reason) and "\n" not in found
    assert bool(found) == bool(reason)


def test_the_next_candidate_is_answered_after_a_crash(probe):
    assert gate(probe, QUESTION, "crashes")
    assert gate(probe, QUESTION, "fast") == ""
    assert probe.sample(QUESTION, "fast") == 1e-5


def test_want_of_memory_and_a_child_that_does_not_start_say_nothing_of_a_candidate(probe):
    with pytest.raises(CannotMeasureError, match="not enough free memory"):
        gate(probe, QUESTION, "too large")
    assert gate(probe, QUESTION, "fast") == ""
    with (
        Probe(DoesNotStart()) as other,
        pytest.raises(CannotMeasureError, match="did not start: it crashed: exit code"),
    ):
        gate(other, QUESTION, "fast")


def test_a_candidate_that_hangs_is_ended_at_its_deadline():
    with Probe(Misbehaving(), check_deadline_s=0.4, default_deadline_s=0.8) as probe:
        begin = time.monotonic()
        assert gate(probe, QUESTION, "hangs") == "hung: no answer within 0.4 s"
        # A default gets longer: much is compiled in its first run.
        assert gate(probe, Question("op", 1, ("hangs", "fast")), "hangs") == "hung: no answer within 0.8 s"
        assert time.monotonic() - begin < 10


def test_candidates_that_crash_or_hang_while_they_are_timed_lose_to_the_slower_one(probe):
    order = ("slow", "crashes later", "hangs later", "fast")
    found = compare([GatedTrial(probe, QUESTION, name) for name in order], Budget(60))
    assert found.winner(order) == "fast"
    assert found.results["crashes later"].detail.startswith("crashed")
    assert found.results["hangs later"].detail == "hung: no answer within 0.5 s"
    assert not found.results["crashes later"].right


def test_a_time_that_is_no_number_is_a_failure(probe):
    with pytest.raises(TrialFailedError, match="no time"):
        GatedTrial(probe, QUESTION, "nan").sample()


def test_the_child_ends_with_its_probe(probe):
    with Probe(Misbehaving()) as mine:
        gate(mine, QUESTION, "fast")
        process = mine._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None


def rows(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(3))


def test_equal_numbers_pass_and_so_does_rounding():
    wanted = rows()
    assert differs(wanted.clone(), wanted, 1e-4) == ""
    assert differs(wanted.bfloat16(), wanted, 2e-2) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@given(row=st.integers(0, 5))
def test_values_that_are_not_finite_never_pass(value, row):
    found, wanted = rows(), rows()
    found[row, 1, 3] = value
    assert differs(found, wanted, 1e9) == f"row {row} has values that are not finite"


@given(row=st.integers(0, 63))
def test_one_wrong_row_does_not_hide_among_many(row):
    """As with a position past the first, or a cached prefix, that is read from the wrong place."""
    wanted = rows(64)
    found = wanted.clone()
    found[row] = wanted[row - 1]
    assert differs(found, wanted, 2e-2).startswith(f"row {row} differs")


def test_a_small_error_everywhere_is_found():
    wanted = rows()
    assert differs(wanted * 1.03, wanted, 2e-2).startswith("differs by 0.03")


def test_padded_rows_must_be_zeros():
    wanted = rows()
    wanted[4] = 0
    found = wanted.clone()
    found[4, 0, 0] = 1e-6
    assert differs(found, wanted, 1e-2) == "padded row 4 is not zeros"
    assert differs(wanted, wanted, 1e-2) == ""


def test_another_shape_is_wrong():
    assert "has shape" in differs(rows(5), rows(), 1e-2)


def test_what_the_machine_lacks_is_said_of_no_candidate_and_what_a_kernel_refuses_is(probe):
    with pytest.raises(CannotMeasureError, match=r"no C\+\+ compiler; apt install g\+\+"):
        gate(probe, QUESTION, "no compiler")
    assert gate(probe, QUESTION, "no tile") == "raised PlanError: no tile fits"

"""Several children at once come to the verdicts of one."""

from __future__ import annotations

import time

import pytest

from pellucid.tuning.gate import Probe
from pellucid.tuning.measure import Question
from pellucid.tuning.pool import ProbePool
from tests.tuning.simulated import Misbehaving

NAMES = ("fast", "wrong", "hangs", "crashes", "raises", "slow", "too large")
QUESTION = Question("op", 1, ("none", *NAMES))


def pool(cores: int) -> ProbePool:
    return ProbePool(lambda: Probe(Misbehaving(), check_deadline_s=0.5, default_deadline_s=0.5), cores, 1 << 40)


def test_every_candidate_has_its_own_verdict_and_one_without_room_has_none():
    with pool(3) as several:
        found = several.check_all([(QUESTION, name) for name in NAMES], lambda: True)
    verdicts = {name: verdict for (_, name), verdict in found.items()}
    assert "too large" not in verdicts
    assert verdicts["fast"] == verdicts["slow"] == ""
    assert verdicts["wrong"].startswith("row 2 differs")
    assert verdicts["hangs"] == "hung: no answer within 0.5 s"
    assert verdicts["crashes"].startswith("crashed")
    assert verdicts["raises"].startswith("raised ValueError")


def test_children_work_beside_each_other():
    names = [f"hangs {i}" for i in range(3)]
    with pool(4) as several:
        several.check_all([(QUESTION, "fast")] * 3, lambda: True)
        begin = time.monotonic()
        several.check_all([(Question("op", i, ("none", "hangs")), "hangs") for i in range(len(names))], lambda: True)
        assert time.monotonic() - begin < 1.3


def test_nothing_is_begun_when_time_is_up():
    with pool(2) as several:
        assert several.check_all([(QUESTION, "fast")], lambda: False) == {}
        assert several.check_all([], lambda: True) == {}


def test_memory_and_cores_bound_the_children():
    def count(cores: int, memory: int) -> int:
        return len(ProbePool(lambda: Probe(Misbehaving()), cores, memory)._probes)

    assert count(64, 1 << 40) == 12
    assert count(4, 1 << 40) == 3
    assert count(64, 24 << 30) == 3
    assert count(1, 1) == 1


def test_a_child_that_died_while_nobody_asked_is_replaced():
    with pool(2) as several:
        several.check_all([(QUESTION, "fast")], lambda: True)
        (probe,) = several._probes
        assert probe._process is not None
        probe._process.kill()
        probe._process.wait()
        assert several.check_all([(QUESTION, "slow")], lambda: True) == {(QUESTION, "slow"): ""}


def test_ctrl_c_ends_it_whatever_candidates_are_left(monkeypatch):
    from concurrent.futures import Future

    def interrupted(self, timeout=None):
        time.sleep(0.3)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    patient = ProbePool(lambda: Probe(Misbehaving(), check_deadline_s=30, default_deadline_s=30), 2, 1 << 40)
    begin = time.monotonic()
    with patient as several, pytest.raises(KeyboardInterrupt):
        several.check_all([(QUESTION, "hangs")] * 5, lambda: True)
    assert time.monotonic() - begin < 10

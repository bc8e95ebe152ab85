"""Several children at once come to the verdicts of one."""

from __future__ import annotations

import time

from pellucid.tuning.gate import Probe
from pellucid.tuning.measure import Question
from pellucid.tuning.pool import ProbePool
from tests.tuning.simulated import Misbehaving

NAMES = ("fast", "wrong", "hangs", "crashes", "raises", "slow", "too large")
QUESTION = Question("op", 1, ("none", *NAMES))


def pool(cores: int) -> ProbePool:
    return ProbePool(lambda: Probe(Misbehaving(), check_deadline_s=0.5, default_deadline_s=0.5), cores)


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

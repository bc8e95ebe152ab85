"""Benches that do what a test says: what runs in a real probe's child."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from pellucid.tuning.measure import Question
from tests.tuning.simulated import Misbehaving


@dataclass(frozen=True)
class StartsLate(Misbehaving):
    """A bench whose process needs a minute before it can be asked anything."""

    def start(self) -> None:
        time.sleep(60)


@dataclass(frozen=True)
class Acting:
    """`acts`: candidate -> one of the names that `Misbehaving` knows; all others are right."""

    acts: Mapping[str, str]

    def start(self) -> None: ...

    def check(self, question: Question, candidate: str) -> str:
        return Misbehaving().check(question, self.acts.get(candidate, "right"))

    def sample(self, question: Question, candidate: str) -> float:
        return Misbehaving().sample(question, self.acts.get(candidate, "right"))

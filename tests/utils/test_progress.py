"""The status line of a load: bytes, rate and time left, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from pellucid.models.weights import LoadProgress
from pellucid.utils import progress
from pellucid.utils.progress import StatusLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_few_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    status = StatusLine("loading", stream)
    for second in range(12):
        clock[0] = 100.0 + second
        status.update(LoadProgress(second * 10**9, 547 * 10**9, second or 1))
    status.close()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "loading: 5.00 of 547.00 GB, 1.00 GB/s, 542 s left",
        "loading: 10.00 of 547.00 GB, 1.00 GB/s, 537 s left",
    ]


def test_a_terminal_gets_one_line_that_is_wiped(clock: list[float]) -> None:
    stream = Terminal()
    status = StatusLine("loading", stream)
    clock[0] += 1
    status.update("half")
    clock[0] += 1
    status.update("all")
    status.close()
    assert stream.getvalue().split("\r") == ["", "loading: half", "loading: all ", " " * 12, ""]

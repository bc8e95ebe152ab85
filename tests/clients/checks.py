"""What every client script shares: which server to ask, and its checks told as TAP lines. Runs in the clients' venvs.

Standard library only. A script gives its test cases to `main`; `run` reads the lines.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import unittest
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUESTION = "What is gravity?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
KEY_NOT_CHECKED = "none"
"""The key to give for a server that checks none: what tests a wrong key is then skipped."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. `url` has no path; `v1` is what OpenAI's clients call the base URL."""

    url: str
    model: str
    api_key: str
    only: str | None = None

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def gauge(self, name: str) -> float:
        """The sum over all labels of the metric `<prefix>:name`.

        Raises:
            AssertionError: /metrics does not have it.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^\w+:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return sum(float(value) for value in found)

    def requests_in_engine(self) -> float:
        return self.gauge("num_requests_running") + self.gauge("num_requests_waiting")

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Raises AssertionError when requests still run or wait after `seconds`: an abort did not arrive."""
        wait_for(lambda: self.requests_in_engine() == 0, seconds, "requests are still in the engine")


def wait_for(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Raises AssertionError, saying `otherwise`, when the condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} after {seconds:g} s"
        time.sleep(0.05)


def read_target() -> Target:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("url", help="the server, without a path: http://127.0.0.1:8000")
    parser.add_argument("model", help="the served model's name")
    parser.add_argument("--api-key", default=KEY_NOT_CHECKED)
    parser.add_argument("--only", metavar="TEXT", help="only the checks with TEXT in their name")
    options = parser.parse_args()
    return Target(options.url.rstrip("/"), options.model, options.api_key, options.only)


class TapResult(unittest.TestResult):
    """Writes `ok 3 - name` or `not ok 3 - name`, and below it the error as `# ` lines. A subtest counts as its test."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._errors: list[str] = []
        self._directive = ""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._errors.append(self.errors[-1][1])

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._errors.append(self.failures[-1][1])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            told = self.failures if issubclass(err[0], test.failureException) else self.errors
            self._errors.append(f"{subtest}\n{told[-1][1]}")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._directive = f" # SKIP {reason}"

    def stopTest(self, test: unittest.TestCase) -> None:
        name = f"{type(test).__name__}: {_name(test)}"
        state = "not ok" if self._errors else "ok"
        sys.stdout.write(f"{state} {self.testsRun} - {name}{self._directive}\n")
        for line in "\n".join(self._errors).splitlines():
            sys.stdout.write(f"# {line}\n")
        sys.stdout.flush()
        super().stopTest(test)


def _name(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2].removeprefix("test_").replace("_", " ")


def main(*cases: type[unittest.TestCase]) -> None:
    """Run the checks of all `cases`; exit status 1 when one fails or none ran."""
    loader = unittest.TestLoader()
    tests = [case(name) for case in cases for name in loader.getTestCaseNames(case)]
    only = TARGET.only
    result = TapResult()
    unittest.TestSuite(test for test in tests if only is None or only in _name(test)).run(result)
    sys.stdout.write(f"1..{result.testsRun}\n")
    sys.exit(0 if result.testsRun and result.wasSuccessful() else 1)


TARGET = read_target()

"""The gate before speed: a candidate must answer, in time, with the right numbers. Called by `tuning.session`.

Candidates run in a child process with a deadline: a library that crashes or hangs there is a `Measurement` that is not
right, with the reason, and never an outage here.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pellucid.tuning.measure import CannotMeasureError, Question, TrialFailedError
from pellucid.utils.process import child_environment

if TYPE_CHECKING:
    import torch

CHECK_DEADLINE_S = 60.0
"""Of a first run: kernels are compiled in it."""

DEFAULT_DEADLINE_S = 180.0
"""Of the default's: where nothing is compiled yet, everything beside it is compiled in it too."""

SAMPLE_DEADLINE_S = 30.0
"""Of a sample: after a crash, what it needs is made anew."""

START_DEADLINE_S = 60.0

TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest error beside the reference's length; a row of its own may have `ROW_SLACK` times as much."""

ROW_SLACK = 3.0


class Bench(Protocol):
    """What can run candidates: in this process, or in a child behind a `Probe`."""

    def start(self) -> None:
        """Import what every candidate needs: no candidate's deadline is for that."""
        ...

    def check(self, question: Question, candidate: str) -> str:
        """Run it once, on inputs where mistakes show; why it is wrong, or nothing. May raise what it likes."""
        ...

    def sample(self, question: Question, candidate: str) -> float:
        """Seconds of one run."""
        ...


@dataclass(frozen=True, slots=True)
class GatedTrial:
    """A candidate that passed the gate. Implements `measure.Trial`."""

    bench: Bench
    question: Question
    name: str

    def sample(self) -> float:
        seconds = self.bench.sample(self.question, self.name)
        # `not >` and not `<=`: NaN is no time.
        if not seconds > 0:
            raise TrialFailedError(f"took {seconds} s, which is no time")
        return seconds


def gate(bench: Bench, question: Question, candidate: str) -> str:
    """Why the candidate can't be chosen, or nothing. Raises CannotMeasureError."""
    try:
        return bench.check(question, candidate)
    except TrialFailedError as error:
        return str(error)


def differs(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    """How `found` [rows, ...] is not `wanted`, or nothing. Rows that are zeros in `wanted` (padded ones) must be zeros.

    The whole may be `tolerance` of the reference's length away, and no row more than `ROW_SLACK` times that: an error
    in one row must not hide among the others. NaN never passes.
    """
    import torch

    if found.shape != wanted.shape:
        return f"has shape {tuple(found.shape)}, the reference {tuple(wanted.shape)}"
    a, b = (x.double().reshape(x.shape[0], -1) for x in (found, wanted))
    wild = ~a.isfinite().all(1)
    if bool(wild.any()):
        return f"row {int(wild.nonzero()[0])} has values that are not finite"
    blank = (b == 0).all(1)
    touched = blank & (a != 0).any(1)
    if bool(touched.any()):
        return f"padded row {int(touched.nonzero()[0])} is not zeros"
    error, length = torch.linalg.vector_norm(a - b, dim=1), torch.linalg.vector_norm(b, dim=1)
    share = error / length.clamp_min(1e-30)
    share[blank] = 0.0
    worst = int(share.argmax())
    if not float(share[worst]) <= ROW_SLACK * tolerance:
        return (
            f"row {worst} differs by {float(share[worst]):.2g} of the reference, {ROW_SLACK * tolerance:g} is allowed"
        )
    whole = float(error.norm() / length.norm().clamp_min(1e-30))
    if not whole <= tolerance:
        return f"differs by {whole:.2g} of the reference, {tolerance:g} is allowed"
    return ""


class Probe:
    """A `Bench` in a child process: `python -m pellucid.tuning.probe_child`. Started when it is first asked.

    `bench` travels there by pickle. A child that died or was killed is replaced at the next question.

    Every method raises TrialFailedError when the candidate raised, crashed, or did not answer in time, and
    CannotMeasureError when the child does not start or has no room.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        check_deadline_s: float = CHECK_DEADLINE_S,
        sample_deadline_s: float = SAMPLE_DEADLINE_S,
        default_deadline_s: float = DEFAULT_DEADLINE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._bench, self._environment = bench, environment
        self._check_deadline_s, self._sample_deadline_s = check_deadline_s, sample_deadline_s
        self._default_deadline_s = default_deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the probe)

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._stderr.close()

    def start(self) -> None:
        if self._connection is None:
            self._connection = self._start()

    def kill(self) -> None:
        """From another thread: whoever waits for an answer hears that the child crashed."""
        process = self._process
        if process is not None:
            process.kill()

    def check(self, question: Question, candidate: str) -> str:
        first = bool(question.order) and candidate == question.order[0]
        longest = max(self._check_deadline_s, self._default_deadline_s if first else 0.0)
        return str(self._ask("check", question, candidate, longest))

    def sample(self, question: Question, candidate: str) -> float:
        return float(self._ask("sample", question, candidate, self._sample_deadline_s))

    def _ask(self, what: str, question: Question, candidate: str, deadline: float) -> Any:
        self.start()
        assert self._connection is not None
        try:
            self._connection.send((what, question, candidate))
        except OSError:
            # It died since its last answer.
            self._stop()
            self.start()
            self._connection.send((what, question, candidate))
        kind, value = self._receive(self._connection, deadline)
        if kind == "no room":
            # What the child holds by now may be what is missing.
            self._stop()
            raise CannotMeasureError(value)
        if kind == "broke":
            self._stop()
        if kind != "is":
            raise TrialFailedError(f"raised {value}")
        return value

    def _start(self) -> Connection[Any, Any]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pellucid.tuning.probe_child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env=child_environment(**(self._environment or {})),
            )
        connection = Connection(ours.detach())
        connection.send(self._bench)
        try:
            self._receive(connection, START_DEADLINE_S)
        except TrialFailedError as error:
            raise CannotMeasureError(f"the process for it did not start: it {error}") from None
        return connection

    def _receive(self, connection: Connection[Any, Any], deadline: float) -> Any:
        try:
            if not connection.poll(deadline):
                self._stop()
                raise TrialFailedError(f"hung: no answer within {deadline:g} s")
            return connection.recv()
        except (EOFError, OSError):
            raise TrialFailedError(f"crashed: {self._post_mortem()}") from None

    def _post_mortem(self) -> str:
        """How the child ended, and the last line that it wrote."""
        assert self._process is not None
        code = self._process.wait()
        self._stop()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        self._stderr.seek(0)
        self._stderr.truncate()
        return f"{how}: {lines[-1].strip()[:200]}" if lines else how

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

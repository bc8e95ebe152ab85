"""`GrammarGuard`: a process that compiles what strangers send, so that no other process dies of it.

Used by `structured_output.GrammarCompiler.check`. llguidance has limits, but some grammars take it minutes and
gigabytes before it reaches one, and native code can't be stopped from within. The guard ends itself when a grammar
takes too long, or too much memory, and another one takes its place.

Both ends speak in frames: a length in 4 bytes, big end first, then as many bytes. First go the vocabulary's token
lengths, its bytes and its end tokens, and an empty frame comes back. Then each grammar is answered by the reason why it
can't be compiled, or by an empty frame.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, TypeVar

from pellucid.core import PellucidError

T = TypeVar("T")

TIMEOUT_S = 1.0
MEMORY_BYTES = 1 << 30
"""Beside what the process has when it begins to compile."""

LIMITS: dict[str, int | bool] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""llguidance's own, for every compilation here."""

STACK_BYTES = 256 << 20
"""The compiler recurses. Reserved, not used: the deepest grammar that passes `lark`'s limits takes a part of it."""


class GrammarGuard:
    """One guard for one vocabulary. Thread-safe: grammars are compiled one after the other.

    `tokens` are in llguidance's form, with special ones marked.
    """

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self._tokens, self._eos_token_ids = tokens, eos_token_ids
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> str | None:
        """llguidance's error message, empty if it compiles; None if it took too long, or too much memory.

        Raises:
            PellucidError: the process can't be started.
        """
        with self._lock:
            stdin, stdout = self._pipes()
            try:
                _send(stdin, grammar.encode())
                return _receive(stdout).decode()
            except (EOFError, OSError):
                self._end()
                return None
            except BaseException:
                # An answer that nobody waited for must not be taken for the next one.
                self._end()
                raise

    def close(self) -> None:
        with self._lock:
            self._end()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-m", "pellucid.tokenizer.grammar_guard"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            stdin, stdout = self._streams(self._process)
            try:
                _send(stdin, _pack(map(len, self._tokens)))
                _send(stdin, b"".join(self._tokens))
                _send(stdin, _pack(self._eos_token_ids))
                _receive(stdout)
            except (EOFError, OSError):
                self._end()
                raise PellucidError("the process that checks grammars can't be started") from None
        return self._streams(self._process)

    @staticmethod
    def _streams(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Vocabulary:
    """The protocol by which llguidance takes a vocabulary from Python; `tokenize` is for text without a choice."""

    is_tokenizer_wrapper = True
    special_token_ids: Sequence[int] = ()
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int, tokenize: Any) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self._tokenize = tokenize

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenize(text))


_stack_size = threading.Lock()


def run_deep(build: Callable[[], T], timeout_s: float | None) -> T | None:
    """The result of `build`, run with a deep stack; None if it takes too long, and then goes on for nothing."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(build()), name="compile-grammar", daemon=True)
    # A setting of the process, read when a thread starts.
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(timeout_s)
    return results[0] if results else None


def _pack(numbers: Any) -> bytes:
    return array("I", numbers).tobytes()


def _unpack(data: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(data)
    return numbers


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """Raises EOFError when the other end is gone."""
    head = stream.read(4)
    size = int.from_bytes(head, "big")
    data = stream.read(size) if len(head) == 4 else b""
    if len(head) < 4 or len(data) < size:
        raise EOFError
    return data


def main() -> None:
    import signal
    from importlib import import_module

    guidance: Any = import_module("llguidance")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    ends = list(accumulate(_unpack(_receive(stdin)), initial=0))
    data, eos = _receive(stdin), _unpack(_receive(stdin)).tolist()
    tokens = [data[begin:end] for begin, end in pairwise(ends)]
    vocabulary: Any = guidance.LLTokenizer(
        Vocabulary(tokens, eos[0], lambda text: vocabulary.greedy_tokenize(text)), eos_token=eos
    )
    limits = guidance.LLParserLimits(**LIMITS)

    def judge(grammar: str) -> str:
        matcher = guidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return str(matcher.get_error())

    _limit_memory()
    _send(stdout, b"")
    while True:
        grammar = _receive(stdin).decode()
        # Nobody handles the alarm: it ends the process, in native code too.
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        message = run_deep(partial(judge, grammar), None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(stdout, ("panic" if message is None else message).encode())


def _limit_memory() -> None:
    import resource

    statistics = Path("/proc/self/statm")
    if statistics.exists():
        used = int(statistics.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + STACK_BYTES + MEMORY_BYTES,) * 2)


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        main()

"""Logs: one entry per event whatever is in it, the request's id on each, and a log that can fail without harm."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core import PellucidError
from pellucid.server.telemetry.logs import (
    MAX_VALUE_CHARS,
    JsonFormatter,
    LogHandler,
    TextFormatter,
    configure_logging,
    current_request_id,
    request_log,
)

ENTRY = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) +[\w.]+: ")
NAUGHTY = 'x\n2026-01-01T00:00:00.000Z ERROR   fake: owned\r\x1b[31m\u2028\u202e\x85\x00\ud800"\\é'


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    names = ("", "pellucid", "pellucid.test", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "starlette")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, propagate, handlers in before:
        for handler in logger.handlers:
            if isinstance(handler, LogHandler):
                handler.close()
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers
    logging.captureWarnings(False)


def record(message: str, *args: Any, fields: dict[str, Any] | None = None, exc_info: Any = None) -> logging.LogRecord:
    made = logging.LogRecord("pellucid.test", logging.INFO, __file__, 1, message, args, exc_info)
    if fields is not None:
        made.__dict__["fields"] = fields
    return made


def logged(format: Any, write: Any, level: str = "info") -> list[str]:
    stream = io.StringIO()
    handler = configure_logging(format, level, stream)
    write()
    handler.close()
    assert handler.dropped == 0
    return stream.getvalue().splitlines()


@contextmanager
def handler_on(fd: int, capacity: int = 10_000) -> Iterator[LogHandler]:
    """A handler on a file descriptor, which is closed with the stream; the handler must hold its own."""
    with os.fdopen(os.dup(fd), "w") as stream:
        handler = LogHandler(TextFormatter(), stream, capacity)
    try:
        yield handler
    finally:
        handler.close()


def test_a_finished_request_is_one_line_of_text() -> None:
    def write() -> None:
        request_log(
            request_id="chatcmpl-1", method="POST", path="/v1/chat/completions", status=200, prompt_tokens=12,
            cached_tokens=8, output_tokens=5, finish_reason="stop", ttft_s=0.12345, e2e_s=1.0, client="10.0.0.7:1234",
        )  # fmt: skip

    (line,) = logged("text", write)
    assert ENTRY.match(line)
    assert line.endswith(
        "INFO    pellucid.request: request finished request_id=chatcmpl-1 method=POST path=/v1/chat/completions "
        "status=200 prompt_tokens=12 cached_tokens=8 output_tokens=5 finish_reason=stop ttft_s=0.123 e2e_s=1.0 "
        "client=10.0.0.7:1234"
    )


def test_a_finished_request_is_one_json_object() -> None:
    (line,) = logged("json", lambda: request_log(request_id="r1", method="GET", path="/v1/models", status=503))
    entry = json.loads(line)
    time.strptime(entry.pop("time"), "%Y-%m-%dT%H:%M:%S.%fZ")
    assert entry == {
        "level": "WARNING", "logger": "pellucid.request", "message": "request finished", "request_id": "r1",
        "method": "GET", "path": "/v1/models", "status": 503,
    }  # fmt: skip


def test_every_line_of_a_request_has_its_id_and_no_other() -> None:
    async def serve(name: str) -> None:
        current_request_id.set(name)
        await asyncio.sleep(0)
        logging.getLogger("pellucid.test").info("for %s", name)
        await asyncio.to_thread(logging.getLogger("pellucid.test").info, "thread for %s", name)

    async def serve_all() -> None:
        await asyncio.gather(*(serve(f"req-{number}") for number in range(5)))
        logging.getLogger("pellucid.test").info("for nobody")

    entries = [json.loads(line) for line in logged("json", lambda: asyncio.run(serve_all()))]
    assert len(entries) == 11
    for entry in entries:
        assert entry["message"].endswith(f"for {entry.get('request_id', 'nobody')}")


@given(st.text(), st.dictionaries(st.text(), st.one_of(st.text(), st.floats(), st.integers(), st.none(), st.binary())))
@settings(max_examples=200, deadline=None)
def test_json_lines_are_valid_whatever_is_logged(message: str, fields: dict[str, Any]) -> None:
    line = JsonFormatter().format(record("%s", message, fields=fields))
    assert line.isascii()
    assert len(line.splitlines()) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    entry = json.loads(line, parse_constant=refuse)
    assert entry["message"] == message
    assert entry["logger"] == "pellucid.test"


@given(st.text(), st.dictionaries(st.text(min_size=1), st.text()))
@settings(max_examples=200, deadline=None)
def test_text_lines_are_one_line_whatever_is_logged(message: str, fields: dict[str, str]) -> None:
    line = TextFormatter().format(record("%s", message, fields=fields))
    assert len((line + ".").splitlines()) == 1
    assert line.isprintable() or not re.search("[\x00-\x1f\x7f-\x9f]", line)
    line.encode()


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_request_id_cannot_write_a_line_of_its_own(format: str) -> None:
    def write() -> None:
        current_request_id.set(NAUGHTY)
        logging.getLogger("pellucid.test").info("from %s", NAUGHTY)
        request_log(request_id=NAUGHTY, method="GET", path="/", status=200, client=NAUGHTY)
        current_request_id.set(None)

    lines = logged(format, write)
    assert len(lines) == 2
    for line in lines:
        assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u202e]", line)
        assert ENTRY.match(line) if format == "text" else json.loads(line)["request_id"] == NAUGHTY


def test_a_value_cannot_pass_for_another_field() -> None:
    line = TextFormatter().format(record("m", fields={"client": "x status=200 y", "status": 401}))
    assert line.endswith('m client="x status=200 y" status=401')


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_exception_cannot_write_a_line_of_its_own(format: str) -> None:
    def write() -> None:
        try:
            raise ValueError(NAUGHTY)
        except ValueError:
            logging.getLogger("pellucid.test").exception("failed")

    lines = logged(format, write)
    if format == "json":
        assert len(lines) == 1
        assert "fake: owned" in json.loads(lines[0])["exception"]
    else:
        assert ENTRY.match(lines[0])
        assert all(line.startswith("    | ") for line in lines[1:])
        assert any("fake: owned" in line for line in lines[1:])


def test_what_a_client_sends_does_not_fill_the_disk() -> None:
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record("%s", "x" * 1_000_000, fields={"client": "y" * 1_000_000}))
        assert len(line) < 3 * MAX_VALUE_CHARS


def test_a_wrong_log_call_neither_raises_nor_is_lost() -> None:
    stream = io.StringIO()
    handler = LogHandler(TextFormatter(), stream)
    handler.handle(record("%d items", "three"))
    handler.close()
    assert "%d items" in stream.getvalue()


def test_loggers_of_the_libraries_go_the_same_way() -> None:
    def write() -> None:
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "starlette", "somebody.else"):
            logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger("uvicorn.error").info("started")
        logging.getLogger("uvicorn.error").warning("warned")
        logging.getLogger("uvicorn.access").info("GET / 200")
        logging.getLogger("somebody.else").info("chatter")
        logging.getLogger("somebody.else").warning("trouble")

    own = logging.StreamHandler(io.StringIO())
    logging.getLogger("uvicorn.error").addHandler(own)
    messages = [json.loads(line)["message"] for line in logged("json", write)]
    assert messages == ["warned", "trouble"]
    assert own.stream.getvalue() == ""


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("text", "info", first)
    handler = configure_logging("json", "debug", second)
    logging.getLogger("pellucid.test").debug("once")
    handler.close()
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("format", "level", "name"), [("xml", "info", "--log-format"), ("text", "loud", "--log-level")]
)
def test_an_unknown_format_or_level_is_refused(format: Any, level: str, name: str) -> None:
    with pytest.raises(PellucidError, match=name):
        configure_logging(format, level, io.StringIO())


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    with Path("/dev/full").open("w") as full, handler_on(full.fileno()) as handler:
        for number in range(50):
            handler.handle(record("line %d", number))
        handler.flush()
        assert handler.dropped == 50


def test_when_there_is_space_again_the_log_says_what_is_missing(tmp_path: Path) -> None:
    """The limit on a file's size makes the kernel refuse writes half-way, as a disk that fills up does."""
    script = """
import json, logging, resource, sys
from pathlib import Path
from pellucid.server.telemetry.logs import JsonFormatter, LogHandler
path = Path(sys.argv[1])
handler = LogHandler(JsonFormatter(), path.open("w"))
def log(count):
    for number in range(count):
        handler.handle(logging.LogRecord("t", logging.INFO, "", 1, "x" * 80, (), None))
    handler.flush()
log(3)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
log(5)
lost = handler.dropped
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log(2)
print(json.dumps([lost, handler.dropped]))
"""
    path = tmp_path / "log"
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [5, 5]
    assert result.stderr == ""
    whole, broken = [], []
    for line in path.read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:
            broken.append(line)
    # Half an entry is what the kernel took of the first one lost; it must not swallow the next.
    assert len(broken) == 1
    assert [entry["message"] for entry in whole] == ["x" * 80] * 3 + ["log lines were dropped"] + ["x" * 80] * 2
    assert whole[3]["dropped"] == 5
    assert whole[3]["cause"] == "File too large"


def test_a_reader_that_went_away_costs_lines_and_a_new_one_gets_them(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY)
    with handler_on(writer) as handler:
        os.close(writer)
        handler.handle(record("one"))
        handler.flush()
        assert b"one" in os.read(reader, 1000)
        os.close(reader)
        handler.handle(record("two"))
        handler.flush()
        assert handler.dropped == 1
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        handler.handle(record("three"))
        handler.flush()
        notice, three = os.read(reader, 1000).decode().splitlines()
        assert notice.endswith('log lines were dropped dropped=1 cause="Broken pipe"')
        assert three.endswith("three")
        os.close(reader)


def test_a_stalled_reader_holds_up_no_one_and_memory_is_bounded() -> None:
    reader, writer = os.pipe()
    with handler_on(writer, capacity=100) as handler:
        os.close(writer)
        slowest = 0.0
        for number in range(3000):
            start = time.perf_counter()
            handler.handle(record("line %d %s", number, "x" * 100))
            slowest = max(slowest, time.perf_counter() - start)
        assert slowest < 1.0
        dropped = handler.dropped
        assert dropped > 1000
        start = time.perf_counter()
        handler.flush(0.1)
        assert time.perf_counter() - start < 1.0

        chunks: list[bytes] = []
        draining = threading.Thread(target=lambda: chunks.extend(iter(lambda: os.read(reader, 65536), b"")))
        draining.start()
        handler.flush(5.0)
        handler.handle(record("the last"))
        handler.close()
        draining.join(5.0)
        lines = b"".join(chunks).decode().splitlines()
        told = [int(number) for line in lines for number in re.findall(r"were dropped dropped=(\d+)", line)]
        assert sum(told) == dropped
        assert len(told) < 20
        assert len(lines) == 3000 - dropped + 1 + len(told)
        assert lines[-1].endswith("the last")
    os.close(reader)


def test_logs_never_go_to_the_connection_that_got_the_number_of_a_closed_stream() -> None:
    reader, writer = os.pipe()
    other_reader, other_writer = os.pipe()
    stream = os.fdopen(writer, "w")
    handler = LogHandler(TextFormatter(), stream)
    stream.close()
    os.dup2(other_writer, writer)
    handler.handle(record("secret"))
    handler.close()
    assert b"secret" in os.read(reader, 1000)
    os.set_blocking(other_reader, False)
    with pytest.raises(BlockingIOError):
        os.read(other_reader, 1)
    for fd in (reader, writer, other_reader, other_writer):
        os.close(fd)


def test_a_process_without_standard_error_counts_and_goes_on() -> None:
    handler = configure_logging("text", "info", None)
    logging.getLogger("pellucid.test").info("nobody hears")
    handler.flush()
    assert handler.dropped == 1
    closed = io.StringIO()
    closed.close()
    handler = configure_logging("text", "info", closed)
    logging.getLogger("pellucid.test").info("nobody hears")
    handler.flush()
    assert handler.dropped == 1


def test_the_last_lines_are_written_before_the_process_ends() -> None:
    script = """
import logging, sys
from pellucid.server.telemetry.logs import configure_logging
configure_logging("text", "info", sys.stderr)
for number in range(2000):
    logging.getLogger("pellucid.test").info("line %d", number)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [line.rsplit(" ", 1)[1] for line in result.stderr.splitlines()] == [str(n) for n in range(2000)]

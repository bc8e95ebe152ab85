"""Logging that can't hurt the server: text or JSON lines with request ids. `serve` configures it, endpoints write.

A log line is formatted where it is written and handed to a thread that owns the file, so a slow disk or a stalled
reader of a pipe never holds up the event loop. What can't be written is dropped and counted, and the log says so as
soon as it can be written again.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from pellucid.core import PellucidError

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

CAPACITY = 10_000
"""Lines that may wait for the writer; more are dropped."""

MAX_VALUE_CHARS = 16_384
"""A longer message, value or trace is cut in its middle: what a client sends must not fill the disk."""

NOTICE_INTERVAL_S = 1.0
"""Lines about dropped lines are at least so far apart while more are waiting."""

FLUSH_S = 1.0
"""How long the end of the process waits for the last lines."""

FOREIGN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "starlette")

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""The id of the request that this task serves; every log line written under it carries it."""

# Line breaks of any kind, terminal escapes, text that runs backwards, and what no encoding takes.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN_VALUE = re.compile(r"[\w.:/@+%,-]+")


def configure_logging(format: LogFormat, level: str, stream: TextIO | None) -> LogHandler:
    """Send every logger of the process, uvicorn's and starlette's too, to `stream` (None: count and drop).

    Libraries other than those speak from `warning` up. A second call replaces the first. uvicorn must be run with
    `log_config=None`. Raises PellucidError for an unknown format or level.
    """
    if format not in FORMATS:
        raise PellucidError(f"--log-format {format!r}: use {' or '.join(FORMATS)}")
    if level.lower() not in LEVELS:
        raise PellucidError(f"--log-level {level!r}: use one of {', '.join(LEVELS)}")
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = LogHandler(JsonFormatter() if format == "json" else TextFormatter(), stream)
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, LogHandler) or type(old) is logging.StreamHandler:
            root.removeHandler(old)
            old.close()
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    for name in ("pellucid", *FOREIGN_LOGGERS):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(number)
    # One line per request is `request_log`'s, and of its start and end the server speaks itself.
    for name in FOREIGN_LOGGERS:
        logging.getLogger(name).setLevel(number if number < logging.INFO else max(number, logging.WARNING))
    logging.captureWarnings(True)
    return handler


def request_log(
    *,
    request_id: str,
    method: str,
    path: str,
    status: int,
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    output_tokens: int = 0,
    finish_reason: str | None = None,
    error: str | None = None,
    param: str | None = None,
    ttft_s: float | None = None,
    e2e_s: float | None = None,
    client: str | None = None,
) -> None:
    """The one line of a finished request, at `info`, or `warning` for a 5xx or a stream that was cut short.

    Never its text, never a key: `error` is what the client was told, with at most some characters of one field. `path`
    is without the query. Times are seconds, written to the millisecond; what is None is left out, and so are the
    counts of a request without a prompt.
    """
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": method,
        "path": path,
        "status": status,
        "prompt_tokens": prompt_tokens or None,
        "cached_tokens": cached_tokens if prompt_tokens else None,
        "output_tokens": output_tokens if prompt_tokens else None,
        "finish_reason": finish_reason,
        "error": error,
        "param": param,
        "ttft_s": None if ttft_s is None else round(ttft_s, 3),
        "e2e_s": None if e2e_s is None else round(e2e_s, 3),
        "client": client,
    }
    level = logging.WARNING if status >= 500 or finish_reason in CUT_SHORT else logging.INFO
    known = {key: value for key, value in fields.items() if value is not None}
    _REQUESTS.log(level, "request finished", extra={"fields": known})


CUT_SHORT = frozenset({"dead", "error", "shutdown", "request_timeout"})
"""Finish reasons of streams whose status was sent before something went wrong."""

_REQUESTS = logging.getLogger("pellucid.request")
_LOG = logging.getLogger("pellucid.log")


class _Formatter(logging.Formatter):
    """One record to one entry. Fields of a record are `extra={"fields": {...}}` and the request id."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {}
        current = current_request_id.get()
        if current is not None:
            fields["request_id"] = current
        given = getattr(record, "fields", None)
        if isinstance(given, Mapping):
            fields.update({str(key): value for key, value in given.items()})
        # `exc_text` alone: a record of another process.
        trace = record.exc_text or ""
        if record.exc_info and record.exc_info[0]:
            trace = self.formatException(record.exc_info)
        trace = _cut(trace)
        return self.entry(_time(record.created), record, _cut(_message(record)), fields, trace)

    def entry(self, when: str, record: logging.LogRecord, message: str, fields: dict[str, Any], trace: str) -> str:
        raise NotImplementedError


class TextFormatter(_Formatter):
    """`2026-11-30T08:15:00.123Z INFO    pellucid.request: request finished request_id=... status=200`."""

    def entry(self, when: str, record: logging.LogRecord, message: str, fields: dict[str, Any], trace: str) -> str:
        pairs = "".join(f" {_escape(key)}={_quote(value)}" for key, value in fields.items())
        # A trace's lines are set in, so that no text in an exception can pass for an entry.
        lines = "".join(f"\n    | {_escape(line)}" for line in trace.splitlines())
        return f"{when} {record.levelname:<7} {_escape(record.name)}: {_escape(message)}{pairs}{lines}"


class JsonFormatter(_Formatter):
    """One JSON object per line; `time`, `level`, `logger`, `message`, the fields, and `exception` for a trace."""

    def entry(self, when: str, record: logging.LogRecord, message: str, fields: dict[str, Any], trace: str) -> str:
        own = {"time": when, "level": record.levelname, "logger": record.name, "message": message}
        values = {key: _json_value(value) for key, value in fields.items()} | own
        return json.dumps(values | {"exception": trace} if trace else values)


def _time(created: float) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, OSError):
        # A call with the wrong arguments is a mistake, but what it had to say is still wanted.
        return f"{record.msg!r} with arguments that don't fit it"


def _cut(text: str) -> str:
    over = len(text) - MAX_VALUE_CHARS
    half = MAX_VALUE_CHARS // 2
    return text if over <= 0 else f"{text[:half]}...({over} characters cut)...{text[-half:]}"


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def _quote(value: object) -> str:
    text = _cut(str(value))
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _json_value(value: object) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _cut(str(value))


class LogHandler(logging.Handler):
    """Writes entries to a stream from a thread of its own; counts in `dropped` what it can't write.

    The stream's file is held open under a number of our own: a closed standard error whose number a client's
    connection got next must not send logs to that client.
    """

    def __init__(self, formatter: logging.Formatter, stream: TextIO | None, capacity: int = CAPACITY) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._capacity = capacity
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._closed = False
        self._dropped = self._told = 0
        self._notice_due = 0.0
        self._reason = ""
        self._broken_line = False
        self._stream, self._fd = stream, _duplicate(stream)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Entries lost since the start."""
        return self._dropped

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one entry. Never raises and never waits for the file."""
        entry = self._encode(record)
        with self._changed:
            if self._closed or len(self._waiting) >= self._capacity:
                self._drop("the log is written slower than it grows")
                return
            self._waiting.append(entry)
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait until all is written or dropped, at most so long. Call it before `os._exit`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout_s)

    def close(self) -> None:
        """Flush, then drop whatever comes."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
                entry, self._writing = self._waiting.popleft(), True
            self._write(entry)
        if self._fd is not None:
            os.close(self._fd)

    def _write(self, entry: bytes) -> None:
        """Write an entry, after a line about those dropped before it."""
        try:
            unsaid = self._dropped - self._told
            if unsaid and (not self._waiting or time.monotonic() >= self._notice_due):
                self._write_all(self._notice(unsaid))
                self._told += unsaid
                self._notice_due = time.monotonic() + NOTICE_INTERVAL_S
            self._write_all(entry)
        except OSError as error:
            self._drop(error.strerror or type(error).__name__)
        except ValueError:
            self._drop("the stream is closed")

    def _notice(self, dropped: int) -> bytes:
        fields = {"fields": {"dropped": dropped, "cause": self._reason}}
        record = _LOG.makeRecord(
            _LOG.name, logging.WARNING, __file__, 0, "log lines were dropped", (), None, extra=fields
        )
        return self._encode(record)

    def _encode(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode(errors="backslashreplace") + b"\n"

    def _drop(self, reason: str) -> None:
        with self._changed:
            self._dropped += 1
            self._reason = reason

    def _write_all(self, entry: bytes) -> None:
        """Raises OSError or ValueError when the file takes no more."""
        if self._fd is None:
            if self._stream is None:
                raise ValueError("no stream")
            self._stream.write(entry.decode())
            self._stream.flush()
            return
        # A disk that fills up leaves half a line, which must not run into the next one.
        rest = memoryview(b"\n" + entry if self._broken_line else entry)
        while rest:
            try:
                written = os.write(self._fd, rest)
            except BlockingIOError:
                # The other holder of this pipe made it non-blocking.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(1000)
                continue
            self._broken_line = written < len(rest)
            rest = rest[written:]


def _duplicate(stream: TextIO | None) -> int | None:
    """A descriptor of our own for the stream's file; None for a stream in memory, or one closed already."""
    if stream is None:
        return None
    try:
        stream.flush()
        return os.dup(stream.fileno())
    except (io.UnsupportedOperation, ValueError, OSError):
        return None

"""`KeyRing`: the API keys of the moment. Asked by `gate` for every request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from pellucid.core import PlanError

CHECK_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class KeyRing:
    """Keys given by flags, and those of a file, which is read again when it changes: keys are changed without a stop.

    A file that can't be read any more, or holds no key, leaves the keys as they are: a server that was locked must not
    open, nor lock everybody out, by an editor's half-written file.

    Raises:
        PlanError: at the start, the file can't be read or holds no key.
    """

    def __init__(self, given: Sequence[str] = (), file: str | None = None) -> None:
        # Arguments that are not UTF-8 come as surrogates, and stand for the bytes that a client sends.
        self._given = tuple(key.encode("utf-8", "surrogateescape") for key in given if key)
        self._file = None if file is None else Path(file)
        self._from_file: tuple[bytes, ...] = ()
        self._stamp: tuple[int, int] | None = None
        self._due = 0.0
        if self._file is not None:
            self._from_file = _read(self._file)
            self._stamp = _stamp_of(self._file)

    def current(self) -> tuple[bytes, ...]:
        """All keys; none means that no key is asked for."""
        if self._file is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + CHECK_INTERVAL_S
            self._refresh(self._file)
        return self._given + self._from_file

    def _refresh(self, file: Path) -> None:
        stamp = _stamp_of(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = _read(file)
        except PlanError as error:
            logger.warning("%s; the keys stay as they were", error)
        else:
            logger.info("--api-key-file was read again: %d keys", len(self._from_file))


def _stamp_of(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _read(file: Path) -> tuple[bytes, ...]:
    """One key a line; empty lines and comments are none."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--api-key-file {file} can't be read: {error}") from None
    found = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not found:
        raise PlanError(f"--api-key-file {file} holds no key; put one on a line")
    return found

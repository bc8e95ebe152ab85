"""What systemd is told of the server's state: the sd_notify protocol over its datagram socket. `serve` calls it.

Without `NOTIFY_SOCKET` in the environment, as under Docker or in a terminal, every call does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """Tells the service manager; a failure to do so is logged once and costs nothing else."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        # "@name" is a socket of the abstract namespace, whose name begins with a zero byte.
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._failed = False
        self.watchdog_interval_s = _watchdog_interval_s(environ)

    def ready(self, status: str) -> None:
        """Requests are taken from now on."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, text: str) -> None:
        """The line that `systemctl status` shows."""
        self._send(f"STATUS={_line(text)}")

    def loading(self, text: str, within_s: float) -> None:
        """Start-up goes on: a status line, and do not give up for another `within_s`."""
        self._send(f"STATUS={_line(text)}", f"EXTEND_TIMEOUT_USEC={int(within_s * 1e6)}")

    def stopping(self, status: str) -> None:
        """The server drains and then ends."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def watchdog(self) -> None:
        """The event loop still turns."""
        self._send("WATCHDOG=1")

    async def keep_watchdog(self) -> None:
        """Feed the watchdog from the event loop until cancelled; returns at once where none is set."""
        while self.watchdog_interval_s is not None:
            self.watchdog()
            await asyncio.sleep(self.watchdog_interval_s)

    def _send(self, *assignments: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.setblocking(False)
                notify.sendto("\n".join(assignments).encode(errors="replace"), self._address)
        except (OSError, ValueError) as error:
            if not self._failed:
                logger.warning("the service manager can't be told: %s", error)
            self._failed = True


def _line(text: str) -> str:
    """A line break would begin another assignment."""
    return " ".join(text.split())


def _watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
    """A third of the time after which systemd takes us for dead; None when it does not watch this process."""
    try:
        limit_us = int(environ.get("WATCHDOG_USEC", "0"))
        watched = int(environ.get("WATCHDOG_PID", str(os.getpid())))
    except ValueError:
        return None
    return limit_us / 3e6 if limit_us > 0 and watched == os.getpid() else None

"""sd_notify: what a service manager on the other end of a real socket receives."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pellucid.server.telemetry.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(2.0)
        yield listening


def notifier(manager: socket.socket, **environ: str) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": manager.getsockname(), **environ})


def test_each_state_is_one_datagram_of_assignments(manager: socket.socket) -> None:
    told = notifier(manager)
    told.loading("weights 3/7", within_s=60)
    told.ready("serving tiny on port 8000")
    told.status("5 running")
    told.stopping("draining, 5 running")
    told.watchdog()
    assert [manager.recv(4096).decode().split("\n") for _ in range(5)] == [
        ["STATUS=weights 3/7", "EXTEND_TIMEOUT_USEC=60000000"],
        ["READY=1", "STATUS=serving tiny on port 8000"],
        ["STATUS=5 running"],
        ["STOPPING=1", "STATUS=draining, 5 running"],
        ["WATCHDOG=1"],
    ]


def test_a_status_cannot_smuggle_an_assignment(manager: socket.socket) -> None:
    notifier(manager).status("model\nREADY=1\r\nMAINPID=1 \udcff")
    assert manager.recv(4096) == b"STATUS=model READY=1 MAINPID=1 ?"


def test_an_abstract_socket_is_reached() -> None:
    name = f"pellucid-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.settimeout(2.0)
        Notifier({"NOTIFY_SOCKET": "@" + name}).status("here")
        assert listening.recv(100) == b"STATUS=here"


@pytest.mark.parametrize("address", ["", "/nonexistent/notify", "/" + "x" * 300, "a\0b"])
def test_without_a_manager_every_call_does_nothing(address: str, caplog: pytest.LogCaptureFixture) -> None:
    told = Notifier({"NOTIFY_SOCKET": address})
    for _ in range(3):
        told.ready("ready")
        told.stopping("stopping")
    assert len(caplog.records) == (1 if address else 0)


def test_a_manager_that_does_not_read_holds_up_no_one(manager: socket.socket) -> None:
    told = notifier(manager)
    for number in range(2000):
        told.status(f"{number} running")
    assert manager.recv(100) == b"STATUS=0 running"


def test_the_watchdog_is_fed_three_times_in_its_limit(manager: socket.socket) -> None:
    told = notifier(manager, WATCHDOG_USEC="150000", WATCHDOG_PID=str(os.getpid()))
    assert told.watchdog_interval_s == pytest.approx(0.05)

    async def feed() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(told.keep_watchdog(), 0.3)

    asyncio.run(feed())
    manager.setblocking(False)
    fed = 0
    while True:
        try:
            assert manager.recv(100) == b"WATCHDOG=1"
        except BlockingIOError:
            break
        fed += 1
    assert 2 <= fed <= 7


@pytest.mark.parametrize(
    "environ",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}],
)
def test_no_watchdog_is_fed_that_does_not_watch_this_process(environ: dict[str, str]) -> None:
    told = Notifier(environ)
    assert told.watchdog_interval_s is None
    asyncio.run(asyncio.wait_for(told.keep_watchdog(), 1.0))

"""Runs candidates and answers over a socket, FD: `python -m pellucid.tuning.probe_child FD`. Started by `gate.Probe`.

It ends when the other end of the socket is gone, also while a candidate hangs.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

from pellucid.core import PellucidError, PlanError
from pellucid.tuning.gate import Bench
from pellucid.tuning.measure import TrialFailedError
from pellucid.utils.process import end_with_parent


def main() -> None:
    """Raises nothing: what a candidate raises is an answer."""
    end_with_parent()
    with Connection(int(sys.argv[1])) as connection:
        try:
            bench: Bench = connection.recv()
            bench.start()
            connection.send(("is", None))
            serve(bench, connection)
        except EOFError:
            return


def serve(bench: Bench, connection: Connection[Any, Any]) -> None:
    """Answers until the other end is closed, with EOFError."""
    while True:
        what, question, candidate = connection.recv()
        try:
            answer = ("is", getattr(bench, what)(question, candidate))
        except TrialFailedError as error:
            answer = ("raised", str(error))
        except Exception as error:  # noqa: BLE001 (a third party's kernel may raise anything; it becomes the reason)
            line = str(error).strip().splitlines()
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                connection.send(("no room", "there was not enough free memory"))
                continue
            if isinstance(error, PellucidError) and not isinstance(error, PlanError):
                # A compiler that is not there, a folder that can't be written: nothing is said of the candidate.
                connection.send(("no room", line[0] if line else type(error).__name__))
                continue
            told = f"{type(error).__name__}: {line[0][:200]}" if line else type(error).__name__
            answer = ("broke" if _device_is_lost() else "raised", told)
        connection.send(answer)


def _device_is_lost() -> bool:
    """Whether every later call on the device fails too, as after an access to memory that is not there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()

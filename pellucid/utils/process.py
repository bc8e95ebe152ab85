"""Processes: how many children, that they end with their parent, and how their threads wait.

Used by `tuning`, `runner.compile_ahead` and the command line.
"""

from __future__ import annotations

import os
import sys
import threading
import time

WATCH_INTERVAL_S = 1.0


def children_for(cores: int, most: int) -> int:
    """As many as `cores` have room for beside the parent; `cores` are those that a quota leaves."""
    return max(1, min(most, cores - 1))


SPINS = "1000"
"""How often a thread of OpenMP looks for work before it sleeps: some microseconds, longer than a wake-up takes."""


def spin_briefly() -> None:
    """In this process and those that it starts, if OpenMP is not loaded yet and the user has not chosen.

    Its threads spin for milliseconds otherwise, and where another program has one of the cores, the one that is waited
    for does not run meanwhile: a quarter of the speed is left (docs/log/2026-11-30-openmp-waits.md).
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def child_environment(**more: str) -> dict[str, str]:
    """This process's, and what it imports from: it may have been started elsewhere."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def end_with_parent() -> None:
    """Ends this process within a second of its parent, whatever it is doing then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()

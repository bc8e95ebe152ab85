"""Child processes: how many, and that they end with their parent. Used by `tuning` and `runner.compile_ahead`."""

from __future__ import annotations

import os
import sys
import threading
import time

WATCH_INTERVAL_S = 1.0


def children_for(cores: int, most: int) -> int:
    """As many as `cores` have room for beside the parent; `cores` are those that a quota leaves."""
    return max(1, min(most, cores - 1))


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

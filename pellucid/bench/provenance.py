"""Where a figure comes from, and its spread: what every line of `results/` has. Used by each benchmark."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pellucid.utils.command import shown_command


def provenance(module: str) -> dict[str, Any]:
    """Command, day, commit, processor and Python of this run. Paths in the command lose their folders."""
    return {
        "command": f"python -m {module} {shown_command(sys.argv[1:])}".rstrip(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
    }


def spread(values: Sequence[float], digits: int | None = None) -> dict[str, float]:
    """Median, least and most of repeated measurements."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found if digits is None else {name: round(value, digits) for name, value in found.items()}


def save(record: Mapping[str, Any], file: Path | None) -> str:
    """Append the record to a JSONL file, if one is given; returns its line."""
    line = json.dumps(record)
    if file is not None:
        with file.open("a") as results:
            results.write(line + "\n")
    return line


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str | None:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or None

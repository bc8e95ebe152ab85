"""Finds the C++ compiler that builds the CPU kernels. Used by the hardware probe and `kernels.cpu_library`."""

from __future__ import annotations

import os
import shlex
import shutil

CANDIDATES = ("c++", "g++", "clang++")


def find_cxx() -> str | None:
    """Full path of `$CXX` if set and found, else of the first of c++, g++, clang++ on PATH, else None."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or CANDIDATES:
        path = shutil.which(name)
        if path:
            return path
    return None

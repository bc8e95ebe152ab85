"""Where Pellucid keeps what it may throw away: built kernels, downloaded models, measurements."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """`$PELLUCID_CACHE`, else `$XDG_CACHE_HOME/pellucid`, else `~/.cache/pellucid`, plus `parts`. Not created."""
    root = os.environ.get("PELLUCID_CACHE")
    if root:
        return Path(root).joinpath(*parts)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).joinpath("pellucid", *parts)

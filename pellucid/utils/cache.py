"""Where Pellucid keeps what it may throw away: built kernels, downloaded models, measurements."""

from __future__ import annotations

import os
from pathlib import Path

from pellucid.core import PellucidError


def cache_dir(*parts: str) -> Path:
    """`$PELLUCID_CACHE`, else `$XDG_CACHE_HOME/pellucid`, else `~/.cache/pellucid`, plus `parts`. Not created."""
    root = os.environ.get("PELLUCID_CACHE")
    if root:
        return Path(root).joinpath(*parts)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The XDG specification has relative paths ignored.
    return (base if base.is_absolute() else Path.home() / ".cache").joinpath("pellucid", *parts)


def make_cache_dir(path: Path) -> None:
    """Raises PellucidError when the folder can't be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PellucidError(
            f"the cache {path} can't be written ({error.strerror}); set PELLUCID_CACHE to a folder that can"
        ) from None

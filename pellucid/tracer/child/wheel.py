"""Files that the wheel brings and the unpacked tree does not have: engines ask whether they exist.

A tree holds only Python sources; RECORD names the rest (headers, tables of tuned kernels). Used by `engine`.
"""

from __future__ import annotations

import csv
import os
import pathlib
from collections.abc import Callable, Set
from typing import Any


def install(root: str) -> None:
    """Questions about existence below `root` are answered from RECORD; nothing can be read from such a file."""
    files, folders = _recorded(root)
    if files:
        for name, known in (("exists", files | folders), ("isfile", files), ("isdir", folders)):
            setattr(os.path, name, _also(getattr(os.path, name), root, known))
        for name, known in (("exists", files | folders), ("is_file", files), ("is_dir", folders)):
            setattr(pathlib.Path, name, _also(getattr(pathlib.Path, name), root, known))


def _recorded(root: str) -> tuple[Set[str], Set[str]]:
    """Paths of the wheel's files and of their folders, relative to `root`."""
    files: set[str] = set()
    for record in pathlib.Path(root).glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as file:
            files |= {row[0] for row in csv.reader(file) if row}
    folders = {str(parent) for name in files for parent in pathlib.PurePosixPath(name).parents}
    return files, folders


def _also(ask: Callable[..., bool], root: str, known: Set[str]) -> Callable[..., bool]:
    def exists(path: Any, *arguments: Any, **keywords: Any) -> bool:
        if ask(path, *arguments, **keywords):
            return True
        if not isinstance(path, str | os.PathLike):
            return False
        text = os.fspath(path)
        return isinstance(text, str) and text.startswith(root) and os.path.relpath(text, root) in known

    return exists

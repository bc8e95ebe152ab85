"""Names a checkpoint by its content, quickly: what artefacts made from a model record about it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from pellucid.models.checkpoint import Checkpoint

SAMPLE_BYTES = 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over the config, every tensor's name, type and shape, and the first 4096 bytes of its values.

    Reads a few kilobytes a tensor, so a checkpoint of 500 GB takes seconds; weights trained further differ in it.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    files: dict[Path, BinaryIO] = {}
    try:
        for name in sorted(checkpoint.tensors):
            info = checkpoint.tensors[name]
            digest.update(f"{name} {info.dtype} {list(info.shape)}".encode())
            if info.file not in files:
                files[info.file] = info.file.open("rb")
            file = files[info.file]
            file.seek(info.offset)
            digest.update(file.read(min(SAMPLE_BYTES, info.nbytes)))
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()

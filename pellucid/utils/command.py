"""The command that this process was started with, as a record may hold it. Used by results and the evidence store."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SECRET = re.compile(r"-[\w-]*(?:key|token|secret|password)", re.IGNORECASE)
"""Names of flags whose values are nobody else's: `--api-key`, `--hf-token`; not `--input-tokens`."""


def shown_command(argv: Sequence[str] | None = None) -> str:
    """Its words: paths without their folders, secrets as `***`."""
    shown: list[str] = []
    hidden = False
    for word in sys.argv if argv is None else argv:
        flag, equals, _ = word.partition("=")
        secret = _SECRET.fullmatch(flag) is not None
        if hidden and not word.startswith("--"):
            shown.append("***")
        elif secret and equals:
            shown.append(f"{flag}=***")
        else:
            shown.append(Path(word).name if "/" in word else word)
        hidden = secret and not equals
    return " ".join(shown)

"""Starts an `LLM` from the command line with a status line while weights load. Used by verbs that run it themselves."""

from __future__ import annotations

import logging
from typing import Literal

from pellucid.engine.engine import Engine
from pellucid.engine.llm import LLM
from pellucid.selection.args import EngineArgs
from pellucid.utils.progress import StatusLine


def load_llm(args: EngineArgs, requires: Literal["ids", "text", "chat"]) -> LLM:
    """Raises PellucidError as `LLM` does. What takes long before weights load (a download, a build) says so."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    status = StatusLine("loading")
    try:
        return LLM.from_engine(
            Engine(
                args,
                on_progress=status.update,
                on_measure=lambda what: status.update(f"measuring {what}"),
                requires=requires,
            )
        )
    finally:
        status.close()

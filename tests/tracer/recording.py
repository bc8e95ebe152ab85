"""What the tests of recording share: the rules that their small programs are rewritten by, and views of a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pellucid.tracer.child.recorder import Recorder
from pellucid.tracer.child.rewrite import Rules

FIELDS = frozenset({"backend", "page_size", "quantization", "kernel"})
RULES = Rules(FIELDS, declarers={"declare"}, returns={"choose_kernel": "kernel"})
Run = Callable[[str], Recorder]


def guards(assignment: dict[str, Any]) -> list[tuple[str, bool]]:
    return [(one["site"]["source"], one["taken"]) for one in assignment["guards"]]


def only(recorder: Recorder, field: str) -> dict[str, Any]:
    (found,) = (one for one in recorder.assignments if one["field"] == field)
    return found

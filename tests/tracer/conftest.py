"""A recorder that rewritten code reports to, and programs that run under it."""

from __future__ import annotations

import argparse
import builtins
import textwrap
from typing import Any

import pytest

from pellucid.tracer.child.recorder import Recorder
from pellucid.tracer.child.rewrite import RECORDER, rewrite
from tests.tracer.recording import RULES, Run


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder("/engine/")
    monkeypatch.setattr(builtins, RECORDER, made, raising=False)
    return made


@pytest.fixture
def run(recorder: Recorder) -> Run:
    def execute(source: str) -> Recorder:
        """Define what `source` defines, then record what its `main(args)` does."""
        text = textwrap.dedent(source)
        names: dict[str, Any] = {"__name__": "engine"}
        exec(compile(rewrite(text, "/engine/args.py", recorder, RULES), "/engine/args.py", "exec"), names)
        recorder.start()
        names["main"](argparse.Namespace(backend=None, page_size=1, quantization=None, sm=100, arch="SomeForCausalLM"))
        recorder.on = False
        return recorder

    return execute

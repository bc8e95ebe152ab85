"""How a trace is held against decisions that were obtained by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pellucid.tracer.agreement import Agreement, compare, compare_row
from pellucid.tracer.record import Assignment, Decision, Refusal, Site, Trace
from tests.tracer.fake_engine import write_fake_engine

EXPECTED = os.environ.get("PELLUCID_TRACE_DECISIONS")
CONFIGS = os.environ.get("PELLUCID_TRACE_CONFIGS")


def trace(*decisions: Decision, refusal: Refusal | None = None) -> Trace:
    return Trace("sglang", "0.0.1", "m", "SomeForCausalLM", "h200", (), decisions, refusal=refusal)


def decided(field: str, value: Any, line: int) -> Decision:
    site = Site("sglang/srt/server_args.py", line, "x")
    return Decision(field, value, "forced", "configuration", (Assignment(value, site),))


def row(**values: Any) -> dict[str, Any]:
    return {"engine": "sglang", "version": "0.0.1", "model": "m", "gpu": "h200", "lines": {}, "decisions": {}, **values}


def differences(expected: dict[str, Any], found: Trace, root: Path) -> list[str]:
    return [str(one) for _, one in compare_row(expected, found, root, "configuration") if one is not None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_fake_engine(tmp_path)


def test_equal_values_and_lines_agree_also_under_the_rows_own_names(root: Path) -> None:
    expected = row(
        decisions={"attention_decode": "fa3", "moe_runner_config": "auto", "moe_layer": {"method": "not compared"}},
        lines={"attention_backend": "sglang/srt/server_args.py:3"},
    )
    found = trace(decided("attention_backend", "fa3", 3), Decision("moe_runner_backend", "auto", "default", "static"))
    assert differences(expected, found, root) == []


def test_a_wrong_value_and_a_wrong_line_are_named(root: Path) -> None:
    place = "sglang/srt/server_args.py:1"
    expected = row(decisions={"page_size": 64}, lines={"page_size": place})
    value, line = differences(expected, trace(decided("page_size", 1, 3)), root)
    assert "page_size: expected 64, found 1" in value
    assert f"expected '{place}', found 'sglang/srt/server_args.py:3'" in line


def test_an_expected_line_that_only_reads_the_field_is_a_known_reason(root: Path) -> None:
    source = root / "sglang/srt/reads.py"
    source.write_text("def f(args):\n    page_size = args.page_size\n    return page_size\n")
    expected = row(decisions={"page_size": 1}, lines={"page_size": "sglang/srt/reads.py:2"})
    (found,) = differences(expected, trace(decided("page_size", 1, 3)), root)
    assert found.endswith("[that line only reads the field into a variable]")


def test_a_row_that_the_engine_refuses_agrees_with_a_refusal_alone(root: Path) -> None:
    expected = row(error="AssertionError: ")
    refused = trace(Decision("page_size", None, "unknown", "configuration"), refusal=Refusal("AssertionError"))
    assert differences(expected, refused, root) == []
    assert len(differences(expected, trace(decided("page_size", 1, 3)), root)) == 1


def test_a_summary_counts_what_agrees_and_what_has_a_reason() -> None:
    assert str(Agreement("sglang 0.0.1", 2, 10, 4, ())) == (
        "sglang 0.0.1: 2 rows; values 10/10, lines 4/4; 0 differences with a known reason"
    )


@pytest.mark.skipif(EXPECTED is None or CONFIGS is None, reason="PELLUCID_TRACE_DECISIONS and _CONFIGS name the rows")
def test_every_row_agrees_on_the_real_engines() -> None:
    assert EXPECTED is not None and CONFIGS is not None
    rows = json.loads(Path(EXPECTED).read_text(encoding="utf-8"))["rows"]
    for agreement in compare(rows, Path(CONFIGS), "layers", print):
        assert [str(one) for one in agreement.differences if not one.reason] == []

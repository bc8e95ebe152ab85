"""Cases that were checked by reading the engines' source: each names the lines that were read and what they must give.

Run with PELLUCID_TRACE_TESTS=1, which fetches the wheels that are not in the cache; they take minutes.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pellucid.tracer.gpus import simulated_gpu
from pellucid.tracer.record import Site, Trace
from pellucid.tracer.run import TraceRequest, trace_many
from pellucid.tracer.sources import fetch
from tests.headers import CONFIGS

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden_cases.json").read_text(encoding="utf-8"))
VERSIONS = sorted({(case["engine"], case["version"]) for case in CASES})
asked = pytest.mark.skipif(
    os.environ.get("PELLUCID_TRACE_TESTS") != "1", reason="PELLUCID_TRACE_TESTS=1 runs real engines"
)


def name_of(case: dict[str, Any]) -> str:
    return " ".join((case["engine"], case["version"], case["model"], case["gpu"], *case["flags"]))


def test_there_are_enough_cases_and_each_says_what_was_read() -> None:
    assert len(CASES) >= 20
    assert len({name_of(case) for case in CASES}) == len(CASES)
    for case in CASES:
        assert (CONFIGS / f"{case['model']}.json").is_file()
        assert len(case["read"]) > 20, name_of(case)
        assert ("expect" in case) != ("refusal" in case), name_of(case)
        assert simulated_gpu(case["gpu"]).count >= 1


@cache
def traces(engine: str, version: str, folder: Path) -> dict[str, Trace]:
    tree = fetch(engine, version)  # type: ignore[arg-type]
    cases = [case for case in CASES if (case["engine"], case["version"]) == (engine, version)]
    requests = [
        TraceRequest(
            tree,
            model_folder(folder, case["model"]),
            simulated_gpu(case["gpu"]),
            tuple(case["flags"]),
            depth=case.get("depth", "configuration"),
        )
        for case in cases
    ]
    return dict(zip(map(name_of, cases), trace_many(requests), strict=True))


def model_folder(root: Path, model: str) -> Path:
    folder = root / model
    folder.mkdir(exist_ok=True)
    shutil.copy(CONFIGS / f"{model}.json", folder / "config.json")
    separate = CONFIGS / f"{model}.hf_quant.json"
    if separate.exists():
        shutil.copy(separate, folder / "hf_quant_config.json")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@asked
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_trace_says_what_the_source_was_read_to_say(case: dict[str, Any], models: Path) -> None:
    trace = traces(case["engine"], case["version"], models)[name_of(case)]
    if "refusal" in case:
        assert trace.refusal is not None, "it did not refuse"
        assert not trace.refusal.ours, trace.refusal
        assert case["refusal"]["says"] in trace.refusal.message
        assert within(trace.refusal.site, case["refusal"]["lines"]), trace.refusal.site
        return
    assert trace.refusal is None, trace.refusal
    for field, expected in case["expect"].items():
        found = trace.decision(field)
        value = found.value
        for part in expected.get("at", "").split(".") if "at" in expected else ():
            value = value[part]
        assert (value, found.how) == (expected["value"], expected["how"]), (field, found.site)
        if "lines" in expected:
            last = found.history[-1]
            # The line that made the value, or that called the function which returned it.
            assert any(within(one, expected["lines"]) for one in (last.site, *last.stack[:1])), (field, last.site)


def within(site: Site | None, lines: str) -> bool:
    """Whether the site is in `file:first-last` or `file:line`."""
    file, _, numbers = lines.rpartition(":")
    first, _, last = numbers.partition("-")
    return site is not None and site.file == file and int(first) <= site.line <= int(last or first)

"""Lines that could set a field, read from the small engines without running them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pellucid.core import PellucidError
from pellucid.tracer.child.rewrite import Rules
from pellucid.tracer.record import Assignment
from pellucid.tracer.sources import SourceTree, cached, fetch
from pellucid.tracer.static import Sites, sites
from tests.tracer.fake_engine import VERSION, line_of, write_fake_engine

ARGUMENTS = "sglang/srt/server_args.py"
OVERRIDES = "sglang/srt/arg_groups/overrides.py"
FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dsa_decode_backend",
    "moe_runner_backend",
    "quantization",
    "kv_cache_dtype",
    "page_size",
    "sampling_backend",
    "disable_radix_cache",
    "mem_fraction_static",
)
RULES = Rules(frozenset(FIELDS), declarers={"declare_resolution"})


def decides(module: str) -> bool:
    return module == "sglang.srt.server_args" or module.startswith("sglang.srt.arg_groups.")


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    return SourceTree("sglang", VERSION, write_fake_engine(tmp_path), {})


@pytest.fixture
def found(tree: SourceTree) -> Sites:
    return sites(tree, decides, RULES)


def at(lines: tuple[Assignment, ...], value: str) -> Assignment:
    (one,) = (line for line in lines if line.value == value)
    return one


def conditions(line: Assignment) -> list[tuple[str, bool]]:
    return [(guard.site.source, guard.taken) for guard in line.guards]


def looks_at_a_name(line: Assignment) -> bool:
    return any(term.evidence == "name" for guard in line.guards for term in guard.terms)


def test_a_line_below_a_list_of_names_carries_every_condition_and_what_it_looks_at(
    found: Sites, tree: SourceTree
) -> None:
    line = at(found["attention_backend"], "'trtllm_mla'")
    assert line.site.line == line_of(tree.root, ARGUMENTS, 'self.attention_backend = "trtllm_mla"')
    assert line.site.function == "ServerArgs._handle_model_specific_adjustments"
    names, sm, unset = line.guards
    assert names.site.line == line_of(tree.root, ARGUMENTS, "if model_arch in [")
    assert [term.evidence for term in names.terms] == ["name"]
    assert sm.site.source == "is_sm100_supported()"
    assert [term.evidence for term in sm.terms] == ["hardware"]
    assert [term.expression for term in unset.terms] == [f"self.{field} is None" for field in FIELDS[:3]]
    assert all(term.truth is None and term.value is None for guard in line.guards for term in guard.terms)


def test_both_values_of_a_ternary_are_lines_under_opposite_conditions(found: Sites) -> None:
    lines = found["dsa_decode_backend"]
    assert {line.value: conditions(line)[-1] for line in lines} == {
        "'trtllm'": ("major >= 10", True),
        "'fa3'": ("major >= 10", False),
    }


def test_an_elif_chain_and_an_early_return_are_conditions_that_failed(found: Sites) -> None:
    triton = [line for line in found["attention_backend"] if line.value == "'triton'"][-1]
    assert conditions(triton)[-2:] == [("is_hopper()", False), ("is_sm100_supported()", False)]
    pytorch = found["sampling_backend"][-1]
    assert conditions(pytorch)[:2] == [
        ('os.environ.get("SGLANG_DETERMINISTIC") == "1"', False),
        ("self.sampling_backend is not None", False),
    ]


def test_a_tuple_gives_each_field_its_own_value(found: Sites) -> None:
    assert [line.value for line in found["prefill_attention_backend"]] == ["'fa3'"]
    assert [line.value for line in found["decode_attention_backend"]] == ["'flashmla'"]


def test_declared_fields_are_found_in_dictionaries_and_keywords(found: Sites, tree: SourceTree) -> None:
    assert [line.value for line in found["kv_cache_dtype"]] == ["'fp8_e4m3'", "'bfloat16'"]
    (declared,) = found["disable_radix_cache"]
    assert declared.value == "True"
    assert (declared.site.file, declared.site.line) == (OVERRIDES, line_of(tree.root, OVERRIDES, "radix_cache=True"))


def test_lines_come_in_the_order_of_the_files(found: Sites) -> None:
    for lines in found.values():
        places = [(line.site.file, line.site.line) for line in lines]
        assert places == sorted(places)


def test_a_test_of_a_name_and_one_of_the_machine_are_told_apart_by_their_words(found: Sites) -> None:
    assert [line.value for line in found["attention_backend"] if looks_at_a_name(line)] == [
        "'trtllm_mla'",
        "'flashinfer'",
    ]
    assert not any(looks_at_a_name(line) for line in found["kv_cache_dtype"])


def test_renaming_what_does_not_decide_changes_no_line(tmp_path: Path, found: Sites) -> None:
    moved = {"_handle_sampling_backend": "_pick_sampler", "mem_fraction_static": "static_share"}
    renamed = SourceTree("sglang", VERSION, write_fake_engine(tmp_path / "renamed", replace=moved), {})
    again = sites(renamed, decides, RULES)
    assert "mem_fraction_static" in found
    assert set(again) == set(found) - {"mem_fraction_static"}
    assert [line.value for line in again["sampling_backend"]] == [line.value for line in found["sampling_backend"]]


def test_a_tree_whose_code_has_moved_is_refused(tmp_path: Path) -> None:
    root = write_fake_engine(tmp_path)
    (root / "sglang/srt/server_args.py").unlink()
    (root / "sglang/srt/arg_groups/overrides.py").rename(root / "sglang/decide.py")
    with pytest.raises(PellucidError, match="none of the modules that decide"):
        sites(SourceTree("sglang", "9.0", root, {}), lambda name: name == "sglang.srt.server_args", RULES)


def test_a_module_in_newer_syntax_is_named(tmp_path: Path) -> None:
    root = write_fake_engine(tmp_path, extra={"sglang/srt/server_args.py": "from dataclasses ???\n"})
    with pytest.raises(PellucidError, match=r"server_args\.py can't be read by this Python"):
        sites(SourceTree("sglang", VERSION, root, {}), decides, RULES)


@pytest.mark.skipif(
    "0.5.9" not in cached("sglang") and not os.environ.get("PELLUCID_TRACE_TESTS"),
    reason="fetches a wheel; set PELLUCID_TRACE_TESTS=1",
)
def test_the_lines_of_sglang_0_5_9_are_those_found_by_hand() -> None:
    tree = fetch("sglang", "0.5.9")
    found = sites(tree, lambda name: name == "sglang.srt.server_args", RULES)
    trtllm = found["attention_backend"]
    assert (1283, "'trtllm_mla'") in [(line.site.line, line.value) for line in trtllm]
    # 35 statements, of which one is a ternary.
    assert (sum(map(looks_at_a_name, trtllm)), len(trtllm)) == (13, 36)
    moe = found["moe_runner_backend"]
    assert (sum(map(looks_at_a_name, moe)), len(moe)) == (10, 12)
